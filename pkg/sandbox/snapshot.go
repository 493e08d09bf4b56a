// SPDX-License-Identifier: Apache-2.0

package sandbox

import (
	"fmt"
	"regexp"
	"runtime"
	"slices"
	"strings"
)

// Options selects what a snapshot covers besides the caller's own network namespace, which is called the host here.
type Options struct {
	// Pods are included too. A pod whose namespace is gone is left out.
	Pods []*Pod
	// Dirs are state folders: path, mode, owner and content of everything below them.
	Dirs []string
	// Conntrack adds the connection tracking entries. They change with traffic, so only tests about them should set it.
	Conntrack bool
	// Ignore leaves out the records whose line, such as "host: link cni0", it matches.
	Ignore *regexp.Regexp
}

// Snapshot is the state in the host, the pods and the folders that a CNI plugin may change: links, addresses, routes, rules, nexthops,
// neighbours, forwarding entries, queueing disciplines, classes, filters, nftables, legacy iptables, sysctls and files. It is normalised,
// so that snapshots of equal states are equal: it has no indexes, handles, counters or timers, and nothing that the kernel changes by
// itself.
type Snapshot struct {
	scopes  map[string]bool
	records map[string]record
}

// A record is one object, with a name that is unique in its scope.
type record struct {
	scope  string  // "host" or "pod NAME"
	name   string  // "link eth0"
	fields []field // properties of the object that may change
	// owner names the record whose change explains a change of this one, which is then not reported.
	owner string
}

type field struct{ name, value string }

func (r record) key() string { return r.scope + ": " + r.name }

// Take returns a snapshot of the calling thread's namespace, the pods and the folders.
func Take(opt Options) (*Snapshot, error) {
	s := &Snapshot{scopes: map[string]bool{"host": true}, records: map[string]record{}}
	runtime.LockOSThread() // one thread and one namespace for all of the host's parts
	err := s.collect("host", opt)
	runtime.UnlockOSThread()
	if err != nil {
		return nil, fmt.Errorf("snapshot of the host: %w", err)
	}
	for _, pod := range opt.Pods {
		if pod.gone() {
			continue
		}
		scope := "pod " + pod.Name
		s.scopes[scope] = true
		if err := pod.Do(func() error { return s.collect(scope, opt) }); err != nil {
			return nil, fmt.Errorf("snapshot of pod %s: %w", pod.Name, err)
		}
	}
	for _, dir := range opt.Dirs {
		if err := s.collectFiles(dir, opt.Ignore); err != nil {
			return nil, fmt.Errorf("snapshot of %s: %w", dir, err)
		}
	}
	return s, nil
}

// collect adds the records of the calling thread's namespace.
func (s *Snapshot) collect(scope string, opt Options) error {
	c := &collector{scope: scope}
	if err := c.collect(opt.Conntrack); err != nil {
		return err
	}
	s.add(c.records, opt.Ignore)
	return nil
}

// add numbers records of the same name. All records of a name in a scope must come in one call.
func (s *Snapshot) add(records []record, ignore *regexp.Regexp) {
	same := map[string]int{}
	for _, r := range records {
		if ignore != nil && ignore.MatchString(r.key()) {
			continue
		}
		same[r.name]++
		if n := same[r.name]; n > 1 {
			r.name = fmt.Sprintf("%s (%d)", r.name, n)
		}
		slices.SortStableFunc(r.fields, func(a, b field) int { return strings.Compare(a.name, b.name) })
		s.records[r.key()] = r
	}
}

// String lists all records in order, one per line.
func (s *Snapshot) String() string {
	var b strings.Builder
	for _, key := range sortedKeys(s.records) {
		b.WriteString(key)
		for _, f := range s.records[key].fields {
			fmt.Fprintf(&b, " %s=%s", f.name, f.value)
		}
		b.WriteByte('\n')
	}
	return b.String()
}
