// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/containernetworking/cni/libcni"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// TestFaultSignal: after a signal, a plugin either completes its changes or undoes them.
func TestFaultSignal(t *testing.T) {
	for _, verb := range []string{"ADD", "DEL"} {
		t.Run("F-46 SIGTERM, SIGINT, SIGHUP, SIGQUIT at any point of "+verb, func(t *testing.T) { signalEverywhere(t, verb) })
	}
	t.Run("F-46 SIGPIPE: the result is not read", testBrokenPipe)
}

// signalEverywhere runs a verb once for each signal and point. The verb waits there for a moment, so that the plugin notices the signal
// before it ends even on a busy machine. ADD succeeds or leaves no state that needs a DEL. DEL completes, unless the signal comes while a
// plugin is still starting.
func signalEverywhere(t *testing.T, verb string) {
	s := newSweep(t, "nftables")
	points, _ := s.measureVerb(t, verb)
	undone := 0
	for at := 1; at <= points; at += harness.Some(points/5+1, 1) {
		for _, signal := range harness.Some(signals()[at%3:at%3+1], signals()) {
			s.tryCase(t, fmt.Sprintf("%v at point %d of %s", signal, at, verb), func(_ *sandbox.Pod, rt *libcni.RuntimeConf) error {
				if verb == "DEL" {
					if _, err := s.Do("ADD", rt, nil); err != nil {
						return err
					}
				}
				e := &faultExec{at: at, run: killCommand("root", signal) + "; sleep 0.05", dir: s.dir}
				n, err := harness.OpenNetwork(s.conflist, s.cacheDir, e)
				if err != nil {
					return err
				}
				_, err = n.Do(verb, rt, nil)
				if starting := strings.HasPrefix(e.where, "start of "); verb == "DEL" || err == nil || at > s.bridge || starting {
					if verb == "DEL" && !starting && err != nil {
						return err
					}
					_, err = s.Do("DEL", rt, nil)
					return err
				}
				undone++
				return harness.Coded(err)
			})
		}
	}
	if verb == "ADD" && undone == 0 {
		t.Error("no ADD undid its changes")
	}
	s.Report(t)
}

func signals() []syscall.Signal {
	return []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP, syscall.SIGQUIT}
}

// testBrokenPipe: ADD leaves no state if it cannot write its result or error to stdout.
func testBrokenPipe(t *testing.T) {
	y := harness.Tally{}
	harness.ForEach(t, func(t *testing.T, f *harness.Fixture, plugin string) {
		f.Life(t, plugin, func() {
			before := harness.Watch(t, f.Fresh)
			for _, conf := range []any{f.Conf(plugin), "not JSON"} {
				y.Points++
				reader, writer, err := os.Pipe()
				if err := errors.Join(err, reader.Close()); err != nil {
					t.Fatal(err)
				}
				c := f.Good("ADD", plugin).Config(conf)
				c.Stdout = writer
				if o := c.Run(t); o.Exit != 1 {
					t.Errorf("exit %d, want 1: %s", o.Exit, o.Stderr)
				}
				_ = writer.Close()
				if plugin != "bandwidth" { // bandwidth's limits disappear with the bridge's link
					before.Clean(t, "ADD without a reader")
				}
			}
		})
		f.Oracle.Clean(t, "ADD without a reader, and DEL of the bridge")
	})
	y.Report(t)
}
