// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/cli/sandbox"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

func listLeases(t *testing.T) (list []string) {
	t.Helper()
	entries, _ := os.ReadDir("/var/lib/cni/networks/net")
	for _, e := range entries {
		if _, err := netip.ParseAddr(e.Name()); err == nil {
			list = append(list, e.Name())
		}
	}
	return list
}

func TestAdd(t *testing.T) {
	l := newLab(t)
	a := l.add("a")
	key := attachment.Key{Network: "net", ContainerID: "a", IfName: "eth0"}
	address, _ := kernel.Prefix(&a.result.IPs[0].Address)
	want := []*types100.Interface{
		{Name: "bt0", Mtu: 1500}, {Name: key.HostVeth(), Mac: key.MAC("host").String(), Mtu: 1500},
		{Name: "eth0", Mac: key.AddressMAC(address.Addr()).String(), Mtu: 1500, Sandbox: l.Pod.Path},
	}
	want[0].Mac = a.result.Interfaces[0].Mac
	if diff := cmp.Diff(want, a.result.Interfaces); diff != "" {
		t.Error(diff)
	}
	if len(a.result.IPs) != 2 || a.result.IPs[0].Gateway.String() != "10.60.0.1" || a.result.IPs[1].Gateway.String() != "fd00:60::1" ||
		len(a.result.Routes) != 2 {
		t.Errorf("got %s", a.prev)
	}
	l.OK(a.check())
	l.OK(a.check("prevResult", withoutInterfaceIndex(a)))
}

// withoutInterfaceIndex returns the ADD result without interface indexes, as in CNI version 0.2.0.
func withoutInterfaceIndex(a attached) types100.Result {
	prev := a.result
	prev.IPs = nil
	for _, ip := range a.result.IPs {
		prev.IPs = append(prev.IPs, &types100.IPConfig{Address: ip.Address, Gateway: ip.Gateway})
	}
	return prev
}

