// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/kernel"
)

// endpoint sends or receives packets: a pod or the node.
type endpoint struct {
	do func(func() error) error
	ip netip.Addr
}

// endOf returns the pod as an endpoint, with the first IPv4 address of an interface.
func (a attachedPod) endOf(name string) (e endpoint) {
	a.Helper()
	e.do = a.Pod.Do
	a.inPod(func(pod *kernel.NS) {
		link, _, err := pod.Link(name)
		must(a, err)
		has, err := pod.Addresses(link)
		must(a, err)
		for _, p := range has {
			if p.Addr().Is4() {
				e.ip = p.Addr()
			}
		}
	})
	if !e.ip.IsValid() {
		a.Fatalf("%s has no address: %s", name, a.prev)
	}
	return e
}

// canReach reports whether at least one of many packets arrives in time.
func (e endpoint) canReach(t *testing.T, to endpoint, within time.Duration) bool {
	t.Helper()
	var in *net.UDPConn
	var out net.Conn
	must(t, to.do(func() (err error) {
		in, err = net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(to.ip, 0)))
		return err
	}))
	defer in.Close()
	must(t, e.do(func() (err error) {
		out, err = net.Dial("udp", in.LocalAddr().String())
		return err
	}))
	defer out.Close()
	for until := time.Now().Add(within); time.Now().Before(until); {
		_, _ = out.Write([]byte("x")) // the test expects an unreachable address
		must(t, in.SetReadDeadline(time.Now().Add(50*time.Millisecond)))
		if n, _ := in.Read(make([]byte, 1)); n == 1 {
			return true
		}
	}
	return false
}

// patience is the time for a packet that must arrive, inVain that for one that must not. Both are long because the machine is emulated.
const (
	patience = 20 * time.Second
	inVain   = time.Second
)

// TestIGBTraffic: pods reach each other and the node through their VFs, and in a VLAN only the pods of that VLAN.
func TestIGBTraffic(t *testing.T) {
	l := newIGB(t, "ipam", ranges())
	pf, own := l.pf(), netip.MustParsePrefix("10.61.0.250/24")
	must(t, l.host.AddAddress(pf, own, false))
	t.Cleanup(func() { must(t, l.host.DelAddress(l.pf(), own)) })
	node := endpoint{func(f func() error) error { return f() }, own.Addr()}
	join := func(l igb, id string, vlan int) (attachedPod, endpoint) {
		// In the initial state, the second VF is in VLAN 7.
		a := l.add(id, "vlan", vlan, "mac", map[string]string{"a": "02:00:00:00:aa:0a", "b": "02:00:00:00:aa:0b"}[id])
		return a, a.endOf("net1")
	}
	other := l.otherPod()
	l.first()
	_, a := join(l, "a", 0)
	l.second()
	_, b := join(other, "b", 0)
	if !a.canReach(t, b, patience) || !b.canReach(t, a, patience) || !a.canReach(t, node, patience) || !node.canReach(t, b, patience) {
		t.Error("without VLANs they do not reach one another")
	}
	l.OK(other.Call("DEL", "b"))
	_, b = join(other, "b", 100)
	if a.canReach(t, b, inVain) || b.canReach(t, a, inVain) || b.canReach(t, node, inVain) || !a.canReach(t, node, patience) {
		t.Error("VLAN 100 is not apart")
	}
	l.OK(l.Call("DEL", "a"))
	l.first()
	_, a = join(l, "a", 100)
	if !a.canReach(t, b, patience) || !b.canReach(t, a, patience) || a.canReach(t, node, inVain) {
		t.Error("in VLAN 100 they do not reach one another")
	}
	l.OK(other.Call("DEL", "b"))
	l.second()
	joined, b := join(other, "b", 101)
	if a.canReach(t, b, inVain) {
		t.Error("from VLAN 100 to 101")
	}
	l.OK(joined.check("vlan", 101, "mac", "02:00:00:00:aa:0b"))
	l.OK(other.Call("DEL", "b"))
	l.del("a")
}

// TestIGBMAC: packets arrive with the MAC that the PF set, and a tenant cannot change it unless the VF is trusted. Forged MACs are not
// covered, because QEMU's emulated card ignores spoofchk.
func TestIGBMAC(t *testing.T) {
	l := newIGB(t, "vlan", 0, "mac", "02:00:00:00:aa:01", "ipam", ranges())
	l.second()
	other := l.otherPod()
	b := other.add("b", "mac", "02:00:00:00:aa:02")
	forge := net.HardwareAddr{2, 0, 0, 0, 0xbb, 1}
	for _, c := range []struct{ spoofchk, trust string }{{"on", "off"}, {"off", "off"}, {"on", "on"}} {
		l.first()
		a := l.add("a", "spoofchk", c.spoofchk, "trust", c.trust)
		if !a.endOf("net1").canReach(t, b.endOf("net1"), patience) {
			t.Errorf("%+v: no packet with its own MAC", c)
		}
		var err error
		l.inPod(func(pod *kernel.NS) { err = pod.SetMAC(l.podLink("net1"), forge) })
		if c.trust == "off" && !errors.Is(err, unix.EADDRNOTAVAIL) || c.trust == "on" && err != nil {
			t.Errorf("%+v: another MAC: %v", c, err)
		}
		if got := l.podLink("net1").MAC.String(); c.trust == "off" && !strings.HasSuffix(got, "aa:01") {
			t.Errorf("%+v: it has %s", c, got)
		}
		l.OK(l.Call("DEL", "a"))
	}
	l.OK(other.Call("DEL", "b"))
	l.isGolden()
}

// TestIGBDuplicate: ADD detects an IPv6 address that another host on the cable has, and restores the VF.
func TestIGBDuplicate(t *testing.T) {
	of := func(subnet string) object {
		return object{"type": "host-local", "ranges": []any{[]any{object{"subnet": subnet}}}}
	}
	l := newIGB(t, "vlan", 0, "ipam", of("fd00:61::/64"))
	l.second()
	other := l.otherPod()
	other.add("b", "ipam", of("fd00:62::/64"))
	var err error
	other.inPod(func(pod *kernel.NS) {
		err = pod.AddAddress(other.podLink("net1"), netip.MustParsePrefix("fd00:61::2/64"), false)
	})
	must(t, err)
	l.first()
	o := l.Call("ADD", "a")
	if o.Exit != 1 || !strings.Contains(string(o.Stdout), "fd00:61::2") {
		t.Errorf("%s", o.Stdout)
	}
	l.OK(other.Call("DEL", "b"))
	l.isGolden()
	a := l.add("a")
	l.OK(a.check())
	l.del("a")
}
