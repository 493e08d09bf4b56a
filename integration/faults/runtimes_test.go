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

// TestRuntimes runs pods on the node of TestSoak under an emulated containerd and an emulated CRI-O, forty each or with FAULTS=all a
// thousand each. Each runtime performs its failure sequences in an order that the seed decides. Nothing remains of any pod that ended.
func TestRuntimes(t *testing.T) {
	for name, kinds := range harness.InOrder(map[string][]kind{"containerd": containerdHabits(), "CRI-O": crioHabits()}) {
		t.Run(name, func(t *testing.T) {
			s := newSoak(t, flagOf[uint64]("seed"), 10)
			s.audits = 200
			s.again = fmt.Sprintf("run the same steps again: FAULTS=%s go test ./integration/faults -count=1 -run '%s' -args -seed %d",
				os.Getenv("FAULTS"), t.Name(), s.seed)
			fmt.Fprintf(t.Output(), "seed %d\n", s.seed)
			before := harness.Watch(t)
			for round := 0; s.lives < harness.Some(40, 1000); round++ {
				s.round(round, kinds, 0)
				if t.Failed() {
					return
				}
			}
			s.audit()
			s.end(before)
			s.report(kinds, true)
			fmt.Fprintf(t.Output(), "figures: points=%d leaks=0 duplicates=0 next=%d failed=0\n", s.killed, s.lives)
		})
	}
}

// containerdHabits returns containerd's sequences. It sends one DEL after a failed ADD, and the kubelet creates another sandbox. It
// repeats DEL until one succeeds, and then sends one more. It sends STATUS every five seconds, and never CHECK or GC.
func containerdHabits() []kind {
	return []kind{
		{"RunPodSandbox", 2, (*soak).stepAdd},
		{"storm of RunPodSandbox", 1, func(s *soak) bool { return s.storm(6) }},
		{"RunPodSandbox twice at once", 1, (*soak).stepAddsAtOnce},
		{"RunPodSandbox killed at its deadline", 3, func(s *soak) bool { return s.retried(s.atPoint("ADD")) }},
		{"RunPodSandbox killed some time", 2, func(s *soak) bool { return s.retried(s.atRandomTime()) }},
		{"RunPodSandbox that fails", 1, func(s *soak) bool { return s.retried(s.randomFailure()) }},
		{"StopPodSandbox", 1, (*soak).stepDel},
		{"StopPodSandbox and RemovePodSandbox", 3, (*soak).stepDelTwice},
		{"StopPodSandbox twice at once", 1, (*soak).stepDelsAtOnce},
		{"StopPodSandbox before the end of RunPodSandbox", 2, (*soak).stepDelBeforeEnd},
		{"StopPodSandbox killed at its deadline", 2, func(s *soak) bool { return s.repeatDel(s.atPoint("DEL")) }},
		{"StopPodSandbox that fails", 1, func(s *soak) bool { return s.repeatDel(s.randomFailure()) }},
		{"RemovePodSandbox without a namespace", 2, (*soak).stepDelGone},
		{"StopPodSandbox without libcni's cache", 1, (*soak).stepDelUncached},
		{"StopPodSandbox without records", 1, (*soak).stepDelUnrecorded},
		{"Status", 3, func(s *soak) bool { return s.stepRestore("STATUS", s.status) }},
		{"restart", 1, (*soak).stepRestartContainerd},
	}
}

// crioHabits returns CRI-O's sequences. It sends CHECK right after ADD. It sends one DEL, deletes the namespace and libcni's result
// even if the DEL fails. At its start it sends STATUS twice, GC with all pods, and CHECK of each pod.
func crioHabits() []kind {
	return []kind{
		{"RunPodSandbox", 3, (*soak).stepAddAndCheck},
		{"storm of RunPodSandbox", 1, func(s *soak) bool { return s.storm(6) }},
		{"RunPodSandbox killed at its deadline", 3, func(s *soak) bool { return s.retried(s.atPoint("ADD")) }},
		{"RunPodSandbox killed some time", 2, func(s *soak) bool { return s.retried(s.atRandomTime()) }},
		{"RunPodSandbox that fails", 1, func(s *soak) bool { return s.retried(s.randomFailure()) }},
		{"StopPodSandbox", 4, (*soak).stepDel},
		{"StopPodSandbox before the end of RunPodSandbox", 2, (*soak).stepDelBeforeEnd},
		{"StopPodSandbox killed", 2, func(s *soak) bool { return s.forgotten(s.atPoint("DEL")) }},
		{"StopPodSandbox that fails", 2, func(s *soak) bool { return s.forgotten(s.randomFailure()) }},
		{"StopPodSandbox without records", 1, (*soak).stepDelUnrecorded},
		{"Status", 3, func(s *soak) bool { return s.stepRestore("STATUS", s.status) }},
		{"restart", 2, (*soak).stepRestartCRIO},
		{"restart without state", 1, (*soak).stepRestartWithoutState},
	}
}

