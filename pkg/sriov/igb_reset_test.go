// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"os/exec"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
)

// TestIGBReset: an orphaned VF, without a driver during the reset of its function, has its default settings afterwards. A VF that a pod
// uses is refused.
func TestIGBReset(t *testing.T) {
	l := newIGB(t)
	vf := l.second()
	name := l.nic.VFs[1].Name
	run := func(args ...string) (string, error) {
		out, err := exec.Command(binaryPath(t, "PODLACE_BIN", "podlace"),
			append([]string{"sriov", "reset", vf, "--function"}, args...)...).CombinedOutput()
		return string(out), err
	}
	l.add("a", "mtu", 1300, "trust", "on", "vlan", 100)
	*l.devices = nil // as the kubelet and the device plugin see it
	l.publish()
	if out, err := run("--yes"); err == nil || !strings.Contains(out, "pod shop/web-0 has it since") {
		t.Errorf("%v: %s", err, out)
	}
	l.podLink("net1")
	l.changeAsTenant("net1")
	must(t, l.Pod.Close())
	kerneltest.Await(t, "the VF is home", func() bool { _, ok, err := l.host.LinkOf(vf); must(t, err); return ok })
	out, err := run()
	if err != nil || !strings.Contains(out, "has the settings of pod shop/web-0: restore its former settings\n") ||
		!strings.HasSuffix(out, "bind its driver igbvf\nNothing was changed. --yes does it.\n") {
		t.Errorf("%v: %s", err, out)
	}
	out, err = run("--yes")
	if err != nil || !strings.Contains(out, "unbind its driver igbvf\nreset the function\nbind its driver igbvf\nDone.") {
		t.Errorf("%v: %s", err, out)
	}
	link := l.link(name)
	if got := formatVF(l.asPF(1)); l.driverOf(vf) != "igbvf" || link.Device != vf || link.MTU != 1500 || link.AllMulti ||
		!strings.Contains(got, "vlan 0 qos 0") ||
		!strings.Contains(got, "spoofchk on trust off") || !strings.HasSuffix(got, "max_tx_rate 0") {
		t.Errorf("driver %s, %s\n%s", l.driverOf(vf), describe(link), got)
	}
	l.allocate(vf)
	b := l.otherPod()
	b.OK(b.add("b").check())
	b.OK(b.Call("DEL", "b"))
}
