// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/invoke"

	"github.com/podlace/podlace/integration/harness"
)

// TestRuntimes runs one round of pods, or a thousand pods with FAULTS=all, under an emulated containerd and then CRI-O, on the node of
// TestSoak. -seed determines the order of the call sequences. No state of ended pods remains.
func TestRuntimes(t *testing.T) {
	for name, kinds := range harness.InOrder(map[string][]stepKind{"containerd": containerdHabits(), "CRI-O": crioHabits()}) {
		t.Run(name, func(t *testing.T) {
			s := newSoak(t, flagOf[uint64]("seed"), 10)
			s.audits = 200
			s.again = fmt.Sprintf("run the same steps again: FAULTS=%s go test ./integration/faults -count=1 -run '%s' -args -seed %d",
				os.Getenv("FAULTS"), t.Name(), s.seed)
			fmt.Fprintf(t.Output(), "seed %d\n", s.seed)
			before := harness.Watch(t)
			for round := 0; round == 0 || harness.Exhaustive() && s.lives < 1000; round++ {
				s.runRound(round, kinds, 0)
				if t.Failed() {
					return
				}
			}
			s.auditNode()
			s.endSoak(before)
			s.printCounts(kinds, true)
			fmt.Fprintf(t.Output(), "figures: points=%d leaks=0 duplicates=0 next=%d failed=0\n", s.killed, s.lives)
		})
	}
}

// containerdHabits are containerd's sequences of calls. A failed ADD gets one DEL, and the kubelet creates another sandbox. DEL is retried
// until it succeeds, and then sent once more. STATUS comes every five seconds, CHECK and GC never.
func containerdHabits() []stepKind {
	return []stepKind{
		{"RunPodSandbox", 2, (*soakRun).stepAdd},
		{"storm of RunPodSandbox", 1, func(s *soakRun) bool { return s.startStorm(6) }},
		{"RunPodSandbox twice at once", 1, (*soakRun).stepAddsAtOnce},
		{"RunPodSandbox killed at its deadline", 3, func(s *soakRun) bool { return s.retryKilled(s.atPoint("ADD")) }},
		{"RunPodSandbox killed some time", 2, func(s *soakRun) bool { return s.retryKilled(s.atRandomTime()) }},
		{"RunPodSandbox that fails", 1, func(s *soakRun) bool { return s.retryKilled(s.randomFailure()) }},
		{"StopPodSandbox", 1, (*soakRun).stepDel},
		{"StopPodSandbox and RemovePodSandbox", 3, (*soakRun).stepDelTwice},
		{"StopPodSandbox twice at once", 1, (*soakRun).stepDelsAtOnce},
		{"StopPodSandbox before the end of RunPodSandbox", 2, (*soakRun).stepDelBeforeEnd},
		{"StopPodSandbox killed at its deadline", 2, func(s *soakRun) bool { return s.repeatDel(s.atPoint("DEL")) }},
		{"StopPodSandbox that fails", 1, func(s *soakRun) bool { return s.repeatDel(s.randomFailure()) }},
		{"RemovePodSandbox without a namespace", 2, (*soakRun).stepDelGone},
		{"StopPodSandbox without libcni's cache", 1, (*soakRun).stepDelUncached},
		{"StopPodSandbox without records", 1, (*soakRun).stepDelUnrecorded},
		{"Status", 3, func(s *soakRun) bool { return s.stepRestore("STATUS", s.runStatus) }},
		{"restart", 1, (*soakRun).stepRestartContainerd},
	}
}

// crioHabits are CRI-O's sequences of calls. CHECK comes right after ADD. A pod ends with one DEL, after which CRI-O deletes the namespace
// and libcni's cached result even if it failed. At its start, CRI-O sends STATUS twice, GC with all pods, and CHECK of each pod.
func crioHabits() []stepKind {
	return []stepKind{
		{"RunPodSandbox", 3, (*soakRun).stepAddAndCheck},
		{"storm of RunPodSandbox", 1, func(s *soakRun) bool { return s.startStorm(6) }},
		{"RunPodSandbox killed at its deadline", 3, func(s *soakRun) bool { return s.retryKilled(s.atPoint("ADD")) }},
		{"RunPodSandbox killed some time", 2, func(s *soakRun) bool { return s.retryKilled(s.atRandomTime()) }},
		{"RunPodSandbox that fails", 1, func(s *soakRun) bool { return s.retryKilled(s.randomFailure()) }},
		{"StopPodSandbox", 4, (*soakRun).stepDel},
		{"StopPodSandbox before the end of RunPodSandbox", 2, (*soakRun).stepDelBeforeEnd},
		{"StopPodSandbox killed", 2, func(s *soakRun) bool { return s.forgetKilled(s.atPoint("DEL")) }},
		{"StopPodSandbox that fails", 2, func(s *soakRun) bool { return s.forgetKilled(s.randomFailure()) }},
		{"StopPodSandbox without records", 1, (*soakRun).stepDelUnrecorded},
		{"Status", 3, func(s *soakRun) bool { return s.stepRestore("STATUS", s.runStatus) }},
		{"restart", 2, (*soakRun).stepRestartCRIO},
		{"restart without state", 1, (*soakRun).stepRestartWithoutState},
	}
}

