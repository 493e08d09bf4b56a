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

// soakKinds are the verbs, kills and restorations that can happen to the node.
func soakKinds() []kind {
	return append([]kind{
		{"ADD", 4, (*soak).stepAdd},
		{"ADD again", 1, (*soak).stepAddAgain},
		{"ADDs at once", 1, (*soak).stepAddsAtOnce},
		{"DEL", 2, (*soak).stepDel},
		{"DEL twice", 1, (*soak).stepDelTwice},
		{"DELs at once", 1, (*soak).stepDelsAtOnce},
		{"DEL after the namespace", 1, (*soak).stepDelGone},
		{"DEL without cache", 1, (*soak).stepDelUncached},
		{"DEL before the end of ADD", 2, (*soak).stepDelBeforeEnd},
		{"no DEL", 2, (*soak).stepNoDel},
		{"CHECK", 4, (*soak).stepCheck},
		{"GC", 2, func(s *soak) bool { return s.stepRestore("GC", s.collect) }},
		{"STATUS", 3, func(s *soak) bool { return s.stepRestore("STATUS", s.status) }},
		{"reload", 2, func(s *soak) bool { return s.stepRestore("reload", s.reload) }},
		{"ADD killed at a point", 4, func(s *soak) bool { return s.stepKillAdd(s.atPoint("ADD")) }},
		{"ADD killed some time", 2, func(s *soak) bool { return s.stepKillAdd(s.atRandomTime()) }},
		{"DEL killed at a point", 3, func(s *soak) bool { return s.stepKillDel(s.atPoint("DEL")) }},
		{"DEL killed some time", 2, func(s *soak) bool { return s.stepKillDel(s.atRandomTime()) }},
		{"GC killed", 1, func(s *soak) bool { return s.stepKillRestore("GC") }},
		{"STATUS killed", 1, func(s *soak) bool { return s.stepKillRestore("STATUS") }},
		{"reload killed", 1, func(s *soak) bool { return s.stepKillRestore("reload") }},
	}, lossKinds()...)
}

func (s *soak) stepAdd() bool {
	a := s.free()
	if a != nil {
		s.add(a)
	}
	return a != nil
}

// stepAddAgain runs ADD of an attached pod. It must fail and change nothing of the pod.
func (s *soak) stepAddAgain() bool {
	a := s.some(func(a *actor) bool { return len(a.lost) == 0 })
	if a == nil {
		return false
	}
	_, err := a.network.do("ADD", a.rt, nil)
	var refused *types.Error
	if !errors.As(err, &refused) || refused.Code != harness.CodeTaken {
		s.Errorf("ADD of %s, which is attached: %v", a, err)
	}
	if !s.flushed && !s.parts {
		s.reachable(a)
	}
	return true
}

// stepAddsAtOnce runs two parallel ADDs for each of several pods. One of the two attaches the pod, and the other fails.
func (s *soak) stepAddsAtOnce() bool {
	var list []*actor
	for range 3 {
		if a := s.free(); a != nil {
			list = append(list, a)
		}
	}
	s.each(list, s.addTwice)
	return len(list) > 1
}