// storm starts n pods in parallel and kills the first ADD of every second one, as the kubelet does after a restart of the node.
func (s *soak) storm(n int) bool {
	var list []*actor
	kills := map[*actor]murder{}
	for range n {
		a := s.free()
		if a == nil {
			break
		}
		if list = append(list, a); len(list)%2 == 0 {
			kills[a] = s.atRandomTime()
		}
	}
	killed := make([]bool, len(s.actors))
	s.each(list, func(a *actor) {
		if m, ok := kills[a]; ok {
			_, _ = a.network.do("ADD", a.rt, m.exec)
			killed[a.slot] = m.killed()
			s.mustDel(a)
		}
		s.add(a)
	})
	for _, hit := range killed {
		if hit {
			s.killed++
		}
	}
	return len(list) > 2
}

// retried kills an ADD, and then runs DEL and ADD of the pod's next sandbox with the same ports.
func (s *soak) retried(m murder) bool {
	a := s.free()
	if a == nil {
		return false
	}
	s.commit(m, "ADD", a)
	s.del(a)
	s.begin(a)
	s.add(a)
	return true
}

// repeatDel kills a DEL, and repeats it until it succeeds.
func (s *soak) repeatDel(m murder) bool {
	a := s.some(nil)
	if a == nil {
		return false
	}
	s.commit(m, "DEL", a)
	s.mustDel(a)
	s.del(a)
	return true
}

// forgotten kills a DEL, and never repeats it.
func (s *soak) forgotten(m murder) bool {
	a := s.some(nil)
	if a == nil {
		return false
	}
	s.commit(m, "DEL", a)
	s.uncache(a)
	s.abandon(a)
	return true
}

// failing implements the interface by which libcni starts plugins. In one plugin of the chain it makes one change fail.
type failing struct {
	invoke.DefaultExec
	plugin, at int // plugin's index in the chain, and the change's number
	started    int
	failed     bool
}

// ExecPlugin starts one plugin for libcni.
func (f *failing) ExecPlugin(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	if f.started++; f.started-1 == f.plugin {
		environ = append(environ, fmt.Sprint("PODLACE_FAIL_AT=", f.at))
	}
	raw := invoke.RawExec{Stderr: io.Discard}
	stdout, err := raw.ExecPlugin(ctx, filepath.Join(harness.FaultDir(), filepath.Base(path)), stdin, environ)
	f.failed = f.failed || err != nil && strings.Contains(err.Error(), "injected fault")
	return stdout, err
}

// randomFailure draws a change that fails.
func (s *soak) randomFailure() murder {
	f := &failing{plugin: s.random.IntN(3), at: 1 + s.random.IntN(8)}
	s.says("change %d of plugin %d", f.at, f.plugin)
	return murder{f, func() bool { return f.failed }}
}

// stepDelUnrecorded runs a DEL after another program deleted the pod's records.
func (s *soak) stepDelUnrecorded() bool {
	a := s.some(nil)
	if a == nil {
		return false
	}
	for _, plugin := range a.plugins() {
		harness.Shell(s, "rm "+a.record(plugin))
	}
	if s.random.IntN(2) == 0 {
		s.uncache(a)
	}
	s.del(a)
	return true
}

func (s *soak) stepAddAndCheck() bool {
	a := s.free()
	if a != nil {
		s.add(a)
		s.check(a)
	}
	return a != nil
}

// stepRestartContainerd restarts containerd during an ADD. Containerd knows that it has to delete that pod.
func (s *soak) stepRestartContainerd() bool {
	a := s.free()
	if a == nil {
		return false
	}
	s.commit(s.atRandomTime(), "ADD", a)
	s.del(a)
	return s.stepRestore("STATUS", s.status)
}

// stepRestartCRIO runs the verbs of CRI-O's start: STATUS twice, GC, and CHECK of each pod.
func (s *soak) stepRestartCRIO() bool {
	if s.random.IntN(2) == 0 {
		s.says("after a flush")
		s.flush()
	}
	for _, do := range []func() error{s.status, s.status, s.collect} {
		if err := do(); err != nil {
			s.Error(err)
		}
	}
	s.flushed, s.parts = false, false
	s.each(s.live(), func(a *actor) { s.check(a) })
	return true
}

// stepRestartWithoutState starts a CRI-O that lost its store while its pods run: GC gets an empty list of valid attachments.
func (s *soak) stepRestartWithoutState() bool {
	live := s.live()
	if len(live) == 0 {
		return false
	}
	for _, a := range live {
		s.uncache(a)
		_ = a.speaker.Close()
		a.speaker = nil
	}
	s.settle()
	s.owned(nil)
	for _, a := range live {
		s.close(a)
	}
	s.fill()
	return true
}
