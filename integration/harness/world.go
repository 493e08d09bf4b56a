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

	"github.com/podlace/podlace/integration/snapshot"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// Plain returns a test's name with dashes for all but letters and digits, which is a valid container ID.
func Plain(t *testing.T) string {
	return regexp.MustCompile(`[^A-Za-z0-9]+`).ReplaceAllString(t.Name(), "-")
}

// NewPod creates a namespace that exists until the end of the test.
func NewPod(t testing.TB, name string) *sandbox.Pod {
	t.Helper()
	pod, err := sandbox.NewPod(name)
	if err != nil {
		t.Fatalf("pod %s: %v", name, err)
	}
	t.Cleanup(func() { _ = pod.Close() })
	return pod
}

// Oracle is a snapshot of the host, pods and state folders, with which tests find leaked state.
type Oracle struct {
	Options snapshot.Options
	before  *snapshot.Snapshot
}

// StateDirs returns the folders of records and leases.
func StateDirs() []string { return []string{"/run/podlace", "/var/lib/cni"} }

// Harmless matches files of no attachment: locks, notes of the node or a network, and host-local's files of the boot and of the last
// assigned address, which may be incomplete because the next ADD overwrites it.
const Harmless = `/(\.tmp-)?last_reserved_ip\.\d+|/(\.tmp-)?podlace_boot$|/\.?lock[^/]*$|/run/podlace/\.(iptables|[a-z]+\.lock|localhost(/[^/]+)?)$|/\.(bridge|logged-found)-[^/]+$`

// Watch returns an Oracle with a snapshot of the current state.
func Watch(t testing.TB, pods ...*sandbox.Pod) *Oracle {
	t.Helper()
	o, err := NewOracle(pods...)
	if err != nil {
		t.Fatalf("snapshot: %v", err)
	}
	return o
}

// NewOracle takes a snapshot of the current state, also without a *testing.T.
func NewOracle(pods ...*sandbox.Pod) (*Oracle, error) {
	o := Oracle{Options: snapshot.Options{Pods: pods, Dirs: StateDirs(), Ignore: regexp.MustCompile(Harmless)}}
	var err error
	o.before, err = snapshot.Take(o.Options)
	return &o, err
}

// Leaks returns how the state differs from the snapshot. It waits some seconds for differences to disappear, because the kernel removes a
// namespace in the background.
func (o *Oracle) Leaks() ([]string, error) {
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		diff, err := o.Diff()
		if err != nil || len(diff) == 0 || time.Now().After(end) {
			return diff, err
		}
	}
}

// Diff is Leaks without waiting.
func (o *Oracle) Diff() ([]string, error) {
	now, err := snapshot.Take(o.Options)
	if err != nil {
		return nil, err
	}
	return snapshot.Diff(o.before, now), nil
}

// Clean fails the test if the state differs from the snapshot, and then takes a new one, so that each leak is reported once.
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

// Rebase replaces the snapshot by the current state.
func (o *Oracle) Rebase(t testing.TB) {
	t.Helper()
	var err error
	if o.before, err = snapshot.Take(o.Options); err != nil {
		t.Fatalf("snapshot: %v", err)
	}
}

// InOrder iterates over a map in the order of its keys, so that every run is the same.
func InOrder[V any](table map[string]V) iter.Seq2[string, V] {
	return func(yield func(string, V) bool) {
		for _, title := range slices.Sorted(maps.Keys(table)) {
			if !yield(title, table[title]) {
				return
			}
		}
	}
}
