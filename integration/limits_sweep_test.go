// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/podlace/podlace/pkg/kernel/kerneltest"
)

// limitsBudget is how long the sweep of one verb of bandwidth may take when it is sampled.
const limitsBudget = 1500 * time.Millisecond

// limitsSweep kills bandwidth alone. Its pod lives on, and no main plugin deletes the link afterwards: what bandwidth leaves is seen, and
// what it breaks costs a pod its traffic.
type limitsSweep struct {
	*alone
	verb     string
	old, new rates // before and after
	dir      string
	before   *oracle
	kills    int
	tally
}

// TestSweepLimits visits a sample of the points; FAULTS=all visits all of them, with each of the follow-ups.
func TestSweepLimits(t *testing.T) {
	for _, c := range []struct {
		title, verb string
		old, new    rates
	}{
		{"F-01 SIGKILL at each change of bandwidth beside a living pod, first ADD", "ADD", rates{}, rates{20, 40}},
		{"F-01 SIGKILL at each change of bandwidth beside a living pod, ADD with other rates", "ADD", rates{20, 40}, rates{50, 10}},
		{"F-01 SIGKILL at each change of bandwidth beside a living pod, ADD without ingress", "ADD", rates{20, 40}, rates{0, 30}},
		{"F-01 SIGKILL at each change of bandwidth beside a living pod, ADD without egress", "ADD", rates{20, 40}, rates{30, 0}},
		{"F-01 SIGKILL at each change of bandwidth beside a living pod, ADD without both", "ADD", rates{20, 40}, rates{}},
		{"F-02 SIGKILL at each change of bandwidth beside a living pod, DEL", "DEL", rates{20, 40}, rates{}},
		{"F-02 SIGKILL at each change of bandwidth beside a living pod, GC", "GC", rates{20, 40}, rates{}},
	} {
		t.Run(c.title, func(t *testing.T) {
			s := &limitsSweep{alone: newAlone(t), verb: c.verb, old: c.old, new: c.new, dir: t.TempDir()}
			s.warm(t)
			s.before = watch(t, s.pod)
			s.sweep(t)
		})
	}
}

func (s *limitsSweep) sweep(t *testing.T) {
	start := time.Now()
	all, _, err := s.one(0, thenDel)
	if err != nil {
		t.Fatalf("%s without a kill: %v", s.verb, err)
	}
	cost := 2 * time.Since(start) // the next life comes after a kill
	follow := []string{thenAdd, thenDel, thenCollect, thenEmptied}
	cases := all.points * len(follow)
	stride := 1
	if !exhaustive() { // an odd one visits all follow-ups
		stride = int(cost*time.Duration(cases)/limitsBudget) | 1
	}
	for i := 0; i < cases; i += stride {
		at, then := i/len(follow)+1, follow[i%len(follow)]
		s.points++
		e, ended, err := s.one(at, then)
		if err == nil && ended {
			s.next++
			if err = s.again(); err != nil {
				s.nextFailed++
			}
		}
		if err != nil {
			t.Errorf("%s killed at %d (%s), then %s: %v", s.verb, at, e.where, then, err)
			_ = s.call("DEL", s.old).do() // the next case is to be judged by itself
		}
	}
	t.Logf("%s: %d points, %d of %d cases (every %d.), %d kills", s.verb, all.points, s.points, cases, stride, s.kills)
	s.report(t)
	if all.points < 4 || s.kills*10 < s.points*8 {
		t.Errorf("%d points, %d kills in %d cases", all.points, s.kills, s.points)
	}
}

// one kills, looks at the pod, does what the runtime does then, and looks for what is left. ended tells that it came so far.
func (s *limitsSweep) one(at int, then string) (e *faultExec, ended bool, err error) {
	e = &faultExec{at: at, run: killing("root", syscall.SIGKILL), dir: s.dir}
	if s.old != (rates{}) {
		if err := s.call("ADD", s.old).do(); err != nil {
			return e, false, fmt.Errorf("ADD before: %w", err)
		}
	}
	if err := errors.Join(kerneltest.Age(stateDirs()...), s.killed(e)); err != nil {
		return e, false, err
	}
	if e.reached {
		s.kills++
	}
	if err := errors.Join(s.bounded(), s.passes()); err != nil {
		return e, false, fmt.Errorf("after the kill: %w", err)
	}
	if err := s.follow(then); err != nil {
		return e, false, err
	}
	if err := s.passes(); err != nil {
		return e, false, fmt.Errorf("at the end: %w", err)
	}
	leaks, err := s.before.leaks()
	if err == nil && len(leaks) > 0 {
		s.leaks++
		err = fmt.Errorf("%d leaks: %q", len(leaks), leaks)
	}
	return e, err == nil, err
}

// killed runs the verb with a kill.
func (s *limitsSweep) killed(e *faultExec) error {
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	c := s.call(s.verb, s.new)
	if s.verb == "DEL" { // as runtimes do, with what ADD had
		c = s.call(s.verb, s.old)
	}
	var environ []string
	for name, value := range c.env {
		environ = append(environ, name+"="+value)
	}
	_, err := e.ExecPlugin(ctx, filepath.Join(binDir(), c.plugin), c.stdin, environ)
	if e.reached {
		return nil
	}
	return err
}

// bounded wants of each direction the old limit or the new one, and either of them when both are limits: never none.
func (s *limitsSweep) bounded() error {
	got, err := s.inEffect()
	if err != nil {
		return err
	}
	for _, d := range []struct {
		name          string
		got, old, new int
	}{{"ingress", got.ingress, s.old.ingress, s.new.ingress}, {"egress", got.egress, s.old.egress, s.new.egress}} {
		if d.got != d.old && d.got != d.new {
			err = errors.Join(err, fmt.Errorf("%s is limited to %d Mbit/s; want %d or %d", d.name, d.got, d.old, d.new))
		}
	}
	return err
}

// follow does what the runtime does after the kill, up to a DEL or GC.
func (s *limitsSweep) follow(then string) error {
	del := s.call("DEL", s.new)
	switch then {
	case thenAdd:
		if err := s.limited(s.new); err != nil {
			return fmt.Errorf("ADD again: %w", err)
		}
	case thenEmptied:
		del = del.with("CNI_NETNS", "")
	case thenCollect:
		del = s.call("GC", s.new)
		if err := kerneltest.Age(stateDirs()...); err != nil {
			return err
		}
	}
	return del.do()
}

// limited is an ADD that works.
func (s *limitsSweep) limited(want rates) error {
	if err := s.call("ADD", want).do(); err != nil {
		return err
	}
	got, err := s.inEffect()
	if err == nil && got != want {
		err = fmt.Errorf("limits are %+v, want %+v", got, want)
	}
	return errors.Join(err, s.passes(), s.call("CHECK", want).do())
}

// again is the next life of the attachment.
func (s *limitsSweep) again() error {
	want := rates{30, 60}
	err := errors.Join(s.limited(want), s.call("DEL", want).do())
	if err != nil {
		return fmt.Errorf("next ADD and DEL: %w", err)
	}
	return nil
}
