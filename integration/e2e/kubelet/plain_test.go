// SPDX-License-Identifier: Apache-2.0

package kubelet_test

import (
	"fmt"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/harness/node"
)

// TestPlainPod: a static pod gets an IPv4 and an IPv6 address, which are in the kubelet's status. Its server answers, it keeps both
// addresses over a restart of the kubelet, and leaves no state, with containerd and with CRI-O.
func TestPlainPod(t *testing.T) {
	node.Skip(t)
	l := &testLab{t: t, testKubelet: newKubelet(t, "none")}
	t.Cleanup(l.removeAll)
	l.runKubelet()
	l.putManifest("plain", nil)
	checkWithin(t, 60*time.Second, "pod plain runs", func() error { return l.runs("plain") })
	before := l.statusOf("plain")
	var families [2]int
	for _, ip := range before.Status.PodIPs {
		if a, err := netip.ParseAddr(ip.IP); err == nil && a.Is4() {
			families[0]++
		} else if err == nil {
			families[1]++
		}
	}
	if families != [2]int{1, 1} {
		t.Errorf("the kubelet reports %+v: want one address of each family", before.Status)
	}
	l.checkServes("plain")
	l.testKubelet.endProgram(syscall.SIGKILL)
	l.runKubelet()
	checkWithin(t, 20*time.Second, "pod plain still runs", func() error { return l.runs("plain") })
	if got, want := fmt.Sprintf("%+v", l.statusOf("plain")), fmt.Sprintf("%+v", before); got != want {
		t.Errorf("after a restart of the kubelet it reports %s: want %s", got, want)
	}
	l.checkServes("plain")
	l.removePods("plain")
}
