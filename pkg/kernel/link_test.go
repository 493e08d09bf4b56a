// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/plugins/pkg/ns"
	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
)

func mac(s string) net.HardwareAddr {
	m, err := net.ParseMAC(s)
	if err != nil {
		panic(err)
	}
	return m
}

// TestAddVeth: AddVeth sets all requested properties of a pair and leaves both ends down.
func TestAddVeth(t *testing.T) {
	kerneltest.Clean(t)
	h := host(t)
	pod, netns := podNS(t)
	bridge := addBridge(t, h, "kt0")
	v := Veth{Host: "kth0", Pod: "eth0", HostMAC: mac("02:00:00:00:00:01"), PodMAC: mac("02:00:00:00:00:02"), MTU: 1400, Netns: netns,
		Master: bridge.Index}
	t.Cleanup(func() { kerneltest.Must(t, h.DelLink("kth0")) })
	index, err := h.AddVeth(v)
	if err != nil {
		t.Fatal(err)
	}
	hostSide, podSide := mustLink(t, h, "kth0"), mustLink(t, pod, "eth0")
	want := []Link{
		{Index: index, Name: "kth0", Kind: "veth", MAC: v.HostMAC, MTU: 1400, Promis: true, Master: bridge.Index, Peer: podSide.Index,
			TxQueue: 1000, Traits: hostSide.Traits},
		{Index: podSide.Index, Name: "eth0", Kind: "veth", MAC: v.PodMAC, MTU: 1400, Peer: index, TxQueue: 1000, Traits: podSide.Traits},
	}
	if diff := cmp.Diff(want, []Link{hostSide, podSide}, cmpopts.IgnoreUnexported(Link{}),
		cmpopts.IgnoreFields(Link{}, "PeerNetns")); diff != "" {
		t.Error(diff)
	}
	if _, ok, err := h.Link("eth0"); ok || err != nil {
		t.Errorf("the pod side is on the host: %v", err)
	}
	for name, path := range map[string]string{"kth0": "/proc/self/ns/net", "eth0": fmt.Sprint("/proc/self/fd/", netns.Fd())} {
		var link netlink.Link
		kerneltest.Must(t, ns.WithNetNSPath(path, func(ns.NetNS) (err error) {
			link, err = netlink.LinkByName(name)
			return err
		}))
		if a := link.Attrs(); a.NumTxQueues != 1 || a.NumRxQueues != 1 {
			t.Errorf("%s: %d and %d queues, want one of each", name, a.NumTxQueues, a.NumRxQueues)
		}
	}
}

func TestAddVethDefaults(t *testing.T) {
	kerneltest.Clean(t)
	h := host(t)
	pod, netns := podNS(t)
	t.Cleanup(func() { kerneltest.Must(t, h.DelLink("kth0")) })
	if _, err := h.AddVeth(Veth{Host: "kth0", Pod: "eth0", Netns: netns}); err != nil {
		t.Fatal(err)
	}
	if link := mustLink(t, pod, "eth0"); link.MTU != 1500 || len(link.MAC) != 6 || link.Up {
		t.Errorf("got %+v", link)
	}
}

// TestAddVethExists: AddVeth returns EEXIST and changes nothing if one of the names is taken.
func TestAddVethExists(t *testing.T) {
	h := host(t)
	pod, netns := podNS(t)
	t.Cleanup(func() { kerneltest.Must(t, h.DelLink("kth0")) })
	index, err := h.AddVeth(Veth{Host: "kth0", Pod: "eth0", Netns: netns, PodMAC: mac("02:00:00:00:00:02")})
	if err != nil {
		t.Fatal(err)
	}
	kerneltest.Clean(t)
	for what, v := range map[string]Veth{
		"host side": {Host: "kth0", Pod: "eth1", Netns: netns},
		"pod side":  {Host: "kth1", Pod: "eth0", Netns: netns},
		"both":      {Host: "kth0", Pod: "eth0", Netns: netns},
	} {
		if _, err := h.AddVeth(v); !errors.Is(err, unix.EEXIST) {
			t.Errorf("%s: %v", what, err)
		}
	}
	for _, n := range []namespace{h, pod} {
		for _, name := range []string{"kth1", "eth1"} {
			if _, ok, err := n.Link(name); ok || err != nil {
				t.Errorf("%s appeared: %v", name, err)
			}
		}
	}
	if link := mustLink(t, pod, "eth0"); link.Peer != index {
		t.Errorf("the first was replaced: %+v", link)
	}
}

