// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/podlace/podlace/integration/harness"
)

// soakKinds are the kinds of steps: verbs, killed verbs, and commands that restore lost state.
func soakKinds() []stepKind {
	return append([]stepKind{
		{"ADD", 4, (*soakRun).stepAdd},
		{"ADD again", 1, (*soakRun).stepAddAgain},
		{"ADDs at once", 1, (*soakRun).stepAddsAtOnce},
		{"DEL", 2, (*soakRun).stepDel},
		{"DEL twice", 1, (*soakRun).stepDelTwice},
		{"DELs at once", 1, (*soakRun).stepDelsAtOnce},
		{"DEL after the namespace", 1, (*soakRun).stepDelGone},
		{"DEL without cache", 1, (*soakRun).stepDelUncached},
		{"DEL before the end of ADD", 2, (*soakRun).stepDelBeforeEnd},
		{"no DEL", 2, (*soakRun).stepNoDel},
		{"CHECK", 4, (*soakRun).stepCheck},
		{"GC", 2, func(s *soakRun) bool { return s.stepRestore("GC", s.collectAll) }},
		{"STATUS", 3, func(s *soakRun) bool { return s.stepRestore("STATUS", s.runStatus) }},
		{"reload", 2, func(s *soakRun) bool { return s.stepRestore("reload", s.runReload) }},
		{"ADD killed at a point", 4, func(s *soakRun) bool { return s.stepKillAdd(s.atPoint("ADD")) }},
		{"ADD killed some time", 2, func(s *soakRun) bool { return s.stepKillAdd(s.atRandomTime()) }},
		{"DEL killed at a point", 3, func(s *soakRun) bool { return s.stepKillDel(s.atPoint("DEL")) }},
		{"DEL killed some time", 2, func(s *soakRun) bool { return s.stepKillDel(s.atRandomTime()) }},
		{"GC killed", 1, func(s *soakRun) bool { return s.stepKillRestore("GC") }},
		{"STATUS killed", 1, func(s *soakRun) bool { return s.stepKillRestore("STATUS") }},
		{"reload killed", 1, func(s *soakRun) bool { return s.stepKillRestore("reload") }},
	}, lossKinds()...)
}

func (s *soakRun) stepAdd() bool {
	a := s.randomFree()
	if a != nil {
		s.addPod(a)
	}
	return a != nil
}

// stepAddAgain runs ADD of an attached pod, which must fail and leave the pod as it is.
func (s *soakRun) stepAddAgain() bool {
	a := s.randomPod(func(a *podSlot) bool { return len(a.lost) == 0 })
	if a == nil {
		return false
	}
	_, err := a.network.doVerb("ADD", a.rt, nil)
	var refused *types.Error
	if !errors.As(err, &refused) || refused.Code != harness.CodeTaken {
		s.Errorf("ADD of %s, which is attached: %v", a, err)
	}
	if !s.flushed && !s.parts {
		s.checkTraffic(a)
	}
	return true
}

// stepAddsAtOnce runs two parallel ADDs for each of several pods, of which one must succeed.
func (s *soakRun) stepAddsAtOnce() bool {
	var list []*podSlot
	for range 3 {
		if a := s.randomFree(); a != nil {
			list = append(list, a)
		}
	}
	s.forEachPod(list, s.addTwice)
	return len(list) > 1
}

func (s *soakRun) addTwice(a *podSlot) {
	results, errs := make([]types.Result, 2), make([]error, 2)
	var wait sync.WaitGroup
	for i := range results {
		wait.Go(func() { results[i], errs[i] = a.network.doVerb("ADD", a.rt, nil) })
	}
	wait.Wait()
	won := 0
	if errs[0] != nil {
		won = 1
	}
	var refused *types.Error
	if errs[won] != nil || !errors.As(errs[1-won], &refused) || refused.Code != harness.CodeTaken {
		s.Errorf("two parallel ADDs of %s: %v and %v", a, errs[0], errs[1])
		return
	}
	// libcni caches only the results of successful ADDs.
	s.attached(a, results[won])
}

func (s *soakRun) stepDel() bool {
	a := s.randomPod(nil)
	if a != nil {
		s.delPod(a)
	}
	return a != nil
}