// startStorm starts n pods in parallel, as the kubelet does after a restart of the node, and kills the first ADD of every second one.
func (s *soakRun) startStorm(n int) bool {
	var list []*podSlot
	kills := map[*podSlot]faultyRun{}
	for range n {
		a := s.randomFree()
		if a == nil {
			break
		}
		if list = append(list, a); len(list)%2 == 0 {
			kills[a] = s.atRandomTime()
		}
	}
	killed := make([]bool, len(s.actors))
	s.forEachPod(list, func(a *podSlot) {
		if m, ok := kills[a]; ok {
			_, _ = a.network.doVerb("ADD", a.rt, m.exec)
			killed[a.slot] = m.killed()
			s.mustDel(a)
		}
		s.addPod(a)
	})
	for _, hit := range killed {
		if hit {
			s.killed++
		}
	}
	return len(list) > 2
}

// retryKilled kills an ADD, runs DEL, and runs ADD of the pod's next sandbox with the same ports.
func (s *soakRun) retryKilled(m faultyRun) bool {
	a := s.randomFree()
	if a == nil {
		return false
	}
	s.runFaulty(m, "ADD", a)
	s.delPod(a)
	s.beginPod(a)
	s.addPod(a)
	return true
}

// repeatDel kills a DEL and retries it until it succeeds.
func (s *soakRun) repeatDel(m faultyRun) bool {
	a := s.randomPod(nil)
	if a == nil {
		return false
	}
	s.runFaulty(m, "DEL", a)
	s.mustDel(a)
	s.delPod(a)
	return true
}

// forgetKilled kills a DEL and does not retry it.
func (s *soakRun) forgetKilled(m faultyRun) bool {
	a := s.randomPod(nil)
	if a == nil {
		return false
	}
	s.runFaulty(m, "DEL", a)
	s.dropCache(a)
	s.abandonPod(a)
	return true
}

// failingExec lets one change of one plugin in the chain fail.
type failingExec struct {
	invoke.DefaultExec
	plugin, at int // index of the plugin in the chain, and number of the change
	started    int
	failed     bool
}

// ExecPlugin implements invoke.Exec.
func (f *failingExec) ExecPlugin(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	if f.started++; f.started-1 == f.plugin {
		environ = append(environ, fmt.Sprint("PODLACE_FAIL_AT=", f.at))
	}
	raw := invoke.RawExec{Stderr: io.Discard}
	stdout, err := raw.ExecPlugin(ctx, filepath.Join(harness.FaultDir(), filepath.Base(path)), stdin, environ)
	f.failed = f.failed || err != nil && strings.Contains(err.Error(), "injected fault")
	return stdout, err
}

// randomFailure lets a random change of a random plugin fail.
func (s *soakRun) randomFailure() faultyRun {
	f := &failingExec{plugin: s.random.IntN(3), at: 1 + s.random.IntN(8)}
	s.addTitle("change %d of plugin %d", f.at, f.plugin)
	return faultyRun{f, func() bool { return f.failed }}
}

// stepDelUnrecorded runs DEL after another program has deleted the pod's records.
func (s *soakRun) stepDelUnrecorded() bool {
	a := s.randomPod(nil)
	if a == nil {
		return false
	}
	for _, plugin := range a.recordPlugins() {
		harness.Shell(s, "rm "+a.record(plugin))
	}
	if s.random.IntN(2) == 0 {
		s.dropCache(a)
	}
	s.delPod(a)
	return true
}

func (s *soakRun) stepAddAndCheck() bool {
	a := s.randomFree()
	if a != nil {
		s.addPod(a)
		s.checkPod(a)
	}
	return a != nil
}

// stepRestartContainerd restarts containerd during an ADD. It then deletes this pod.
func (s *soakRun) stepRestartContainerd() bool {
	a := s.randomFree()
	if a == nil {
		return false
	}
	s.runFaulty(s.atRandomTime(), "ADD", a)
	s.delPod(a)
	return s.stepRestore("STATUS", s.runStatus)
}

// stepRestartCRIO runs the verbs of CRI-O's start: STATUS twice, GC, and CHECK of each pod.
func (s *soakRun) stepRestartCRIO() bool {
	if s.random.IntN(2) == 0 {
		s.addTitle("after a flush")
		s.flush()
	}
	for _, do := range []func() error{s.runStatus, s.runStatus, s.collectAll} {
		if err := do(); err != nil {
			s.Error(err)
		}
	}
	s.flushed, s.parts = false, false
	s.forEachPod(s.livePods(), func(a *podSlot) { s.checkPod(a) })
	return true
}

// stepRestartWithoutState starts a CRI-O that has lost its store while its pods run, so its GC lists no valid attachment.
func (s *soakRun) stepRestartWithoutState() bool {
	live := s.livePods()
	if len(live) == 0 {
		return false
	}
	for _, a := range live {
		s.dropCache(a)
		_ = a.speaker.Close()
		a.speaker = nil
	}
	s.settleNode()
	s.checkOwned(nil)
	for _, a := range live {
		s.closePod(a)
	}
	s.fillNode()
	return true
}
