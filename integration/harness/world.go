// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"iter"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/podlace/podlace/pkg/sandbox"
)

// Plain returns the name of a test in the characters of a container ID.
func Plain(t *testing.T) string {
	return regexp.MustCompile(`[^A-Za-z0-9]+`).ReplaceAllString(t.Name(), "-")
}

// NewPod makes a namespace that ends with the test.
func NewPod(t testing.TB, name string) *sandbox.Pod {
	t.Helper()
	pod, err := sandbox.NewPod(name)
	if err != nil {
		t.Fatalf("pod %s: %v", name, err)
	}
	t.Cleanup(func() { _ = pod.Close() })
	return pod
}

// Oracle remembers the state of the host, of pods and of the state folders.
type Oracle struct {
	Options sandbox.Options
	before  *sandbox.Snapshot
}

// StateDirs returns the folders of records and of leases.
func StateDirs() []string { return []string{"/run/podlace", "/var/lib/cni"} }

// Harmless matches files that belong to no attachment: locks, marks of the node or a network, and the address at which the next search
// begins. A partly written file of the last kind is harmless, too: the next ADD overwrites it.
const Harmless = `/(\.tmp-)?last_reserved_ip\.\d+|/\.podlace/[^/]+/(\.tmp-)?(mark|released)$|/\.?lock[^/]*$|/run/podlace/\.(iptables|[a-z]+\.lock|localhost(/[^/]+)?|no-fq_codel|shared-hostports)$|/\.(bridge|made|found)-[^/]+$`

// Watch returns an oracle of the state as it is now.
func Watch(t testing.TB, pods ...*sandbox.Pod) *Oracle {
	t.Helper()
	o, err := NewOracle(pods...)
	if err != nil {
		t.Fatalf("snapshot: %v", err)
	}
	return o
}

// NewOracle is Watch for callers without a test.
func NewOracle(pods ...*sandbox.Pod) (*Oracle, error) {
	o := Oracle{Options: sandbox.Options{Pods: pods, Dirs: StateDirs(), Ignore: regexp.MustCompile(Harmless)}}
	var err error
	o.before, err = sandbox.Take(o.Options)
	return &o, err
}

// Leaks returns what differs from the beginning. The kernel dismantles a namespace
// in the background, so a difference counts only once it stays.
func (o *Oracle) Leaks() ([]string, error) {
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		diff, err := o.Diff()
		if err != nil || len(diff) == 0 || time.Now().After(end) {
			return diff, err
		}
	}
}

// Diff returns what differs right now.
func (o *Oracle) Diff() ([]string, error) {
	now, err := sandbox.Take(o.Options)
	if err != nil {
		return nil, err
	}
	return sandbox.Diff(o.before, now), nil
}

// Clean fails the test if the state differs. Later calls compare with the state of this call, so each leak is reported once.
func (o *Oracle) Clean(t testing.TB, after string) {
	t.Helper()
	leaks, err := o.Leaks()
	if len(leaks) > 0 {
		t.Errorf("%s: %d differences:\n\t%s", after, len(leaks), strings.Join(leaks, "\n\t"))
		o.Rebase(t)
	}
	if err != nil {
		t.Fatalf("snapshot: %v", err)
	}
}

// Rebase makes the present state the one to compare with.
func (o *Oracle) Rebase(t testing.TB) {
	t.Helper()
	var err error
	if o.before, err = sandbox.Take(o.Options); err != nil {
		t.Fatalf("snapshot: %v", err)
	}
}

// InOrder goes through a table by its titles, so that every run is the same.
func InOrder[V any](table map[string]V) iter.Seq2[string, V] {
	return func(yield func(string, V) bool) {
		for _, title := range slices.Sorted(maps.Keys(table)) {
			if !yield(title, table[title]) {
				return
			}
		}
	}
}
