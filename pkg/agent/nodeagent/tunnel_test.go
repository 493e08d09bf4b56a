// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/agent/noderoutes"
	"github.com/podlace/podlace/pkg/kernel"
)

// tunnelState returns the tunnel's device, forwarding entries and neighbours as lines, or nil without a tunnel.
func (l *lab) tunnelState() (list []string) {
	l.Helper()
	host, err := kernel.Host()
	kerneltest.Must(l, err)
	defer host.Close()
	all, err := host.VXLANs()
	kerneltest.Must(l, err)
	for _, f := range all {
		v := f.VXLAN
		list = append(list, fmt.Sprintf("%s vni %d port %d local %s mac %s mtu %d", v.Name, v.VNI, v.Port, v.Local, v.MAC, v.MTU))
		remotes, err := host.Forwarding(f.Link)
		kerneltest.Must(l, err)
		for mac, remote := range remotes {
			list = append(list, fmt.Sprintf("fdb %s %s", mac, remote))
		}
		neighbours, err := host.PermanentNeighbours(f.Link, noderoutes.Protocol)
		kerneltest.Must(l, err)
		for hop, mac := range neighbours {
			family := "IPv6"
			if netip.MustParsePrefix("169.254.0.0/16").Contains(hop) {
				family = "IPv4"
			}
			list = append(list, fmt.Sprintf("neighbour %s %s", family, mac))
		}
	}
	slices.Sort(list)
	return list
}

func (l *lab) awaitTunnel(when string, want ...string) {
	l.Helper()
	want = slices.Sorted(slices.Values(want))
	var got []string
	await(l.T, fmt.Sprintf("%s: %q", when, want), func() bool {
		now := l.tunnelState()
		if !slices.Equal(got, now) {
			l.Logf("%s: %q", when, now)
		}
		got = now
		return slices.Equal(now, want)
	})
}

// TestTunnel: with offLink vxlan there is a tunnel to the node behind the router. It follows the addresses of both nodes, is recreated if
// deleted, and removed when no node needs it.
func TestTunnel(t *testing.T) {
	l := newLab(t, `"offLink": "vxlan"`).ready()
	const own = "podlace.vx vni 142 port 8472 local 192.0.2.1 mac 0e:50:c0:00:02:01 mtu 1450"
	l.awaitTunnel("at the start", own, "fdb 0e:50:c6:33:64:09 [198.51.100.9]", "neighbour IPv4 0e:50:c6:33:64:09")
	if l.state("n9") != "vxlan" || l.state("n2") != "direct" || l.node().MTU != 1450 || !l.routeUses("10.244.9.0/24", noderoutes.TunnelName) {
		t.Errorf("n9 %q, n2 %q, MTU %d, %q", l.state("n9"), l.state("n2"), l.node().MTU, l.routes())
	}
	l.api.put(nodeObject("n9", []string{"10.244.9.0/24", "fd00:10:244:9::/64"}, []string{"198.51.100.19"}))
	l.awaitTunnel("another address, and a podCIDR more", own, "fdb 0e:50:c6:33:64:13 [198.51.100.19]", "neighbour IPv4 0e:50:c6:33:64:13",
		"neighbour IPv6 0e:50:c6:33:64:13")
	l.await("the way to the new podCIDR", func() bool { return l.routeUses("fd00:10:244:9::/64", noderoutes.TunnelName) })

	link, err := netlink.LinkByName(noderoutes.TunnelName)
	kerneltest.Must(t, err, netlink.LinkDel(link))
	whole := []string{own, "fdb 0e:50:c6:33:64:13 [198.51.100.19]", "neighbour IPv4 0e:50:c6:33:64:13", "neighbour IPv6 0e:50:c6:33:64:13"}
	l.awaitTunnel("somebody deleted it", whole...)
	l.await("the ways through it", func() bool { return l.routeUses("10.244.9.0/24", noderoutes.TunnelName) })

	uplink, err := netlink.LinkByName("up0")
	kerneltest.Must(t, err)
	address, err := netlink.ParseAddr("192.0.2.7/24")
	kerneltest.Must(t, err, netlink.AddrAdd(uplink, address))
	self := l.peer(1)
	self.Status.Addresses[1].Address = "192.0.2.7"
	l.api.put(self)
	moved := "podlace.vx vni 142 port 8472 local 192.0.2.7 mac 0e:50:c0:00:02:07 mtu 1450"
	l.awaitTunnel("the own address changed", append([]string{moved}, whole[1:]...)...)

	config := l.read("config/config.json")
	l.put("config/config.json", strings.Replace(config, "{", `{"vxlan": {"vni": 7, "port": 4789}, `, 1))
	moved = strings.Replace(moved, "vni 142 port 8472", "vni 7 port 4789", 1)
	l.awaitTunnel("another VNI and port", append([]string{moved}, whole[1:]...)...)

	l.api.remove("n9", false)
	l.awaitTunnel("no node needs it")
	if l.node().MTU != 1450 {
		t.Errorf("MTU %d: packets of pods that start now would be too large for the coming tunnel", l.node().MTU)
	}
	l.api.put(nodeObject("n9", []string{"10.244.9.0/24"}, []string{"198.51.100.9"}))
	l.awaitTunnel("the node is back", moved, "fdb 0e:50:c6:33:64:09 [198.51.100.9]", "neighbour IPv4 0e:50:c6:33:64:09")
	l.put("config/config.json", strings.Replace(config, `"offLink": "vxlan"`, `"offLink": "refuse"`, 1))
	l.awaitTunnel("refused")
	l.await("the node is named", func() bool { return l.says("node n9", "refused") && l.node().MTU == 1500 })
	if l.log.count("level=ERROR") > 0 {
		t.Error("errors in the log")
	}
}

