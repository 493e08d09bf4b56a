// SPDX-License-Identifier: Apache-2.0

// Package snapshot compares the network before and after a change. [Take] records all state that a CNI plugin may change, in the caller's
// network namespace and in pods, and [Diff] lists the differences.
package snapshot

import (
	"fmt"
	"regexp"
	"runtime"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// Options selects what a snapshot contains. The caller's network namespace, called the host here, is always in it.
type Options struct {
	// Pods are the pods in the snapshot, except those whose namespace is gone.
	Pods []*sandbox.Pod
	// Dirs are state folders. The snapshot contains the path, mode, owner and content of each file in them.
	Dirs []string
	// Conntrack includes connection tracking, which changes with traffic. Set it only in tests of connection tracking.
	Conntrack bool
	// Ignore excludes all records whose line matches, such as "host: link cni0".
	Ignore *regexp.Regexp
}

// Snapshot is what a CNI plugin may change of the host, the pods and the folders: links, addresses, routes, rules, nexthops, neighbours,
// forwarding entries, queueing disciplines, classes, filters, nftables, legacy iptables, sysctls and files. Snapshots of the same state are
// equal, because they have no indexes, handles, counters, timers or other values that the kernel changes by itself.
type Snapshot struct {
	scopes  map[string]bool
	records map[string]record
}

// A record describes one object, by a name that is unique within its scope.
type record struct {
	scope  string  // "host" or "pod NAME"
	name   string  // "link eth0"
	fields []field // properties of the object that may change
	// owner is empty or the record with which this one appears and vanishes. Diff then reports only the owner.
	owner string
}

type field struct{ name, value string }

func (r record) key() string { return r.scope + ": " + r.name }

func isGone(pod *sandbox.Pod) bool {
	var stat unix.Statfs_t
	return unix.Statfs(pod.Path, &stat) != nil || stat.Type != unix.NSFS_MAGIC
}

// Take returns a snapshot of the calling thread's network namespace, the pods and the folders.
func Take(opt Options) (*Snapshot, error) {
	s := &Snapshot{scopes: map[string]bool{"host": true}, records: map[string]record{}}
	runtime.LockOSThread() // one thread and one namespace for all of the host's parts
	err := s.collect("host", opt)
	runtime.UnlockOSThread()
	if err != nil {
		return nil, fmt.Errorf("snapshot of the host: %w", err)
	}
	for _, pod := range opt.Pods {
		if isGone(pod) {
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

// collect adds the records of the calling thread's network namespace.
func (s *Snapshot) collect(scope string, opt Options) error {
	c := &collector{scope: scope}
	if err := c.collect(opt.Conntrack); err != nil {
		return err
	}
	s.add(c.records, opt.Ignore)
	return nil
}

// add numbers records of the same name and scope, all of which must be in the same call.
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

// String returns all records in order, with one record in each line.
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