func TestBridge(t *testing.T) {
	kerneltest.Clean(t)
	h := host(t)
	_, netns := podNS(t)
	address := mac("06:00:00:00:00:09")
	kerneltest.Must(t, h.AddBridge("kt0", address, 1400, false, false))
	t.Cleanup(func() { kerneltest.Must(t, h.DelLink("kt0")) })
	if err := h.AddBridge("kt0", address, 0, false, false); !errors.Is(err, unix.EEXIST) {
		t.Errorf("again: %v", err)
	}
	link := mustLink(t, h, "kt0")
	if link.MTU != 1400 || link.Promis || link.Up || !link.Made() || link.MadeFiltered() {
		t.Errorf("got %+v", link)
	}
	if _, err := h.AddVeth(Veth{Host: "kth0", Pod: "eth0", HostMAC: mac("02:00:00:00:00:01"), Netns: netns, Master: link.Index}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { kerneltest.Must(t, h.DelLink("kth0")) })
	kerneltest.Must(t, h.SetUp(link), h.SetPromisc(link, true))
	// Without a fixed MAC, the bridge would have that of its port, which is lower.
	if got := mustLink(t, h, "kt0"); got.MAC.String() != address.String() || !got.Up || !got.Promis || got.Kind != "bridge" {
		t.Errorf("got %+v", got)
	}
	kerneltest.Must(t, h.SetDown(link))
	if got := mustLink(t, h, "kt0"); got.Up {
		t.Errorf("still up: %+v", got)
	}
}

// TestLacks: the IPv6 settings in Link equal the sysctl files.
func TestLacks(t *testing.T) {
	w := newWire(t)
	for name := range conf6 {
		if _, err := w.pod.Get("ipv6/conf/eth0/" + name); errors.Is(err, fs.ErrNotExist) {
			continue // the kernel has no force_forwarding before Linux 6.17
		}
		path := "ipv6/conf/eth0/" + name
		for _, value := range []string{"1", "0"} {
			kerneltest.Must(t, w.pod.Set(Sysctl{path, value}))
			link, _, err := w.pod.Link("eth0")
			other := map[string]string{"0": "1", "1": "0"}[value]
			if lacks := link.Lacks(Sysctl{path, value}, Sysctl{path, other}); err != nil || len(lacks) != 1 || lacks[0].Value != other {
				t.Errorf("%s is %s: lacks %v, %v", name, value, lacks, err)
			}
		}
	}
	unknown := []Sysctl{{"ipv6/conf/eth0/mtu", "1500"}, {"ipv4/conf/eth0/accept_ra", "0"}}
	link, _, _ := w.pod.Link("eth0")
	if lacks := link.Lacks(unknown...); len(lacks) != 2 {
		t.Errorf("got %v", lacks)
	}
}

func TestSetMACAndARPNotify(t *testing.T) {
	w := newWire(t)
	want := mac("02:00:00:00:00:77")
	kerneltest.Must(t, w.pod.SetMAC(w.podSide, want), w.pod.SetARPNotify(w.podSide))
	link, _, err := w.pod.Link("eth0")
	if err != nil || link.MAC.String() != want.String() {
		t.Errorf("got %+v, %v", link, err)
	}
	if on, err := w.pod.Get("ipv4/conf/eth0/arp_notify"); err != nil || on != "1" {
		t.Errorf("arp_notify %s, %v", on, err)
	}
}

func TestMissingLinks(t *testing.T) {
	h := host(t)
	for what, f := range map[string]func() (Link, bool, error){
		"name":  func() (Link, bool, error) { return h.Link("none") },
		"index": func() (Link, bool, error) { return h.LinkByIndex(1 << 20) },
		"zero":  func() (Link, bool, error) { return h.LinkByIndex(0) },
	} {
		if link, ok, err := f(); ok || err != nil && what != "zero" {
			t.Errorf("%s: %+v, %t, %v", what, link, ok, err)
		}
	}
	kerneltest.Must(t, h.DelLink("none"), h.DelGroup(Link{Name: "none"}), h.DelGroup(Link{Name: "none", Index: 1 << 20}))
	gone := Link{Index: 1 << 20, Name: "gone"}
	for _, err := range []error{h.SetUp(gone), h.SetPort(gone, BridgePort{Hairpin: true}), h.SetPromisc(gone, true)} {
		if !errors.Is(err, unix.ENODEV) {
			t.Errorf("of a link that is gone: %v", err)
		}
	}
}

// TestDelGroup: DelGroup deletes a link and the devices of its group, but no other link.
func TestDelGroup(t *testing.T) {
	w := newWire(t)
	kerneltest.Must(t, w.host.SetUpLeader(w.hostSide, "shop/web-0"))
	leader := mustLink(t, w.host, "kth0")
	if !leader.LeadsGroup() || w.hostSide.LeadsGroup() || w.bridge.LeadsGroup() {
		t.Errorf("leads: %+v", leader)
	}
	for name, of := range map[string]Link{"ktifb0": leader, "ktifb1": w.bridge} {
		t.Cleanup(func() { kerneltest.Must(t, w.host.DelLink(name)) })
		if _, err := w.host.EnsureIFB(name, of); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		kerneltest.Must(t, w.host.DelGroup(leader))
	}
	for name, want := range map[string]bool{"kth0": false, "ktifb0": false, "ktifb1": true, "kt0": true} {
		if _, ok, err := w.host.Link(name); ok != want || err != nil {
			t.Errorf("%s is there: %t, %v", name, ok, err)
		}
	}
}