// TestTunnelEntries: the next periodic comparison restores deleted entries and addresses of the tunnel, whose loss causes no event.
func TestTunnelEntries(t *testing.T) {
	l := newLab(t, `"offLink": "vxlan"`)
	a, _ := l.steps()
	kerneltest.Must(t, a.nodes.Replace([]any{l.peer(1), nodeObject("n9", []string{"10.244.9.0/24"}, []string{"198.51.100.9"})}, ""))
	a.step(because(onStart))
	addresses := func(n *kernel.NS, link kernel.Link) string {
		have, err := n.Addresses(link)
		kerneltest.Must(t, err)
		return fmt.Sprint(have)
	}
	host, err := kernel.Host()
	kerneltest.Must(t, err)
	defer host.Close()
	link, ok, err := host.Link(noderoutes.TunnelName)
	if err != nil || !ok {
		t.Fatal(ok, err)
	}
	before, had := l.tunnelState(), addresses(&host.NS, link)
	neighbours, err := host.PermanentNeighbours(link, noderoutes.Protocol)
	kerneltest.Must(t, err)
	for hop, mac := range neighbours {
		hardware, err := net.ParseMAC(mac)
		kerneltest.Must(t, err, host.DelNeighbour(link, hop), host.DelForwarding(link, hardware))
	}
	kerneltest.Must(t, host.DelAddress(link, netip.MustParsePrefix("10.244.1.0/32")))
	if len(before) != 3 || len(l.tunnelState()) != 1 || addresses(&host.NS, link) == had {
		t.Fatalf("%q and after the deletion %q: want a device with two entries, and without", before, l.tunnelState())
	}
	a.step(because(onPeriod))
	if got := l.tunnelState(); !slices.Equal(got, before) || addresses(&host.NS, link) != had {
		t.Errorf("%q, addresses %s; before %q, %s", got, addresses(&host.NS, link), before, had)
	}
}

func (l *lab) routeUses(cidr, link string) bool {
	l.Helper()
	routes, err := netlink.RouteGet(netip.MustParsePrefix(cidr).Addr().Next().AsSlice())
	if err != nil || len(routes) == 0 {
		return false
	}
	by, err := netlink.LinkByIndex(routes[0].LinkIndex)
	return err == nil && by.Attrs().Name == link
}

// TestTunnelRemoved: "podlace-node remove" deletes the tunnel, but reports and keeps another program's link of the same name.
func TestTunnelRemoved(t *testing.T) {
	l := newLab(t, `"offLink": "vxlan"`).ready()
	l.stop()
	if exit, out, stderr := l.runCmd("remove", "--config", l.Config); exit != 0 || len(l.tunnelState()) > 0 {
		t.Errorf("exit %d: %s%s, left %q", exit, out, stderr, l.tunnelState())
	}
	kerneltest.Must(t, netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: noderoutes.TunnelName}}))
	l.start()
	l.await("the link in the way is named", func() bool { return l.says("node n9", "failed", noderoutes.TunnelName, "is in the way") })
	if l.state("n2") != "direct" {
		t.Errorf("n2 %q: it needs no tunnel", l.state("n2"))
	}
	link, err := netlink.LinkByName(noderoutes.TunnelName)
	kerneltest.Must(t, err)
	if link.Type() != "bridge" {
		t.Errorf("a %s", link.Type())
	}
	kerneltest.Must(t, netlink.LinkDel(link))
	l.await("the tunnel", func() bool { return l.state("n9") == "vxlan" && l.status().Ready })
}