func (s *soakRun) stepDelTwice() bool {
	a := s.randomPod(nil)
	if a != nil {
		s.mustDel(a)
		s.delPod(a)
	}
	return a != nil
}

func (s *soakRun) stepDelsAtOnce() bool {
	a := s.randomPod(nil)
	if a != nil {
		s.forEachPod([]*podSlot{a, a}, s.mustDel)
		s.closePod(a)
	}
	return a != nil
}

// stepDelGone runs DEL for a pod whose namespace is gone, with its old path or none.
func (s *soakRun) stepDelGone() bool {
	a := s.randomPod(nil)
	if a != nil {
		s.closePod(a)
		if s.random.IntN(2) == 0 {
			a.rt.NetNS = ""
		}
		s.mustDel(a)
	}
	return a != nil
}

func (s *soakRun) stepDelUncached() bool {
	a := s.randomPod(nil)
	if a != nil {
		s.dropCache(a)
		s.delPod(a)
	}
	return a != nil
}

// dropCache removes libcni's cached result of a pod, so that DEL gets no prevResult.
func (s *soakRun) dropCache(a *podSlot) {
	s.Helper()
	if err := ignoreMissing(os.Remove(filepath.Join(a.network.cache, "results", a.network.name+"-"+a.rt.ContainerID+"-eth0"))); err != nil {
		s.Fatal(err)
	}
}

// stepDelBeforeEnd runs DEL during ADD, as for a pod that is deleted while it starts, and again after it.
func (s *soakRun) stepDelBeforeEnd() bool {
	a := s.randomFree()
	if a == nil {
		return false
	}
	pause := time.Duration(s.random.IntN(40_000)) * time.Microsecond
	var wait sync.WaitGroup
	wait.Go(func() {
		if _, err := a.network.doVerb("ADD", a.rt, nil); harness.Coded(err) != nil {
			s.Errorf("ADD of %s: %v", a, err)
		}
	})
	time.Sleep(pause) // the pause only mixes the order; no check depends on it
	s.mustDel(a)
	wait.Wait()
	s.delPod(a)
	return true
}

// stepNoDel ends a pod without a DEL. Its state stays until GC, or until an ADD needs its resources.
func (s *soakRun) stepNoDel() bool {
	a := s.randomPod(func(a *podSlot) bool { return len(a.lost) == 0 })
	if a == nil {
		return false
	}
	if s.random.IntN(2) == 0 {
		s.dropCache(a)
	}
	s.abandonPod(a)
	return true
}

func (s *soakRun) stepCheck() bool {
	a := s.randomPod(nil)
	if a != nil {
		s.checkPod(a)
	}
	return a != nil
}

// checkPod reports whether CHECK of a pod succeeds, which it must if the pod has lost no record.
func (s *soakRun) checkPod(a *podSlot) bool {
	s.Helper()
	_, err := a.network.doVerb("CHECK", a.rt, nil)
	if err := harness.Coded(err); err != nil {
		s.Error(err)
	}
	if err != nil && len(a.lost) == 0 && !s.flushed && !s.parts {
		s.Errorf("CHECK of %s: %v", a, err)
	}
	return err == nil
}

// stepRestore restores lost state on the whole node, and checks two random pods that have lost no record.
func (s *soakRun) stepRestore(verb string, do func() error) bool {
	if err := do(); err != nil {
		s.Errorf("%s: %v", verb, err)
	}
	s.flushed = false
	if verb != "STATUS" {
		s.parts = false
	}
	for range 2 {
		if a := s.randomPod(func(a *podSlot) bool { return len(a.lost) == 0 }); a != nil && !s.parts {
			s.checkPod(a)
			s.checkTraffic(a)
		}
	}
	return true
}

// timedKill starts the plugins of a chain from bin/, and kills one after a given time.
type timedKill struct {
	invoke.DefaultExec
	plugin  int // index in the chain
	after   time.Duration
	started int
	killed  bool
}

// ExecPlugin implements invoke.Exec.
func (k *timedKill) ExecPlugin(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, path)
	var stdout bytes.Buffer
	cmd.Env, cmd.Stdin, cmd.Stdout = environ, bytes.NewReader(stdin), &stdout
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	if k.started == k.plugin {
		defer time.AfterFunc(k.after, func() { _ = cmd.Process.Kill() }).Stop()
	}
	k.started++
	err := cmd.Wait()
	if err == nil {
		return stdout.Bytes(), nil
	}
	k.killed = k.killed || cmd.ProcessState.ExitCode() < 0
	failed := &types.Error{Msg: err.Error()}
	_ = json.Unmarshal(stdout.Bytes(), failed) // a killed plugin leaves no document
	return nil, failed
}

