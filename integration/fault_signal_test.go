// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"github.com/containernetworking/cni/libcni"

	"github.com/podlace/podlace/pkg/sandbox"
)

// TestFaultSignal: whoever ends a plugin politely gets all or nothing.
func TestFaultSignal(t *testing.T) {
	for _, verb := range []string{"ADD", "DEL"} {
		t.Run("F-46 SIGTERM, SIGINT, SIGHUP at any point of "+verb, func(t *testing.T) { signalEverywhere(t, verb) })
	}
	t.Run("F-46 SIGPIPE: nobody reads the result", testBrokenPipe)
}

// signalEverywhere: an ADD that was asked to end succeeds or leaves nothing, without a DEL; a DEL finishes.
func signalEverywhere(t *testing.T, verb string) {
	s := newSweep(t, "nftables")
	points, _ := s.measure(t, verb)
	undone := 0
	for at := 1; at <= points; at += some(points/7+1, 1) {
		for _, signal := range some(signals()[at%3:at%3+1], signals()) {
			s.try(t, fmt.Sprintf("%v at point %d of %s", signal, at, verb), func(_ *sandbox.Pod, rt *libcni.RuntimeConf) error {
				if verb == "DEL" {
					if _, err := s.do("ADD", rt, nil); err != nil {
						return err
					}
				}
				e := &faultExec{at: at, run: killing("root", signal), dir: s.dir}
				n, err := openNetwork(s.conflist, s.cacheDir, e)
				if err != nil {
					return err
				}
				_, err = n.do(verb, rt, nil)
				if starting := strings.HasPrefix(e.where, "start of "); verb == "DEL" || err == nil || at > s.bridge || starting {
					if verb == "DEL" && !starting && err != nil {
						return err
					}
					_, err = s.do("DEL", rt, nil)
					return err
				}
				undone++
				return coded(err)
			})
		}
	}
	if verb == "ADD" && undone == 0 {
		t.Error("no ADD was ever taken back")
	}
	s.report(t)
}

func signals() []syscall.Signal {
	return []syscall.Signal{syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP}
}

// testBrokenPipe: an ADD whose result reaches nobody leaves nothing; neither does an error.
func testBrokenPipe(t *testing.T) {
	y := tally{}
	forEach(t, func(t *testing.T, f *fixture, plugin string) {
		f.life(t, plugin, func() {
			before := watch(t, f.fresh)
			for _, conf := range []any{f.conf(plugin), "not JSON"} {
				y.points++
				reader, writer, err := os.Pipe()
				if err := errors.Join(err, reader.Close()); err != nil {
					t.Fatal(err)
				}
				c := f.good("ADD", plugin).config(conf)
				c.stdout = writer
				if o := c.run(t); o.exit != 1 {
					t.Errorf("exit %d, want 1: %s", o.exit, o.stderr)
				}
				_ = writer.Close()
				if plugin != "bandwidth" { // whose limits go with the link of the bridge
					before.clean(t, "ADD without a reader")
				}
			}
		})
		f.oracle.clean(t, "ADD without a reader, and DEL of the bridge")
	})
	y.report(t)
}
