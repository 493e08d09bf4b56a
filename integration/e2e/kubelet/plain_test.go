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

// TestPlainPod: a static pod gets an address of each family, both in the kubelet's status. Its server answers, and the pod keeps both
// addresses when the kubelet restarts. Nothing remains after its end. It runs with containerd and with CRI-O.
func TestPlainPod(t *testing.T) {
	node.Skip(t)
	l := &lab{t: t, kubelet: newKubelet(t, "none")}
	t.Cleanup(l.removeAll)
	l.kubelet.run()
	l.drop("plain", nil)
	within(t, 60*time.Second, "pod plain runs", func() error { return l.runs("plain") })
	before := l.status("plain")
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
	l.serves("plain")
	l.kubelet.end(syscall.SIGKILL)
	l.kubelet.run()
	within(t, 20*time.Second, "pod plain still runs", func() error { return l.runs("plain") })
	if got, want := fmt.Sprintf("%+v", l.status("plain")), fmt.Sprintf("%+v", before); got != want {
		t.Errorf("after a restart of the kubelet it reports %s: want %s", got, want)
	}
	l.serves("plain")
	l.remove("plain")
}
