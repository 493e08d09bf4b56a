// SPDX-License-Identifier: Apache-2.0

package integration

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

// newPod makes a namespace that ends with the test.
func newPod(t testing.TB, name string) *sandbox.Pod {
	t.Helper()
	pod, err := sandbox.NewPod(name)
	if err != nil {
		t.Fatalf("pod %s: %v", name, err)
	}
	t.Cleanup(func() { _ = pod.Close() })
	return pod
}

// oracle remembers the state of the host, of pods and of the state folders.
type oracle struct {
	options sandbox.Options
	before  *sandbox.Snapshot
}

func stateDirs() []string { return []string{"/run/podlace", "/var/lib/cni"} }

// harmless are files that remember no attachment: locks, and where the search for
// the next address begins, also when half written, since the next ADD writes it anew.
const harmless = `/(\.tmp-)?last_reserved_ip\.\d+|/\.podlace/[^/]+/(\.tmp-)?(mark|released)$|/\.?lock[^/]*$|/run/podlace/\.(iptables|[a-z]+\.lock|localhost(/[^/]+)?|no-fq_codel)$|/\.(bridge|made|found)-[^/]+$`

func watch(t testing.TB, pods ...*sandbox.Pod) *oracle {
	t.Helper()
	o, err := newOracle(pods...)
	if err != nil {
		t.Fatalf("snapshot: %v", err)
	}
	return o
}

func newOracle(pods ...*sandbox.Pod) (*oracle, error) {
	o := oracle{options: sandbox.Options{Pods: pods, Dirs: stateDirs(), Ignore: regexp.MustCompile(harmless)}}
	var err error
	o.before, err = sandbox.Take(o.options)
	return &o, err
}

// leaks says what differs from the beginning. The kernel dismantles a namespace
// in the background, so a difference counts only once it stays.
func (o *oracle) leaks() ([]string, error) {
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		diff, err := o.diff()
		if err != nil || len(diff) == 0 || time.Now().After(end) {
			return diff, err
		}
	}
}

// diff says what differs right now.
func (o *oracle) diff() ([]string, error) {
	now, err := sandbox.Take(o.options)
	if err != nil {
		return nil, err
	}
	return sandbox.Diff(o.before, now), nil
}

// clean fails the test if anything differs, and then goes on from there, so that
// one leak is told once.
func (o *oracle) clean(t testing.TB, after string) {
	t.Helper()
	leaks, err := o.leaks()
	if len(leaks) > 0 {
		t.Errorf("%s: %d differences:\n\t%s", after, len(leaks), strings.Join(leaks, "\n\t"))
		o.rebase(t)
	}
	if err != nil {
		t.Fatalf("snapshot: %v", err)
	}
}

// rebase makes the present state the one to compare with.
func (o *oracle) rebase(t testing.TB) {
	t.Helper()
	var err error
	if o.before, err = sandbox.Take(o.options); err != nil {
		t.Fatalf("snapshot: %v", err)
	}
}

// inOrder goes through a table by its titles, so that every run is the same.
func inOrder[V any](table map[string]V) iter.Seq2[string, V] {
	return func(yield func(string, V) bool) {
		for _, title := range slices.Sorted(maps.Keys(table)) {
			if !yield(title, table[title]) {
				return
			}
		}
	}
}
