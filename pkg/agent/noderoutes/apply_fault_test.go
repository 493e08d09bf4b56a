// SPDX-License-Identifier: Apache-2.0

//go:build podlace_fault

package noderoutes

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/integration/snapshot"
	"github.com/podlace/podlace/pkg/fault"
)

// TestFaultRoutes lets each change of Apply fail once, and kills Apply at each once. The next call without a fault must reach the same
// state as if there had been none, on the way from no routes to a first state, a second one, and back to none. Objects of other programs
// stay unchanged.
func TestFaultRoutes(t *testing.T) {
	l := newLAN(t, 2)
	a := newNode(t).joinLAN(l, "eth0", 1)
	a.addForeign()
	local, remote := l.addressOf(1, false), netip.MustParseAddr("192.0.3.2")
	first := a.tunnelState(1, local, map[int]netip.Addr{5: remote, 6: remote.Next()})
	second := a.tunnelState(1, local, map[int]netip.Addr{5: remote.Next()})
	second.Tunnel.Port = 4789
	for want, ids := range map[*Wanted][]int{&first: {2, 3}, &second: {3, 4}} {
		direct := a.directRoutes(l, ids...)
		want.Nexthops, want.Routes = append(want.Nexthops, direct.Nexthops...), append(want.Routes, direct.Routes...)
	}
	for i, h := range second.Nexthops {
		if h.ID == nexthopID(3, false) {
			second.Nexthops[i].Gateway = l.addressOf(30, false)
		}
	}
	for _, c := range []struct {
		name     string
		from, to Wanted
	}{{"start", Wanted{}, first}, {"change", first, second}, {"remove", second, Wanted{}}} {
		for name, injected := range map[string]string{"fails": fault.EnvFailAt + "=%d", "killed": fault.EnvRunAt + "=%d kill -KILL $PPID"} {
			t.Run(c.name+" "+name, func(t *testing.T) { n := a; n.TB = t; n.injectFaults(c.from, c.to, injected) })
		}
	}
}

// injectFaults goes from one state to another again and again, with the fault at the next kernel change each time.
func (n labNode) injectFaults(from, to Wanted, injected string) {
	n.mustApply(Wanted{}, Options{})
	n.mustApply(from, Options{})
	n.mustApply(to, Options{})
	want := n.snapshot()
	for at := 1; ; at++ {
		n.mustApply(Wanted{}, Options{})
		n.mustApply(from, Options{})
		moments := n.applyWith(fmt.Sprintf(injected, at), to)
		if len(moments) < at {
			if at < 8 {
				n.Errorf("only %d changes: %q", at-1, moments)
			}
			n.Logf("%d faults", at-1)
			return
		}
		n.mustApply(to, Options{})
		if diff := snapshot.Diff(want, n.snapshot()); len(diff) > 0 {
			n.Errorf("fault at %s:\n%s", moments[at-1], strings.Join(diff, "\n"))
		}
	}
}

// applyWith runs Apply in a child process with an injected fault, and returns the kernel changes that it began.
func (n labNode) applyWith(injected string, want Wanted) (moments []string) {
	n.Helper()
	text, err := json.Marshal(want)
	kerneltest.Must(n, err)
	trace := filepath.Join(n.TempDir(), "trace")
	kerneltest.Must(n, os.WriteFile(trace, nil, 0o600))
	cmd := exec.Command("/proc/self/exe")
	cmd.Stdin, cmd.Stderr = bytes.NewReader(text), os.Stderr
	cmd.Env = []string{applierEnv + "=" + n.pod.Path, injected, fault.EnvMoments + "=" + trace}
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		n.Fatal(err)
	}
	list, err := os.ReadFile(trace)
	kerneltest.Must(n, err)
	return strings.Split(strings.TrimSuffix(string(list), "\n"), "\n")
}