// faultyRun is a run of a chain in which one plugin is killed or fails.
type faultyRun struct {
	exec   invoke.Exec
	killed func() bool
}

// momentsOf returns about how many points for a kill a verb of a pod with ports and limits has (see package fault).
func momentsOf(verb string) int { return map[string]int{"ADD": 75, "DEL": 25}[verb] }

// atPoint kills a plugin at a random change, or between two (see package fault).
func (s *soakRun) atPoint(verb string) faultyRun {
	policy := []string{"self", "root", "all"}[s.random.IntN(3)]
	e := &faultExec{at: 1 + s.random.IntN(momentsOf(verb)), run: killCommand(policy, syscall.SIGKILL), dir: s.dir}
	s.addTitle("%d (%s)", e.at, policy)
	return faultyRun{e, func() bool { return e.reached }}
}

// atRandomTime kills a plugin of bin/ at a random time after its start.
func (s *soakRun) atRandomTime() faultyRun {
	k := &timedKill{plugin: s.random.IntN(3), after: time.Duration(s.random.IntN(25_000)) * time.Microsecond}
	return faultyRun{k, func() bool { return k.killed }}
}

// runFaulty runs the verb with the fault, and counts it as killed if the fault occurred.
func (s *soakRun) runFaulty(m faultyRun, verb string, a *podSlot) {
	s.Helper()
	_, err := a.network.doVerb(verb, a.rt, m.exec)
	if m.killed() {
		s.killed++
	} else if err != nil {
		s.Errorf("%s of %s fails although it was not killed: %v", verb, a, err)
	}
}

// stepKillAdd kills an ADD. Then the runtime sends DEL, or DEL and another ADD, or nothing for this pod.
func (s *soakRun) stepKillAdd(m faultyRun) bool {
	a := s.randomFree()
	if a == nil {
		return false
	}
	s.runFaulty(m, "ADD", a)
	switch then := s.random.IntN(4); then {
	case 0:
		s.addTitle("then nothing")
		s.abandonPod(a)
	case 1:
		s.addTitle("then DEL and ADD")
		s.mustDel(a)
		s.addPod(a)
	default:
		s.delPod(a)
	}
	return true
}

// stepKillDel kills a DEL. Then the runtime sends DEL again, or nothing for this pod.
func (s *soakRun) stepKillDel(m faultyRun) bool {
	a := s.randomPod(func(a *podSlot) bool { return len(a.lost) == 0 })
	if a == nil {
		return false
	}
	s.runFaulty(m, "DEL", a)
	if s.random.IntN(3) == 0 {
		s.addTitle("then nothing")
		s.abandonPod(a)
		return true
	}
	s.delPod(a)
	return true
}

// stepKillRestore kills a verb while it restores flushed rules.
func (s *soakRun) stepKillRestore(verb string) bool {
	s.flush()
	at := 1 + s.random.IntN(12)
	s.addTitle("at %d", at)
	if verb == "reload" {
		cmd := exec.Command(filepath.Join(harness.FaultDir(), "podlace"), "reload")
		cmd.Env = append(os.Environ(), fmt.Sprintf("PODLACE_RUN_AT=%d kill -KILL $PPID", at))
		if _ = cmd.Run(); cmd.ProcessState.ExitCode() < 0 {
			s.killed++
		}
		return true
	}
	for _, n := range s.networks {
		e := &faultExec{at: at, run: killCommand("root", syscall.SIGKILL), dir: s.dir}
		var valid []types.GCAttachment
		for _, a := range s.livePods() {
			if a.network == n {
				valid = append(valid, types.GCAttachment{ContainerID: a.rt.ContainerID, IfName: a.rt.IfName})
			}
		}
		if _, err := n.doVerb(verb, nil, e, valid...); err != nil && !e.reached {
			s.Errorf("%s fails although it was not killed: %v", verb, err)
		}
		if e.reached {
			s.killed++
		}
	}
	return true
}