// TestAddLive: everything in the result already works when ADD returns.
func TestAddLive(t *testing.T) {
	l := newLab(t)
	l.add("a")
	err := l.inPod("eth0", func(link netlink.Link) error {
		addrs, err := netlink.AddrList(link, netlink.FAMILY_ALL)
		for _, a := range addrs {
			if a.Flags&0x40 != 0 && !a.IP.IsLinkLocalUnicast() { // IFA_F_TENTATIVE
				t.Errorf("%s is tentative", a.IP)
			}
		}
		if link.Attrs().Flags&net.FlagUp == 0 || len(addrs) < 3 {
			t.Errorf("flags %s, addresses %v", link.Attrs().Flags, addrs)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, setting := range []string{"accept_ra 0", "accept_dad 0", "keep_addr_on_down 1", "disable_ipv6 0"} {
		name, want, _ := strings.Cut(setting, " ")
		if err := l.Pod.Do(func() error {
			got, err := os.ReadFile("/proc/sys/net/ipv6/conf/eth0/" + name)
			if strings.TrimSpace(string(got)) != want {
				t.Errorf("%s is %s, want %s", name, got, want)
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
}

// TestHostSideHasNoIPv6: IPv6 is off on host-side veths, whose routes would make each link change on the node slower.
func TestHostSideHasNoIPv6(t *testing.T) {
	l := newLab(t)
	a := l.add("a")
	link, err := netlink.LinkByName(a.hostVeth())
	if err != nil {
		t.Fatal(err)
	}
	addrs, err := netlink.AddrList(link, netlink.FAMILY_V6)
	if err != nil || len(addrs) > 0 {
		t.Errorf("addresses %v, %v", addrs, err)
	}
	routes, err := netlink.RouteListFiltered(netlink.FAMILY_V6, &netlink.Route{LinkIndex: link.Attrs().Index}, netlink.RT_FILTER_OIF)
	if err != nil || len(routes) > 0 || link.Attrs().Flags&net.FlagUp == 0 {
		t.Errorf("flags %s, routes %v, %v", link.Attrs().Flags, routes, err)
	}
}

// TestIPv4PodHasNoIPv6: IPv6 is off on an interface without IPv6 addresses, unless the pod gets an IPv6 route. It always ignores its
// neighbours' router advertisements, even if the pod enables IPv6 later.
func TestIPv4PodHasNoIPv6(t *testing.T) {
	v4 := object{"type": "host-local", "ranges": [][]object{{{"subnet": "10.60.4.0/24"}}}}
	route4 := v4.With("routes", []any{object{"dst": "0.0.0.0/0"}})
	route := v4.With("routes", []any{object{"dst": "0.0.0.0/0"}, object{"dst": "::/0"}})
	for what, c := range map[string]struct {
		keys []any
		off  string
	}{"v4": {[]any{"ipam", v4}, "1"}, "both": {nil, "0"}, "route": {[]any{"ipam", route}, "0"},
		"route4": {[]any{"ipam", route4}, "1"}, "none": {[]any{"ipam", nil, "isGateway", false, "ipMasq", false}, "1"}} {
		t.Run(what, func(t *testing.T) {
			bridge := "btno6" + what
			t.Cleanup(func() { _ = onHost(bridge, netlink.LinkDel) })
			l := bareLab(t, append(c.keys, "name", "no6"+what, "bridge", bridge)...)
			l.OK(l.add("a").check())
			if err := l.Pod.Do(func() error {
				for name, want := range map[string]string{"eth0/disable_ipv6": c.off, "lo/disable_ipv6": "0", "eth0/accept_ra": "0",
					"eth0/accept_redirects": "0", "eth0/accept_dad": "0"} {
					got, err := os.ReadFile("/proc/sys/net/ipv6/conf/" + name)
					if strings.TrimSpace(string(got)) != want || err != nil {
						t.Errorf("%s is %s, want %s, %v", name, got, want, err)
					}
				}
				return nil
			}); err != nil {
				t.Fatal(err)
			}
		})
	}
}

// TestAddressReused: a new pod with a deleted pod's address is reachable at once, although the node and another pod still know the old MAC.
func TestAddressReused(t *testing.T) {
	l := newLab(t)
	other := l.other()
	other.add("stays") // keeps the bridge's carrier: without a carrier the bridge forgets its neighbours
	addresses := []string{"10.60.0.77", "fd00:60::77"}
	ips := []any{"capabilities", object{"ips": true}, "runtimeConfig", object{"ips": []string{"10.60.0.77/24", "fd00:60::77/64"}}}
	l.OK(l.Call("ADD", "old", ips...))
	for _, addr := range addresses {
		l.mustAnswer(nil, addr)
		l.mustAnswer(other.Pod, addr)
	}
	// a neighbour entry with a MAC that Podlace did not compute, as of pods that the reference plugin attached
	bridge, err := netlink.LinkByName("bt0")
	if err != nil {
		t.Fatal(err)
	}
	l.OK(l.Call("DEL", "old"))
	for _, addr := range addresses {
		entry := &netlink.Neigh{LinkIndex: bridge.Attrs().Index, IP: net.ParseIP(addr), State: netlink.NUD_REACHABLE,
			HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 9}}
		if err := netlink.NeighSet(entry); err != nil {
			t.Fatal(err)
		}
	}
	next := l.other()
	next.OK(next.Call("ADD", "next", ips...))
	t.Cleanup(func() { next.OK(next.Call("DEL", "next")) })
	for _, addr := range addresses {
		l.mustAnswer(nil, addr)
		l.mustAnswer(other.Pod, addr)
	}
}

// TestReachedAtOnce: frames pass as soon as ADD returns, although the kernel may take a second to activate a new link, which drops them.
func TestReachedAtOnce(t *testing.T) {
	kerneltest.Slow(t)
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		t.Fatal(err)
	}
	var major, minor int
	if _, err := fmt.Sscanf(unix.ByteSliceToString(name.Release[:]), "%d.%d", &major, &minor); err != nil || major < 6 ||
		major == 6 && minor < 7 {
		t.Skipf("SKIPPED: kernel %d.%d may take longer than ADD waits: %v", major, minor, err)
	}
	l := newLab(t)
	l.other().add("stays")
	bridge, err := netlink.LinkByName("bt0") // before the loop, because a read makes the kernel activate the link at once
	if err != nil {
		t.Fatal(err)
	}
	for i := range 60 {
		l := l.other()
		o := l.OK(l.Call("ADD", fmt.Sprint("p", i)))
		var result types100.Result
		if err := json.Unmarshal(o.Stdout, &result); err != nil {
			t.Fatal(err)
		}
		if !answersFirst(t, bridge.Attrs().Index, result) {
			t.Errorf("pod %d: the first datagram after ADD was lost", i)
		}
		l.OK(l.Call("DEL", fmt.Sprint("p", i)))
	}
}

// answersFirst reports whether the pod answers the node's first datagram, which is sent at once and only once, because the MAC is known.
func answersFirst(t *testing.T, bridge int, result types100.Result) bool {
	t.Helper()
	mac, err := net.ParseMAC(result.Interfaces[*result.IPs[0].Interface].Mac)
	if err != nil {
		t.Fatal(err)
	}
	entry := &netlink.Neigh{LinkIndex: bridge, IP: result.IPs[0].Address.IP, State: netlink.NUD_PERMANENT, HardwareAddr: mac}
	if err := netlink.NeighSet(entry); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = netlink.NeighDel(entry) }()
	conn, err := net.Dial("udp", net.JoinHostPort(entry.IP.String(), "9"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := conn.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	_ = conn.SetReadDeadline(time.Now().Add(5 * time.Second))
	_, err = conn.Read(make([]byte, 1))
	return errors.Is(err, unix.ECONNREFUSED) // no server listens
}

// mustAnswer expects the pod to refuse a connection within five seconds, before the kernel would look for its MAC again. nil as from is the
// node.
func (l lab) mustAnswer(from *sandbox.Pod, addr string) {
	l.Helper()
	ask := func() error {
		_, err := net.DialTimeout("tcp", net.JoinHostPort(addr, "9"), 5*time.Second)
		if !errors.Is(err, unix.ECONNREFUSED) {
			return fmt.Errorf("%s: %w", addr, err)
		}
		return nil
	}
	do := ask
	if from != nil {
		do = func() error { return from.Do(ask) }
	}
	if err := do(); err != nil {
		l.Error(err)
	}
}

// TestAddTwice: a second ADD for the same key fails and leaves the first attachment alone.
func TestAddTwice(t *testing.T) {
	l := newLab(t)
	a := l.add("a")
	for _, id := range []string{"a", "b"} {
		l.Fails(l.Call("ADD", id), plugin.CodeAddressTaken, "interface eth0 already exists in the pod")
	}
	l.OK(l.Call("DEL", "b"))
	l.OK(a.check())
}

// TestAttachedElsewhere: ADD does not touch a container's attachment in another namespace, with or without a record.
func TestAttachedElsewhere(t *testing.T) {
	l := newLab(t)
	other := l
	other.Pod = kerneltest.NewPod(t)
	a := other.add("a")
	l.Fails(l.Call("ADD", "a"), plugin.CodeAddressTaken, "the container is attached already, by "+a.hostVeth()+", in another namespace")
	l.OK(a.check())
	a.loseRecord()
	l.Fails(l.Call("ADD", "a"), plugin.CodeAddressTaken, "the container is attached already")
}

func TestL2(t *testing.T) {
	l := newLab(t, "bridge", "bt1", "ipam", nil, "ipMasq", false, "isGateway", false, "mtu", 1400, "portIsolation", true, "hairpinMode", false)
	a := l.add("a", "disableContainerInterface", true, "runtimeConfig", object{"mac": "02:00:00:00:00:07"})
	if a.result.Interfaces[2].Mac != "02:00:00:00:00:07" || a.result.Interfaces[2].Mtu != 1400 || len(a.result.IPs) != 0 {
		t.Errorf("got %s", a.prev)
	}
	l.OK(a.check("disableContainerInterface", true))
	l.Fails(a.check(), plugin.CodeStateDiffers, "eth0 is down in the pod")
}

// TestMACOfTheBridge: ADD refuses the bridge's MAC, with which a pod would receive no frames.
func TestMACOfTheBridge(t *testing.T) {
	l := newLab(t)
	l.Fails(l.Call("ADD", "a", "capabilities", object{"mac": true}, "runtimeConfig", object{"mac": mac(t, "bt0")}), plugin.CodeConfig,
		"interface bt0 of the node has it")
}

func TestPromisc(t *testing.T) {
	l := newLab(t, "bridge", "bt2", "promiscMode", true, "hairpinMode", false)
	a := l.add("a")
	l.OK(a.check())
	if err := onHost("bt2", netlink.SetPromiscOff); err != nil {
		t.Fatal(err)
	}
	l.Fails(a.check(), plugin.CodeStateDiffers, "bt2 is not promiscuous")
	b := l
	b.Pod = kerneltest.NewPod(t)
	b.add("b") // ADD sets the MAC again
	l.OK(a.check())
}

func TestDAD(t *testing.T) {
	kerneltest.Slow(t)
	l := newLab(t, "bridge", "bt3", "enabledad", true)
	a := l.add("a")
	l.OK(a.check())
}

func TestBridgeIsNoBridge(t *testing.T) {
	l := newLab(t)
	name := "bt9"
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: "bt9p"}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = onHost(name, netlink.LinkDel) })
	l.Fails(l.Call("ADD", "a", "bridge", name), plugin.CodeDevice, `"bt9" already exists but is not a bridge, it is a veth`)
	l.Fails(l.Call("STATUS", "", "bridge", name), plugin.CodeNotAvailable, `"bt9" already exists but is not a bridge, it is a veth`)
	l.OK(l.Call("STATUS", ""))
	l.OK(l.Call("STATUS", "", "bridge", "missing0"))
}