// TestDelGroupAlone: DelGroup deletes a link without a group, and the rest of a group whose leader another program deleted.
func TestDelGroupAlone(t *testing.T) {
	w := newWire(t)
	kerneltest.Must(t, w.host.DelGroup(mustLink(t, w.host, "kth0")))
	if _, ok, _ := w.host.Link("kth0"); ok {
		t.Error("a link that leads no group is left")
	}
	leader := addBridge(t, w.host, "kt1")
	kerneltest.Must(t, w.host.SetUpLeader(leader, "x"))
	leader = mustLink(t, w.host, "kt1")
	t.Cleanup(func() { kerneltest.Must(t, w.host.DelLink("ktifb0")) })
	if _, err := w.host.EnsureIFB("ktifb0", leader); err != nil {
		t.Fatal(err)
	}
	kerneltest.Must(t, w.host.DelLink("kt1"), w.host.DelGroup(Link{Name: "kt1", Index: leader.Index}))
	if _, ok, _ := w.host.Link("ktifb0"); ok {
		t.Error("the device of a link that is gone is left")
	}
}

func TestOpenRefused(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "file"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if _, err := Open(f); !errors.Is(err, unix.EINVAL) {
		t.Errorf("got %v", err)
	}
}

// TestNamespacesApart: changes in a pod's namespace do not affect the host's links and sysctls.
func TestNamespacesApart(t *testing.T) {
	kerneltest.Clean(t)
	pod, _ := podNS(t)
	kerneltest.Must(t, pod.AddBridge("kt0", nil, 0, false, false),
		pod.Set(Sysctl{"ipv4/ip_forward", "1"}, Sysctl{"ipv6/conf/all/forwarding", "1"}))
	kerneltest.Must(t, pod.SetUp(mustLink(t, pod, "kt0")))
	if value, err := pod.Get("ipv4/ip_forward"); value != "1" || err != nil {
		t.Errorf("in the pod: %q, %v", value, err)
	}
}

// TestChangesOfMissingLink: the error of each change names what was tried, in the words of ip(8).
func TestChangesOfMissingLink(t *testing.T) {
	h := host(t)
	gone, other, addr := Link{Index: 99999, Name: "gone"}, Link{Index: 99998, Name: "kt0"}, netip.MustParsePrefix("192.0.2.1/24")
	for want, err := range map[string]error{
		"link set gone up":                             h.SetUp(gone),
		"link set gone down":                           h.SetDown(gone),
		"link set gone address 02:00:00:00:00:01":      h.SetMAC(gone, mac("02:00:00:00:00:01")),
		"link set gone arp_notify 1":                   h.SetARPNotify(gone),
		"link set gone mtu 1400":                       h.SetMTU(gone, 1400),
		"link set gone promisc on":                     h.SetPromisc(gone, true),
		"link set gone promisc off":                    h.SetPromisc(gone, false),
		"link set gone allmulticast on":                h.SetAllMulti(gone, true),
		"link set gone allmulticast off":               h.SetAllMulti(gone, false),
		"link set gone master kt0":                     h.SetMaster(gone, other),
		`link set gone alias "a"`:                      h.SetAlias(gone, "a"),
		"link property add dev gone altname a":         h.AddAltName(gone, "a"),
		"link set gone txqueuelen 7":                   h.SetTxQueue(gone, 7),
		"addr add 192.0.2.1/24 dev gone":               h.AddAddress(gone, addr, false),
		"addr add 192.0.2.1/32 dev gone noprefixroute": h.AddHostAddress(gone, addr.Addr()),
		"filter add dev gone ingress redirect dev kt0": h.addRedirect(gone, other),
	} {
		if err == nil || !strings.HasPrefix(err.Error(), want+": ") {
			t.Errorf("%v, want an error that begins with %q", err, want)
		}
	}
}

// TestAttributesIn: an attribute may be empty, and one that is cut off ends the list.
func TestAttributesIn(t *testing.T) {
	var got []string
	for kind, value := range attributesIn([]byte{4, 0, 1, 0, 5, 0, 2, 0, 9, 0, 0, 0, 8, 0, 3, 0, 1}) {
		got = append(got, fmt.Sprintf("%d %x", kind, value))
	}
	if diff := cmp.Diff([]string{"1 ", "2 09"}, got); diff != "" {
		t.Error(diff)
	}
}
