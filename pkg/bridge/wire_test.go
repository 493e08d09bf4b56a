// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/kernel"
)

// addUplink gives the node an uplink with one default route for each gateway, until the test ends.
func (l lab) addUplink(mtu int, prefix string, gateways ...string) {
	l.Helper()
	pair := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "uplink0", MTU: mtu, TxQLen: -1}, PeerName: "router0"}
	if err := netlink.LinkAdd(pair); err != nil {
		l.Fatal(err)
	}
	l.Cleanup(func() { _ = onHost("uplink0", netlink.LinkDel) })
	for _, name := range []string{"uplink0", "router0"} {
		if err := onHost(name, netlink.LinkSetUp); err != nil {
			l.Fatal(err)
		}
	}
	err := onHost("uplink0", func(link netlink.Link) error {
		addr, err := netlink.ParseAddr(prefix)
		if err != nil {
			return err
		}
		if err := netlink.AddrAdd(link, addr); err != nil {
			return err
		}
		for _, gw := range gateways {
			if err := netlink.RouteAdd(&netlink.Route{LinkIndex: link.Attrs().Index, Gw: net.ParseIP(gw)}); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		l.Fatal(err)
	}
}

// TestAutoMTU: pods get the MTU of the node's uplink.
func TestAutoMTU(t *testing.T) {
	l := bareLab(t, "name", "automtu", "bridge", "btmtu", "mtu", "auto")
	t.Cleanup(func() { _ = onHost("btmtu", netlink.LinkDel) })
	a := l.add("a")
	if got := a.result.Interfaces[2].Mtu; got != 1500 {
		t.Errorf("without an uplink: %d", got)
	}
	l.addUplink(1400, "192.168.7.2/24", "192.168.7.1")
	l.OK(a.check())
	for _, dst := range []string{"192.0.2.0/24", "198.51.100.0/24"} { // as cautious admins do
		blackhole := &netlink.Route{Dst: kernel.IPNet(netip.MustParsePrefix(dst)), Type: unix.RTN_BLACKHOLE}
		if err := netlink.RouteAdd(blackhole); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = netlink.RouteDel(blackhole) })
	}
	b := l.other().add("b")
	for _, i := range b.result.Interfaces[1:] {
		if i.Mtu != 1400 {
			t.Errorf("%s has mtu %d", i.Name, i.Mtu)
		}
	}
	l.OK(b.check())
}

// TestAlias: 'ip link' shows the pod's name as the alias of the host side.
func TestAlias(t *testing.T) {
	l := newLab(t)
	for args, want := range map[string]string{
		"": "a",
		"K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0":                       "shop/web-0",
		"K8S_POD_NAMESPACE=shop;K8S_POD_NAME=w\tb\u202e\x1b[1m":           "shop/w?b??[1m",
		"K8S_POD_NAMESPACE=shop;K8S_POD_NAME=" + strings.Repeat("x", 300): "shop/" + strings.Repeat("x", 250),
	} {
		a := l.add("a", "CNI_ARGS", args)
		var alias string
		if err := onHost(a.hostVeth(), func(link netlink.Link) error { alias = link.Attrs().Alias; return nil }); err != nil || alias != want {
			t.Errorf("%q: alias %q, %v, want %q", args, alias, err, want)
		}
		l.OK(l.Call("DEL", "a"))
	}
}
