// SPDX-License-Identifier: Apache-2.0

package noderoutes

import (
	"crypto/rand"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/kernel"
)

// tunnelLab has two nodes with a pod each in two subnets. The router between these drops packets with pod addresses, like those of cloud
// providers.
type tunnelLab struct {
	nodes [2]labNode // the numbers of their podCIDRs are 1 and 2
	pods  [2]labNode
	lans  [2]lan
	v6    bool // the underlay
}

func newTunnelLab(t *testing.T, v6 bool) tunnelLab {
	t.Helper()
	lab := tunnelLab{lans: [2]lan{newLAN(t, 2), newLAN(t, 3)}, v6: v6}
	router := newNode(t).joinLAN(lab.lans[0], "eth0", 254).joinLAN(lab.lans[1], "eth1", 254)
	router.runInside(func() error {
		return errors.Join(dropFrom("10.0.0.0/8"), dropFrom("fd10::/16"))
	})
	for i, l := range lab.lans {
		lab.nodes[i] = newNode(t).joinLAN(l, "eth0", 1+i)
		lab.nodes[i].runInside(func() error {
			return errors.Join(addRoute("eth0", "0.0.0.0/0", l.addressOf(254, false).String(), unix.RTPROT_STATIC, 0),
				addRoute("eth0", "::/0", l.addressOf(254, true).String(), unix.RTPROT_STATIC, 0))
		})
		lab.pods[i] = lab.nodes[i].withPod(1 + i)
	}
	return lab
}

// dropFrom makes the caller's namespace drop packets from a subnet.
func dropFrom(subnet string) error {
	from, err := netlink.ParseIPNet(subnet)
	if err != nil {
		return err
	}
	rule := netlink.NewRule()
	rule.Src, rule.Type, rule.Priority = from, unix.FR_ACT_BLACKHOLE, 1
	if from.IP.To4() == nil {
		rule.Family = unix.AF_INET6
	}
	return netlink.RuleAdd(rule)
}

// withPod adds a pod to the node, with the first pod addresses of its podCIDRs.
func (n labNode) withPod(id int) (pod labNode) {
	n.Helper()
	pod = newNode(n.TB)
	f, err := os.Open(pod.pod.Path)
	kerneltest.Must(n, err)
	defer f.Close()
	n.runInside(func() error {
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "pod0"}, PeerName: "eth0", PeerNamespace: netlink.NsFd(f.Fd())})
	})
	last4, last6 := netip.MustParseAddr(fmt.Sprintf("10.0.%d.254", id)), netip.MustParseAddr(fmt.Sprintf("fd10:%x::fe", id))
	n.runInside(func() error {
		return errors.Join(netlink.LinkSetUp(mustLink("pod0")), addAddress("pod0", last4.String()+"/24"),
			addAddress("pod0", last6.String()+"/64"))
	})
	pod.runInside(func() error {
		return errors.Join(netlink.LinkSetUp(mustLink("eth0")), addAddress("eth0", podAddress(id, false).String()+"/24"),
			addAddress("eth0", podAddress(id, true).String()+"/64"),
			addRoute("eth0", "0.0.0.0/0", last4.String(), unix.RTPROT_STATIC, 0), addRoute("eth0", "::/0", last6.String(), unix.RTPROT_STATIC, 0))
	})
	return pod
}

// macOf returns the MAC of the tunnel device of a node by its number.
func macOf(id int) net.HardwareAddr { return net.HardwareAddr{0x0e, 0x50, 0, 0, 0, byte(id)} }

// hopsOf returns the next hops through the tunnel to a node by its number.
func hopsOf(id int) []netip.Addr {
	return []netip.Addr{netip.AddrFrom4([4]byte{169, 254, 1, byte(id)}), netip.MustParseAddr(fmt.Sprintf("fe80::50:%x", id))}
}

// tunnelState returns the wanted state of a node by its number, with the given tunnel address. peers maps each peer's number to its
// underlay address.
func (n labNode) tunnelState(id int, local netip.Addr, peers map[int]netip.Addr) (want Wanted) {
	mtu := 1450
	if local.Is6() {
		mtu = 1430
	}
	want.Tunnel = &Tunnel{Addresses: []netip.Addr{cidrOf(id, false).Addr(), cidrOf(id, true).Addr()},
		VXLAN: kernel.VXLAN{Name: "podlace.vx", VNI: 142, Port: 8472, Local: local, MAC: macOf(id), MTU: mtu}}
	for peer, remote := range peers {
		want.Tunnel.Peers = append(want.Tunnel.Peers, kernel.TunnelPeer{MAC: macOf(peer), Remote: remote, Hops: hopsOf(peer)})
		for _, v6 := range []bool{false, true} {
			hop := kernel.Nexthop{ID: nexthopID(peer, v6), Gateway: hopsOf(peer)[0], Link: TunnelLink, OnLink: true}
			if v6 {
				hop.Gateway = hopsOf(peer)[1]
			}
			want.Nexthops = append(want.Nexthops, hop)
			want.Routes = append(want.Routes, kernel.ProtocolRoute{Dst: cidrOf(peer, v6), Nexthop: hop.ID})
		}
	}
	return want
}

