// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
)

// limitsBudget is how long the test of one verb of bandwidth may take without FAULTS=all.
const limitsBudget = 800 * time.Millisecond

// limitsSweep kills only bandwidth, while the pod keeps running and no main plugin deletes its link. It thus finds all of bandwidth's
// leftovers, and each fault that interrupts the pod's traffic.
type limitsSweep struct {
	*harness.Alone
	verb     string
	old, new harness.Rates // the rates before and after the verb
	dir      string
	before   *harness.Oracle
	kills    int
	harness.Tally
}

// mbitRates returns Rates with limits in Mbit/s.
func mbitRates(ingress, egress int) harness.Rates {
	return harness.Rates{Ingress: ingress, Egress: egress}
}

// TestSweepLimits kills bandwidth at a sample of the points between its changes. With FAULTS=all, it does so at all points, with each
// reaction of the runtime.
func TestSweepLimits(t *testing.T) {
	for _, c := range []struct {
		title, verb string
		old, new    harness.Rates
	}{
		{"F-01 SIGKILL at each change of bandwidth beside a living pod, first ADD", "ADD", harness.Rates{}, mbitRates(20, 40)},
		{"F-01 SIGKILL at each change of bandwidth beside a living pod, ADD with other rates", "ADD", mbitRates(20, 40), mbitRates(50, 10)},
		{"F-01 SIGKILL at each change of bandwidth beside a living pod, ADD without ingress", "ADD", mbitRates(20, 40), mbitRates(0, 30)},
		{"F-01 SIGKILL at each change of bandwidth beside a living pod, ADD without egress", "ADD", mbitRates(20, 40), mbitRates(30, 0)},
		{"F-01 SIGKILL at each change of bandwidth beside a living pod, ADD without both", "ADD", mbitRates(20, 40), harness.Rates{}},
		{"F-02 SIGKILL at each change of bandwidth beside a living pod, DEL", "DEL", mbitRates(20, 40), harness.Rates{}},
		{"F-02 SIGKILL at each change of bandwidth beside a living pod, GC", "GC", mbitRates(20, 40), harness.Rates{}},
	} {
		t.Run(c.title, func(t *testing.T) {
			s := &limitsSweep{Alone: harness.NewAlone(t), verb: c.verb, old: c.old, new: c.new, dir: t.TempDir()}
			s.Warm(t)
			s.before = harness.Watch(t, s.Pod)
			s.sweep(t)
		})
	}
}

func (s *limitsSweep) sweep(t *testing.T) {
	start := time.Now()
	all, _, err := s.tryPoint(0, thenDel)
	if err != nil {
		t.Fatalf("%s without a kill: %v", s.verb, err)
	}
	cost := 2 * time.Since(start) // a kill is followed by another ADD and DEL
	follow := []string{thenAdd, thenDel, thenCollect, thenEmptied}
	cases := all.points * len(follow)
	stride := 1
	if !harness.Exhaustive() { // an odd stride reaches all follow-ups
		stride = min(int(cost*time.Duration(cases)/limitsBudget), cases/len(follow)-1) | 1
	}
	for i := 0; i < cases; i += stride {
		at, then := i/len(follow)+1, follow[i%len(follow)]
		s.Points++
		e, ended, err := s.tryPoint(at, then)
		if err == nil && ended {
			s.Next++
			if err = s.attachAgain(); err != nil {
				s.NextFailed++
			}
		}
		if err != nil {
			t.Errorf("%s killed at %d (%s), then %s: %v", s.verb, at, e.where, then, err)
			_ = s.Call("DEL", s.old).Do() // separate the next case from this failure
		}
	}
	t.Logf("%s: %d points, %d of %d cases (every %d.), %d kills", s.verb, all.points, s.Points, cases, stride, s.kills)
	s.Report(t)
	if all.points < 4 || s.kills*10 < s.Points*8 {
		t.Errorf("%d points, %d kills in %d cases", all.points, s.kills, s.Points)
	}
}

