// SPDX-License-Identifier: Apache-2.0

package noderoutes

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/integration/snapshot"
	"github.com/podlace/podlace/pkg/cli/sandbox"
	"github.com/podlace/podlace/pkg/kernel"
)

func TestMain(m *testing.M) {
	if path := os.Getenv(applierEnv); path != "" { // a child process that a test started inside the sandbox
		os.Exit(applier(path))
	}
	kerneltest.Main(m)
}

// applierEnv has the path of a network namespace. A child process with it reads a Wanted from stdin and applies it in that namespace.
const applierEnv = "NODEROUTES_APPLY_IN"

func applier(path string) (exit int) {
	var want Wanted
	f, err := os.Open(path)
	if err == nil {
		err = json.NewDecoder(os.Stdin).Decode(&want)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	ns, err := kernel.Open(f)
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	if r, err := Apply(ns, want, Options{}); err != nil || len(r.Failed) > 0 || r.Other != nil {
		return 1
	}
	return 0
}

// lan is an Ethernet network between test nodes: a bridge in the namespace of the test. The nodes' addresses contain the number of the LAN:
// 192.0.<number>.x and fd00:<number>::x.
type lan struct {
	testing.TB
	host   *kernel.Node
	bridge kernel.Link
	number int
}

func newLAN(t testing.TB, number int) lan {
	t.Helper()
	host, err := kernel.Host()
	kerneltest.Must(t, err)
	t.Cleanup(host.Close)
	name := fmt.Sprint("nrlan", number)
	kerneltest.Must(t, host.AddBridge(name, nil, 0, false, false))
	t.Cleanup(func() { kerneltest.Must(t, host.DelLink(name)) })
	bridge, ok, err := host.Link(name)
	if !ok || err != nil {
		t.Fatal(ok, err)
	}
	kerneltest.Must(t, host.SetUp(bridge))
	return lan{t, host, bridge, number}
}

// labNode is a test node: a network namespace with links to LANs.
type labNode struct {
	testing.TB
	pod *sandbox.Pod
	ns  *kernel.NS
}

func newNode(t testing.TB) labNode {
	t.Helper()
	pod := kerneltest.NewPod(t)
	f, err := os.Open(pod.Path)
	kerneltest.Must(t, err)
	ns, err := kernel.Open(f)
	kerneltest.Must(t, err)
	t.Cleanup(func() { ns.Close(); f.Close() })
	kerneltest.Must(t, ns.Set(kernel.Sysctl{Path: "ipv4/ip_forward", Value: "1"}, kernel.Sysctl{Path: "ipv6/conf/all/forwarding", Value: "1"},
		// The kernel sends neighbour solicitations for forwarded packets from the link-local address, which must not be tentative.
		kernel.Sysctl{Path: "ipv6/conf/default/accept_dad", Value: "0"}))
	n := labNode{t, pod, ns}
	n.runInside(func() error { return netlink.LinkSetUp(mustLink("lo")) })
	return n
}

// joinLAN connects a node to a LAN. Its link gets the IPv4 and IPv6 address that ends in each of ids.
func (n labNode) joinLAN(l lan, link string, ids ...int) labNode {
	n.Helper()
	f, err := os.Open(n.pod.Path)
	kerneltest.Must(n, err)
	defer f.Close()
	host := fmt.Sprintf("nr%d-%d", l.number, ids[0])
	_, err = l.host.AddVeth(kernel.Veth{Host: host, Pod: link, Netns: f, Master: l.bridge.Index})
	kerneltest.Must(n, err)
	n.Cleanup(func() { _ = l.host.DelLink(host) }) // it also disappears with the namespace
	side, _, err := l.host.Link(host)
	kerneltest.Must(n, err, l.host.SetUp(side))
	n.runInside(func() error {
		err := netlink.LinkSetUp(mustLink(link))
		for _, id := range ids {
			err = errors.Join(err, addAddress(link, fmt.Sprint(l.addressOf(id, false), "/24")), addAddress(link, fmt.Sprint(l.addressOf(id, true), "/64")))
		}
		return err
	})
	until := time.Now().Add(time.Minute)
	kerneltest.Must(n, l.host.AwaitCarrier(side, until), n.ns.AwaitCarrier(n.linkOf(link), until))
	for _, id := range ids {
		kerneltest.Must(n, n.ns.AwaitAddress(l.addressOf(id, true), until))
	}
	return n
}

// addressOf returns the address of a node in the LAN by the node's number.
func (l lan) addressOf(id int, v6 bool) netip.Addr {
	if v6 {
		return netip.MustParseAddr(fmt.Sprintf("fd00:%d::%x", l.number, id))
	}
	return netip.MustParseAddr(fmt.Sprintf("192.0.%d.%d", l.number, id))
}

// cidrOf returns the podCIDR of a node by its number.
func cidrOf(id int, v6 bool) netip.Prefix {
	if v6 {
		return netip.MustParsePrefix(fmt.Sprintf("fd10:%x::/64", id))
	}
	return netip.MustParsePrefix(fmt.Sprintf("10.%d.%d.0/24", id/256, id%256))
}

func podAddress(id int, v6 bool) netip.Addr { return cidrOf(id, v6).Addr().Next() }

// withPods adds an address of each podCIDR to the node's loopback device, in place of pods.
func (n labNode) withPods(id int) labNode {
	n.runInside(func() error {
		return errors.Join(addAddress("lo", fmt.Sprint(podAddress(id, false), "/32")), addAddress("lo", fmt.Sprint(podAddress(id, true), "/128")))
	})
	return n
}

func (n labNode) runInside(f func() error) {
	n.Helper()
	if err := n.pod.Do(f); err != nil {
		n.Fatal(err)
	}
}

func (n labNode) linkOf(name string) kernel.Link {
	n.Helper()
	l, ok, err := n.ns.Link(name)
	if !ok || err != nil {
		n.Fatalf("link %s: %t, %v", name, ok, err)
	}
	return l
}

// mustApply calls Apply without a failed change, and compares Result.Has with the agent's routes in the kernel.
func (n labNode) mustApply(want Wanted, opt Options) Result {
	n.Helper()
	r, err := Apply(n.ns, want, opt)
	if err != nil || len(r.Failed) > 0 || len(r.Conflicts) > 0 || r.Other != nil {
		n.Fatalf("%v, failed %v, conflicts %v, other %v", err, r.Failed, r.Conflicts, r.Other)
	}
	routes, err := n.ns.ProtocolRoutes(Protocol)
	kerneltest.Must(n, err)
	has := map[bool]int{}
	for _, route := range routes {
		has[route.Dst.Addr().Is4()]++
	}
	if r.Has[true] != has[true] || r.Has[false] != has[false] {
		n.Errorf("the kernel has %v routes, Apply reported %v", has, r.Has)
	}
	return r
}

func (n labNode) snapshot() *snapshot.Snapshot {
	n.Helper()
	var s *snapshot.Snapshot
	n.runInside(func() (err error) { s, err = snapshot.Take(snapshot.Options{}); return err })
	return s
}

func (n labNode) mustBeUnchanged(before *snapshot.Snapshot) {
	n.Helper()
	for _, line := range snapshot.Diff(before, n.snapshot()) {
		n.Errorf("differs: %s", line)
	}
}

func mustLink(name string) netlink.Link {
	l, err := netlink.LinkByName(name)
	if err != nil {
		panic(err)
	}
	return l
}

func addAddress(link, prefix string) error {
	a, err := netlink.ParseAddr(prefix)
	if err != nil {
		return err
	}
	if a.IP.To4() == nil {
		a.Flags = unix.IFA_F_NODAD
	}
	return netlink.AddrAdd(mustLink(link), a)
}

// addRoute adds a route of another program in the caller's namespace.
func addRoute(link, dst, via string, protocol, metric int) error {
	to, err := netlink.ParseIPNet(dst)
	if err != nil {
		return err
	}
	return netlink.RouteAdd(&netlink.Route{LinkIndex: mustLink(link).Attrs().Index, Dst: to, Gw: net.ParseIP(via),
		Protocol: netlink.RouteProtocol(protocol), Priority: metric})
}

// directRoutes returns the wanted state with direct routes through eth0 to the podCIDRs of other nodes of the LAN.
func (n labNode) directRoutes(l lan, ids ...int) (want Wanted) {
	link := n.linkOf("eth0").Index
	for _, id := range ids {
		for _, v6 := range []bool{false, true} {
			hop := kernel.Nexthop{ID: nexthopID(id, v6), Gateway: l.addressOf(id, v6), Link: link}
			want.Nexthops = append(want.Nexthops, hop)
			want.Routes = append(want.Routes, kernel.ProtocolRoute{Dst: cidrOf(id, v6), Nexthop: hop.ID})
		}
	}
	return want
}

func nexthopID(id int, v6 bool) uint32 {
	if v6 {
		return 0x50000000 + uint32(2*id+1)
	}
	return 0x50000000 + uint32(2*id)
}