// wantedOf returns the wanted state of the node with the given index in the lab.
func (lab tunnelLab) wantedOf(i int) Wanted {
	other := 1 - i
	remotes := map[int]netip.Addr{1 + other: lab.lans[other].addressOf(1+other, lab.v6)}
	return lab.nodes[i].tunnelState(1+i, lab.lans[i].addressOf(1+i, lab.v6), remotes)
}

// TestTunnelTraffic: pods and nodes in two subnets reach each other through the tunnel in all combinations of families. A second Apply
// changes nothing, too large packets get an ICMP error with the correct MTU, and Remove restores the initial state.
func TestTunnelTraffic(t *testing.T) {
	for _, v6 := range []bool{false, true} {
		t.Run(map[bool]string{false: "IPv4", true: "IPv6"}[v6], func(t *testing.T) {
			lab := newTunnelLab(t, v6)
			a := lab.nodes[0]
			before := a.snapshot()
			lab.pods[0].mustReach(podAddress(2, false), false)
			changed := a.monitor()
			if r := a.mustApply(lab.wantedOf(0), Options{}); r.Changes != 10 { // device, fdb, 2 neighbours, 2 addresses, 2 nexthops, 2 routes
				t.Errorf("%+v", r)
			}
			lab.nodes[1].mustApply(lab.wantedOf(1), Options{})
			mtu := 1500 - 50
			if v6 {
				mtu = 1500 - 70
			}
			for _, inner6 := range []bool{false, true} {
				lab.pods[0].mustReach(podAddress(2, inner6), true)
				a.mustReach(podAddress(2, inner6), true)
				if got := lab.pods[0].pathMTU(podAddress(2, inner6)); got != mtu {
					t.Errorf("path MTU to %s: %d, want %d", podAddress(2, inner6), got, mtu)
				}
			}
			if s := a.snapshot(); !holds(s, "neighbour 169.254.1.2 dev podlace.vx state 128 flags 0 lladdr=0e:50:00:00:00:02 proto=142") ||
				!holds(s, "fdb 0e:50:00:00:00:02 dev podlace.vx") {
				t.Errorf("%s", s)
			}
			changed()
			if r := a.mustApply(lab.wantedOf(0), Options{}); r.Changes != 0 || changed() != 0 {
				t.Errorf("the same again: %+v", r)
			}
			_, err := Remove(a.ns)
			kerneltest.Must(t, err)
			a.mustBeUnchanged(before)
		})
	}
}

// pathMTU sends a packet with DF that is too large for the tunnel, and returns the path MTU that the node then knows.
func (n labNode) pathMTU(to netip.Addr) (mtu int) {
	n.Helper()
	network, level, discover, do, ask := "udp4", unix.IPPROTO_IP, unix.IP_MTU_DISCOVER, unix.IP_PMTUDISC_DO, unix.IP_MTU
	if to.Is6() {
		network, level, discover, do, ask = "udp6", unix.IPPROTO_IPV6, unix.IPV6_MTU_DISCOVER, unix.IPV6_PMTUDISC_DO, unix.IPV6_MTU
	}
	n.runInside(func() error {
		conn, err := net.DialUDP(network, nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(to, 9)))
		if err != nil {
			return err
		}
		defer conn.Close()
		raw, err := conn.SyscallConn()
		if err != nil {
			return err
		}
		var set error
		err = raw.Control(func(fd uintptr) { set = unix.SetsockoptInt(int(fd), level, discover, do) })
		for deadline := time.Now().Add(time.Minute); err == nil && set == nil && time.Now().Before(deadline); time.Sleep(time.Millisecond) {
			_, _ = conn.Write(slices.Repeat([]byte(rand.Text()), 55)) // 1430 bytes, with headers 1458 or 1478
			err = raw.Control(func(fd uintptr) { mtu, set = unix.GetsockoptInt(int(fd), level, ask) })
			if mtu != 1500 {
				break
			}
		}
		return errors.Join(err, set)
	})
	return mtu
}