// tryPoint kills the verb, checks the pod, calls the plugin as a runtime then does, and looks for leaked state. It also reports whether the
// case ended without an error.
func (s *limitsSweep) tryPoint(at int, then string) (e *faultExec, ended bool, err error) {
	e = &faultExec{at: at, run: killCommand("root", syscall.SIGKILL), dir: s.dir}
	if s.old != (harness.Rates{}) {
		if err := s.Call("ADD", s.old).Do(); err != nil {
			return e, false, fmt.Errorf("ADD before: %w", err)
		}
	}
	if err := errors.Join(kerneltest.Age(harness.StateDirs()...), s.runKilled(e)); err != nil {
		return e, false, err
	}
	if e.reached {
		s.kills++
	}
	if err := errors.Join(s.checkBounded(), s.Passes()); err != nil {
		return e, false, fmt.Errorf("after the kill: %w", err)
	}
	if err := s.followUp(then); err != nil {
		return e, false, err
	}
	if err := s.Passes(); err != nil {
		return e, false, fmt.Errorf("at the end: %w", err)
	}
	leaks, err := s.before.Leaks()
	if err == nil && len(leaks) > 0 {
		s.Leaks++
		err = fmt.Errorf("%d leaks: %q", len(leaks), leaks)
	}
	return e, err == nil, err
}

func (s *limitsSweep) runKilled(e *faultExec) error {
	ctx, cancel := context.WithTimeout(context.Background(), harness.CallLimit)
	defer cancel()
	c := s.Call(s.verb, s.new)
	if s.verb == "DEL" { // runtimes send DEL with the configuration of the ADD
		c = s.Call(s.verb, s.old)
	}
	var environ []string
	for name, value := range c.Env {
		environ = append(environ, name+"="+value)
	}
	_, err := e.ExecPlugin(ctx, filepath.Join(harness.BinDir(), c.Plugin), c.Stdin, environ)
	if e.reached {
		return nil
	}
	return err
}

// checkBounded checks that each direction has its old or its new limit, and thus is never unlimited if it has both.
func (s *limitsSweep) checkBounded() error {
	got, err := s.InEffect()
	if err != nil {
		return err
	}
	for _, d := range []struct {
		name          string
		got, old, new int
	}{{"ingress", got.Ingress, s.old.Ingress, s.new.Ingress}, {"egress", got.Egress, s.old.Egress, s.new.Egress}} {
		if d.got != d.old && d.got != d.new {
			err = errors.Join(err, fmt.Errorf("%s is limited to %d Mbit/s; want %d or %d", d.name, d.got, d.old, d.new))
		}
	}
	return err
}

// followUp calls the plugin as a runtime does after the kill, in the end with DEL or GC.
func (s *limitsSweep) followUp(then string) error {
	del := s.Call("DEL", s.new)
	switch then {
	case thenAdd:
		if err := s.addLimited(s.new); err != nil {
			return fmt.Errorf("ADD again: %w", err)
		}
	case thenEmptied:
		del = del.With("CNI_NETNS", "")
	case thenCollect:
		del = s.Call("GC", s.new)
		if err := kerneltest.Age(harness.StateDirs()...); err != nil {
			return err
		}
	}
	return del.Do()
}

// addLimited runs an ADD that must succeed, and compares the limits with the wanted ones.
func (s *limitsSweep) addLimited(want harness.Rates) error {
	if err := s.Call("ADD", want).Do(); err != nil {
		return err
	}
	got, err := s.InEffect()
	if err == nil && got != want {
		err = fmt.Errorf("limits are %+v, want %+v", got, want)
	}
	return errors.Join(err, s.Passes(), s.Call("CHECK", want).Do())
}

// attachAgain attaches and detaches the same container once more.
func (s *limitsSweep) attachAgain() error {
	want := mbitRates(30, 60)
	err := errors.Join(s.addLimited(want), s.Call("DEL", want).Do())
	if err != nil {
		return fmt.Errorf("next ADD and DEL: %w", err)
	}
	return nil
}