func (s *soak) addTwice(a *actor) {
	results, errs := make([]types.Result, 2), make([]error, 2)
	var wait sync.WaitGroup
	for i := range results {
		wait.Go(func() { results[i], errs[i] = a.network.do("ADD", a.rt, nil) })
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
	// libcni keeps the result of the last successful ADD, and nothing of a failed one.
	s.attached(a, results[won])
}

func (s *soak) stepDel() bool {
	a := s.some(nil)
	if a != nil {
		s.del(a)
	}
	return a != nil
}

func (s *soak) stepDelTwice() bool {
	a := s.some(nil)
	if a != nil {
		s.mustDel(a)
		s.del(a)
	}
	return a != nil
}

func (s *soak) stepDelsAtOnce() bool {
	a := s.some(nil)
	if a != nil {
		s.each([]*actor{a, a}, s.mustDel)
		s.close(a)
	}
	return a != nil
}

// stepDelGone runs a DEL after a reboot of the pod's machine, or after another program unmounted the namespace.
func (s *soak) stepDelGone() bool {
	a := s.some(nil)
	if a != nil {
		s.close(a)
		if s.random.IntN(2) == 0 {
			a.rt.NetNS = ""
		}
		s.mustDel(a)
	}
	return a != nil
}

func (s *soak) stepDelUncached() bool {
	a := s.some(nil)
	if a != nil {
		s.uncache(a)
		s.del(a)
	}
	return a != nil
}

// uncache removes libcni's cached result of a pod, so that DEL comes without prevResult.
func (s *soak) uncache(a *actor) {
	s.Helper()
	if err := ignoreMissing(os.Remove(filepath.Join(a.network.cache, "results", a.network.name+"-"+a.rt.ContainerID+"-eth0"))); err != nil {
		s.Fatal(err)
	}
}

// stepDelBeforeEnd runs DEL during ADD, as for a pod that is deleted while it starts, and then DEL again.
func (s *soak) stepDelBeforeEnd() bool {
	a := s.free()
	if a == nil {
		return false
	}
	pause := time.Duration(s.random.IntN(40_000)) * time.Microsecond
	var wait sync.WaitGroup
	wait.Go(func() {
		if _, err := a.network.do("ADD", a.rt, nil); harness.Coded(err) != nil {
			s.Errorf("ADD of %s: %v", a, err)
		}
	})
	time.Sleep(pause) // the pause only mixes the order; no check depends on it
	s.mustDel(a)
	wait.Wait()
	s.del(a)
	return true
}

// stepNoDel ends a pod without a DEL. GC, or an ADD that needs the resources, removes what remains of it on the node.
func (s *soak) stepNoDel() bool {
	a := s.some(func(a *actor) bool { return len(a.lost) == 0 })
	if a == nil {
		return false
	}
	if s.random.IntN(2) == 0 {
		s.uncache(a)
	}
	s.abandon(a)
	return true
}

func (s *soak) stepCheck() bool {
	a := s.some(nil)
	if a != nil {
		s.check(a)
	}
	return a != nil
}

// check runs CHECK. It fails the test if CHECK fails although nothing of the pod is lost. It reports whether everything is present.
func (s *soak) check(a *actor) bool {
	s.Helper()
	_, err := a.network.do("CHECK", a.rt, nil)
	if err := harness.Coded(err); err != nil {
		s.Error(err)
	}
	if err != nil && len(a.lost) == 0 && !s.flushed && !s.parts {
		s.Errorf("CHECK of %s: %v", a, err)
	}
	return err == nil
}

// stepRestore runs a verb of the whole node. Afterwards some pods have recovered everything that was lost.
func (s *soak) stepRestore(verb string, do func() error) bool {
	if err := do(); err != nil {
		s.Errorf("%s: %v", verb, err)
	}
	s.flushed = false
	if verb != "STATUS" {
		s.parts = false
	}
	for range 2 {
		if a := s.some(func(a *actor) bool { return len(a.lost) == 0 }); a != nil && !s.parts {
			s.check(a)
			s.reachable(a)
		}
	}
	return true
}

// timedKill starts the plugins of bin/, and kills one of them a given time after its start.
type timedKill struct {
	invoke.DefaultExec
	plugin  int // index in the chain
	after   time.Duration
	started int
	killed  bool
}

// ExecPlugin starts one plugin for libcni.
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

// murder is a verb of a chain in which a plugin is killed or fails otherwise.
type murder struct {
	exec   invoke.Exec
	killed func() bool
}

// momentsOf returns the approximate number of moments of the verbs for a pod with ports and limits.
func momentsOf(verb string) int { return map[string]int{"ADD": 75, "DEL": 25}[verb] }

// atPoint kills at a point of pkg/fault.
func (s *soak) atPoint(verb string) murder {
	policy := []string{"self", "root", "all"}[s.random.IntN(3)]
	e := &faultExec{at: 1 + s.random.IntN(momentsOf(verb)), run: killing(policy, syscall.SIGKILL), dir: s.dir}
	s.says("%d (%s)", e.at, policy)
	return murder{e, func() bool { return e.reached }}
}

// atRandomTime kills a program of bin/ at a random time after its start.
func (s *soak) atRandomTime() murder {
	k := &timedKill{plugin: s.random.IntN(3), after: time.Duration(s.random.IntN(25_000)) * time.Microsecond}
	return murder{k, func() bool { return k.killed }}
}

// commit runs the verb with the kill, and counts the kill.
func (s *soak) commit(m murder, verb string, a *actor) {
	s.Helper()
	_, err := a.network.do(verb, a.rt, m.exec)
	if m.killed() {
		s.killed++
	} else if err != nil {
		s.Errorf("%s of %s fails although it was not killed: %v", verb, a, err)
	}
}

// stepKillAdd kills an ADD. The runtime then sends DEL, or retries after DEL, or forgets the pod.
func (s *soak) stepKillAdd(m murder) bool {
	a := s.free()
	if a == nil {
		return false
	}
	s.commit(m, "ADD", a)
	switch then := s.random.IntN(4); then {
	case 0:
		s.says("then nothing")
		s.abandon(a)
	case 1:
		s.says("then DEL and ADD")
		s.mustDel(a)
		s.add(a)
	default:
		s.del(a)
	}
	return true
}

// stepKillDel kills a DEL. The runtime repeats it, or forgets the pod.
func (s *soak) stepKillDel(m murder) bool {
	a := s.some(func(a *actor) bool { return len(a.lost) == 0 })
	if a == nil {
		return false
	}
	s.commit(m, "DEL", a)
	if s.random.IntN(3) == 0 {
		s.says("then nothing")
		s.abandon(a)
		return true
	}
	s.del(a)
	return true
}

// stepKillRestore kills a verb while it restores flushed rules.
func (s *soak) stepKillRestore(verb string) bool {
	s.flush()
	at := 1 + s.random.IntN(12)
	s.says("at %d", at)
	if verb == "reload" {
		cmd := exec.Command(filepath.Join(harness.FaultDir(), "podlace"), "reload")
		cmd.Env = append(os.Environ(), fmt.Sprintf("PODLACE_RUN_AT=%d kill -KILL $PPID", at))
		if _ = cmd.Run(); cmd.ProcessState.ExitCode() < 0 {
			s.killed++
		}
		return true
	}
	for _, n := range s.networks {
		e := &faultExec{at: at, run: killing("root", syscall.SIGKILL), dir: s.dir}
		var valid []types.GCAttachment
		for _, a := range s.live() {
			if a.network == n {
				valid = append(valid, types.GCAttachment{ContainerID: a.rt.ContainerID, IfName: a.rt.IfName})
			}
		}
		if _, err := n.do(verb, nil, e, valid...); err != nil && !e.reached {
			s.Errorf("%s fails although it was not killed: %v", verb, err)
		}
		if e.reached {
			s.killed++
		}
	}
	return true
}