// TestMeasuredTunnelChanges: no packet to an unchanged peer is lost while others join, leave and move and the device's MTU changes. Entries
// of deleted peers are deleted. The device is recreated if its UDP port changes, and deleted with the last peer.
func TestMeasuredTunnelChanges(t *testing.T) {
	lab := newTunnelLab(t, false)
	a := lab.nodes[0]
	lab.nodes[1].mustApply(lab.wantedOf(1), Options{})
	local, remote := lab.lans[0].addressOf(1, false), lab.lans[1].addressOf(2, false)
	a.mustApply(lab.wantedOf(0), Options{})
	quiet := a.snapshot()
	changed := a.monitor()
	sent, lost, rounds := lab.pods[0].measureLoss([]netip.Addr{podAddress(2, false), podAddress(2, true)}, 2*time.Second, func(round int) {
		peers := map[int]netip.Addr{2: remote}
		if round%3 > 0 {
			peers[3] = lab.lans[1].addressOf(round%3, false)
		}
		want := a.tunnelState(1, local, peers)
		want.Tunnel.MTU = 1450 - round%2
		a.mustApply(want, Options{})
		changed()
		if r := a.mustApply(want, Options{}); r.Changes != 0 || changed() != 0 {
			t.Errorf("round %d: %+v", round, r)
		}
	})
	if lost > 0 || sent < 1900 || rounds < 6 {
		t.Errorf("%d of %d lost in %d rounds", lost, sent, rounds)
	}
	a.mustApply(lab.wantedOf(0), Options{})
	a.mustBeUnchanged(quiet)

	// The node's own podCIDRs change, and another program adds an address to the device.
	want := lab.wantedOf(0)
	want.Tunnel.Addresses = []netip.Addr{cidrOf(7, false).Addr(), cidrOf(7, true).Addr()}
	a.runInside(func() error { return addAddress("podlace.vx", "198.18.0.1/32") })
	a.mustApply(want, Options{})
	if have, err := a.ns.Addresses(a.linkOf("podlace.vx")); err != nil || fmt.Sprint(have) != "[10.0.7.0/32 fd10:7::/128]" {
		t.Errorf("%s, %v", have, err)
	}

	index := a.linkOf("podlace.vx").Index
	want.Tunnel.Port = 4789
	a.mustApply(want, Options{})
	if vx, err := a.ns.VXLANs(); err != nil || len(vx) != 1 || vx[0].VXLAN.Port != 4789 || vx[0].Index == index {
		t.Errorf("%+v, %v", vx, err)
	}
	a.mustApply(Wanted{}, Options{})
	if vx, err := a.ns.VXLANs(); err != nil || len(vx) != 0 {
		t.Errorf("%+v, %v", vx, err)
	}
}

// TestTunnelInTheWay: another program's device in the way of the tunnel is kept, and reported as the cause for each route through the
// tunnel. All other routes are added.
func TestTunnelInTheWay(t *testing.T) {
	for name, c := range map[string]struct {
		link netlink.Link
		says string
	}{
		"name": {&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "podlace.vx"}}, "link podlace.vx is in the way: another program made it (bridge)"},
		"kind": {&netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Name: "podlace.vx"}, VxlanId: 9, Port: 9},
			"link podlace.vx is in the way: another program made it (vxlan)"},
		"VNI": {&netlink.Vxlan{LinkAttrs: netlink.LinkAttrs{Name: "flannel.1"}, VxlanId: 142, Port: 8472},
			"link flannel.1 is in the way: it has VNI 142 on port 8472, and another program made it"},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLAN(t, 2)
			a := newNode(t).joinLAN(l, "eth0", 1)
			a.runInside(func() error { return netlink.LinkAdd(c.link) })
			before := a.snapshot()
			want := a.tunnelState(1, l.addressOf(1, false), map[int]netip.Addr{2: netip.MustParseAddr("192.0.3.2")})
			direct := a.directRoutes(l, 3)
			want.Nexthops, want.Routes = append(want.Nexthops, direct.Nexthops...), append(want.Routes, direct.Routes...)
			r, err := Apply(a.ns, want, Options{})
			kerneltest.Must(t, err)
			var foreign *kernel.ForeignLink
			if !errors.As(r.Failed[cidrOf(2, false)], &foreign) || len(r.Failed) != 2 ||
				!strings.Contains(r.Failed[cidrOf(2, true)].Error(), c.says) ||
				r.Changes != 4 || !errors.As(r.Other, &foreign) {
				t.Errorf("%+v", r)
			}
			_, err = Remove(a.ns)
			kerneltest.Must(t, err)
			a.mustBeUnchanged(before)
		})
	}
}
