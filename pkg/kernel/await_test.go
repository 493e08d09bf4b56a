// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/kerneltest"
)

// TestAwaitAddress: after AwaitAddress, the namespace is in the address's solicited-node group and has its local route, although the
// kernel's work queue for new IPv6 addresses was full.
func TestAwaitAddress(t *testing.T) {
	w := newWire(t)
	fill := kerneltest.DelayAddresses(t)
	late := 0
	for _, p := range prefixes("fd00::11:1/64", "fd00::11:2/64", "fd00::11:3/64", "fd00::11:4/64", "fd00::11:5/64") {
		fill()
		kerneltest.Must(t, w.pod.AddAddress(w.podSide, p, false))
		if !inSolicitedGroup(t, w.pod, p.Addr()) {
			late++
		}
		kerneltest.Must(t, w.pod.AwaitAddress(p.Addr(), time.Now().Add(time.Minute)))
		if !inSolicitedGroup(t, w.pod, p.Addr()) {
			t.Errorf("%s: not in its solicited-node group", p.Addr())
		}
		if has, err := w.pod.HasAddress(w.podSide, p.Addr()); !has || err != nil {
			t.Errorf("%s: local route %t, %v", p.Addr(), has, err)
		}
	}
	t.Logf("%d of 5 addresses were late", late)
}

// inSolicitedGroup reports whether a namespace has joined the solicited-node group of an address (RFC 4291 section 2.7.1).
func inSolicitedGroup(t *testing.T, n *NS, addr netip.Addr) (is bool) {
	t.Helper()
	ip := addr.As16()
	group := "ff0200000000000000000001ff" + strings.ReplaceAll(netip.AddrFrom16(ip).StringExpanded()[32:], ":", "")
	kerneltest.Must(t, n.inNamespace(func() error {
		groups, err := os.ReadFile("/proc/thread-self/net/igmp6")
		is = strings.Contains(string(groups), group)
		return err
	}))
	return is
}

// TestAwaitLateAddress: AwaitAddress waits for an address that another program is about to add, and gives up at the deadline.
func TestAwaitLateAddress(t *testing.T) {
	w := newWire(t)
	p := prefixes("fd00::12:1/64")[0]
	if err := w.pod.AwaitAddress(p.Addr(), time.Now().Add(20*time.Millisecond)); err == nil {
		t.Error("no error without the address")
	}
	added := make(chan error)
	go func() {
		time.Sleep(50 * time.Millisecond)
		added <- w.pod.AddAddress(w.podSide, p, false)
	}()
	kerneltest.Must(t, w.pod.AwaitAddress(p.Addr(), time.Now().Add(time.Minute)), <-added)
}
