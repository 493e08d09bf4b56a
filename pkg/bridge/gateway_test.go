// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"fmt"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

func hostLocal(subnets ...string) object {
	var sets []any
	for _, s := range subnets {
		sets = append(sets, []any{object{"subnet": s}})
	}
	return object{"type": "host-local", "ranges": sets}
}

func (l lab) gatewayAddresses() string {
	l.Helper()
	h, err := kernel.Host()
	if err != nil {
		l.Fatal(err)
	}
	defer h.Close()
	link, _, err := h.Link(l.Conf["bridge"].(string))
	if err != nil {
		l.Fatal(err)
	}
	list, err := h.Addresses(link)
	if err != nil {
		l.Fatal(err)
	}
	var text []string
	for _, a := range list {
		text = append(text, a.String())
	}
	slices.Sort(text)
	return strings.Join(text, " ")
}

func (l lab) setGateway(change func(netlink.Link, *netlink.Addr) error, prefix string) {
	l.Helper()
	err := onHost(l.Conf["bridge"].(string), func(link netlink.Link) error {
		return change(link, &netlink.Addr{IPNet: kernel.IPNet(netip.MustParsePrefix(prefix))})
	})
	if err != nil {
		l.Fatal(err)
	}
}

// TestBridgeRenamed: after a change of the key "bridge", ADD warns with both names until the old bridge, which has a pod, is deleted.
func TestBridgeRenamed(t *testing.T) {
	l := bareLab(t, "name", "renamed", "bridge", "btf-0", "ipMasq", nil, "ipam", hostLocal("10.76.0.0/24", "fd00:76::/64"))
	for _, name := range []string{"btf-0", "btf-1", "btf-2"} {
		t.Cleanup(func() { _ = onHost(name, netlink.LinkDel) })
	}
	tells := func(id, bridge string, want ...string) {
		t.Helper()
		o := l.OK(l.other().Call("ADD", id, "bridge", bridge))
		t.Cleanup(func() { l.OK(l.Call("DEL", id)) })
		if strings.Contains(o.Log, "former=") != (len(want) > 0) {
			t.Errorf("on %s: %s", bridge, o.Log)
		}
		for _, w := range want {
			if !strings.Contains(o.Log, w) {
				t.Errorf("on %s: %s, want %s", bridge, o.Log, w)
			}
		}
	}
	tells("a", "btf-0")
	tells("b", "btf-1", "bridge=btf-1 former=btf-0", "gateway=10.76.0.1", "gateway=fd00:76::1")
	for _, gone := range []string{"btf-0", "btf-1"} {
		if err := onHost(gone, netlink.LinkDel); err != nil {
			t.Fatal(err)
		}
	}
	tells("d", "btf-2")
}

// TestForeignGateways: ADD fails if another program's address on the bridge conflicts with the gateway address, or removes it with
// forceAddress. IPv6 addresses of separate subnets do not conflict.
func TestForeignGateways(t *testing.T) {
	host := lab{kerneltest.Lab{T: t}}.host() // the node forwards as one that had a gateway before
	kerneltest.Must(t, host.Set(kernel.Sysctl{Path: "ipv4/ip_forward", Value: "1"},
		kernel.Sysctl{Path: "ipv6/conf/all/forwarding", Value: "1"}))
	l := newLab(t, "bridge", "bt4", "name", "foreigngw", "isGateway", false, "ipMasq", false)
	l.setGateway(netlink.AddrAdd, "10.62.0.1/24")
	l.setGateway(netlink.AddrAdd, "fd00:62::1/64")
	l.Conf = l.Conf.With("isGateway", true)
	for subnet, says := range map[string]string{
		"10.63.0.0/24": "bt4 already has the address 10.62.0.1/24, want 10.63.0.1/24",
		"10.62.0.0/16": "bt4 already has the address 10.62.0.1/24, want 10.62.0.1/16",
		"fd00::/16":    "bt4 already has the address fd00:62::1/64",
		"fd00:62::/48": "bt4 already has the address fd00:62::1/64, want fd00:62::1/48",
	} {
		ipam := hostLocal(subnet)
		if subnet == "10.62.0.0/16" {
			ipam["ranges"] = []any{[]any{object{"subnet": subnet, "gateway": "10.62.0.1"}}}
		}
		l.Fails(l.Call("ADD", "a", "ipam", ipam), plugin.CodeAddressTaken, says)
		l.OK(l.Call("DEL", "a"))
		if got := l.gatewayAddresses(); got != "10.62.0.1/24 fd00:62::1/64" {
			t.Fatalf("%s left %s", subnet, got)
		}
	}
	l.OK(l.Call("ADD", "a", "ipam", hostLocal("fd00:63::/64")))
	l.OK(l.Call("DEL", "a"))
	l.OK(l.Call("ADD", "a", "ipam", hostLocal("10.63.0.0/24"), "forceAddress", true))
	l.OK(l.Call("DEL", "a"))
	if got := l.gatewayAddresses(); got != "10.63.0.1/24 fd00:62::1/64 fd00:63::1/64" {
		t.Errorf("after forceAddress: %s", got)
	}
	for _, prefix := range strings.Fields(l.gatewayAddresses()) {
		l.setGateway(netlink.AddrDel, prefix)
	}
	for _, f := range []string{"10.63.0.1_24", "fd00:63::1_64"} {
		if err := os.Remove("/run/podlace/foreigngw/.gateway-bt4-" + f); err != nil {
			t.Error(err)
		}
	}
}

// TestGatewayWithoutIPv6: ADD enables IPv6 for an IPv6 gateway address on a bridge where an admin disabled it.
func TestGatewayWithoutIPv6(t *testing.T) {
	t.Cleanup(func() { _ = onHost("bt6off", netlink.LinkDel) })
	l := bareLab(t, "bridge", "bt6off", "name", "gw6off", "ipMasq", false, "ipam", hostLocal("10.75.0.0/24"))
	setting := "/proc/sys/net/ipv6/conf/bt6off/disable_ipv6"
	if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "bt6off"}}); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(setting, []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	subnets := []string{"10.75.0.0/24", "fd00:75::/64"}
	for i, want := range []string{"1\n", "0\n"} {
		l := l.other()
		l.Conf = l.Conf.With("ipam", hostLocal(subnets[:i+1]...))
		l.OK(l.add(fmt.Sprint("pod", i)).check())
		if got, err := os.ReadFile(setting); string(got) != want || err != nil {
			t.Errorf("%d families: disable_ipv6 is %q, %v", i+1, got, err)
		}
	}
	if got := l.gatewayAddresses(); got != "10.75.0.1/24 fd00:75::1/64" {
		t.Errorf("gateways %s", got)
	}
}

// TestForwardUnknown: ADD changes nothing if it cannot read the node's forwarding setting.
func TestForwardUnknown(t *testing.T) {
	host, err := kernel.Host()
	if err != nil {
		t.Fatal(err)
	}
	host.Close()
	for _, is4 := range []bool{true, false} {
		if err := enableForwarding(host, kernel.Link{Name: "none"}, is4, true); err == nil || !strings.Contains(err.Error(), "netconf show all") {
			t.Errorf("IPv4 %t: %v", is4, err)
		}
	}
}

// TestChangedSubnet: the new gateway address replaces the old one once no pod uses that.
func TestChangedSubnet(t *testing.T) {
	l := bareLab(t, "bridge", "btc0", "name", "changed", "ipam", hostLocal("10.64.0.0/24", "fd00:64::/64"))
	t.Cleanup(func() { _ = onHost("btc0", netlink.LinkDel) })
	changed := hostLocal("10.64.0.0/16", "fd00:64::/48")
	old := l.add("a", "CNI_ARGS", "IgnoreUnknown=1;K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0")
	b := l.other()
	o := b.Call("ADD", "b", "ipam", changed)
	l.Fails(o, plugin.CodeAddressTaken, "btc0 already has the address 10.64.0.1/24, want 10.64.0.1/16")
	if want := "the subnet was changed from 10.64.0.0/24 to 10.64.0.0/16 while pod shop/web-0 (container a) with 10.64.0.2/24 uses the old one: delete the pods"; !strings.Contains(o.Failure.Details, want) {
		t.Errorf("%s, want %s", o.Failure.Details, want)
	}
	renamed := b.Call("ADD", "b", "ipam", changed, "name", "renamed")
	l.Fails(renamed, plugin.CodeAddressTaken, "bt")
	if want := "it is of network changed, and pod shop/web-0 (container a) with 10.64.0.2/24 uses it"; !strings.Contains(renamed.Failure.Details, want) {
		t.Errorf("%s, want %s", renamed.Failure.Details, want)
	}
	l.OK(old.Call("CHECK", "a", "prevResult", old.prev))
	l.OK(old.Call("DEL", "a"))
	new := b.add("b", "ipam", changed)
	l.OK(new.check("ipam", changed))
	if got := l.gatewayAddresses(); got != "10.64.0.1/16 fd00:64::1/48" {
		t.Errorf("gateways %s", got)
	}
	if err := l.masquerades("10.64.0.0/16 fd00:64::/48", "10.64.0.0/16"); err != nil {
		t.Error(err)
	}
	// A port without an attachment may also use the old gateway address.
	l.OK(new.Call("DEL", "b"))
	if err := netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "foreign0", MTU: 1500, TxQLen: -1,
		MasterIndex: l.bridgeIndex()}, PeerName: "foreign1"}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = onHost("foreign0", netlink.LinkDel) })
	o = b.Call("ADD", "c")
	l.Fails(o, plugin.CodeAddressTaken, "want 10.64.0.1/24")
	if !strings.Contains(o.Failure.Details, "port foreign0, which has no record of Podlace") {
		t.Error(o.Failure.Details)
	}
	l.OK(b.Call("ADD", "c", "forceAddress", true))
	if got := l.gatewayAddresses(); got != "10.64.0.1/24 fd00:64::1/64" {
		t.Errorf("gateways %s", got)
	}
	l.OK(b.Call("DEL", "c"))
}

func (l lab) bridgeIndex() (index int) {
	l.Helper()
	if err := onHost(l.Conf["bridge"].(string), func(link netlink.Link) error { index = link.Attrs().Index; return nil }); err != nil {
		l.Fatal(err)
	}
	return index
}

// TestOldIPv6Subnet: an old IPv6 gateway address that does not conflict with the new one stays while a pod uses it. The next change of the
// subnet then removes it.
func TestOldIPv6Subnet(t *testing.T) {
	l := bareLab(t, "bridge", "btc2", "name", "old6", "ipMasq", false, "ipam", hostLocal("fd00:64::/64"))
	t.Cleanup(func() { _ = onHost("btc2", netlink.LinkDel) })
	l.OK(l.Call("ADD", "a"))
	b := l.other()
	b.OK(b.Call("ADD", "b", "ipam", hostLocal("fd00:65::/64")))
	if got := l.gatewayAddresses(); got != "fd00:64::1/64 fd00:65::1/64" {
		t.Errorf("beside a pod of the old subnet: %s", got)
	}
	l.OK(l.Call("DEL", "a"))
	b.OK(b.Call("DEL", "b"))
	l.add("c", "ipam", hostLocal("fd00:66::/64"))
	if got := l.gatewayAddresses(); got != "fd00:66::1/64" {
		t.Errorf("after the last pod of old subnets: %s", got)
	}
}

// TestMasqueradeOfOldSubnet: the masquerade of an old subnet goes with its gateway address.
func TestMasqueradeOfOldSubnet(t *testing.T) {
	l := bareLab(t, "bridge", "btc1", "name", "oldmasq", "ipam", hostLocal("10.65.0.0/24"))
	t.Cleanup(func() { _ = onHost("btc1", netlink.LinkDel) })
	l.OK(l.Call("ADD", "a"))
	l.OK(l.Call("DEL", "a"))
	l.add("b", "ipam", hostLocal("10.66.0.0/24"))
	if err := l.masquerades("10.66.0.0/24", "10.66.0.0/24"); err != nil {
		t.Error(err)
	}
	if l.masquerades("10.65.0.0/24", "") == nil {
		t.Error("the old subnet is masqueraded still")
	}
}

// TestKata: CHECK and DEL accept that a runtime adds a tap device and redirects traffic between eth0 and the virtual machine.
func TestKata(t *testing.T) {
	l := newLab(t, "bridge", "bt7", "name", "kata")
	a := l.add("a")
	tap := netlink.LinkAttrs{Name: "tap0_kata"}
	err := l.Pod.Do(func() error {
		return netlink.LinkAdd(&netlink.Tuntap{LinkAttrs: tap, Mode: netlink.TUNTAP_MODE_TAP, Flags: netlink.TUNTAP_DEFAULTS})
	})
	if err != nil {
		t.Skipf("SKIPPED: no tap device here: %v", err)
	}
	if err := l.Pod.Do(func() error { return redirectBoth("eth0", tap.Name) }); err != nil {
		t.Fatal(err)
	}
	l.OK(a.check())
	l.Fails(l.Call("ADD", "a"), plugin.CodeAddressTaken, "interface eth0 already exists")
	l.OK(a.check())
	l.OK(l.Call("DEL", "a", "prevResult", a.prev))
	if err := l.inPod("eth0", func(netlink.Link) error { return nil }); err == nil {
		t.Error("eth0 is left")
	}
	if err := l.inPod(tap.Name, netlink.LinkDel); err != nil {
		t.Errorf("the tap: %v", err)
	}
}

func redirectBoth(names ...string) error {
	links := map[string]netlink.Link{}
	for _, name := range names {
		link, err := netlink.LinkByName(name)
		if err == nil {
			err = netlink.LinkSetUp(link)
		}
		if err != nil {
			return err
		}
		links[name] = link
	}
	for i, name := range names {
		from, to := links[name], links[names[1-i]]
		ingress := &netlink.Ingress{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: from.Attrs().Index, Handle: netlink.MakeHandle(0xffff, 0),
			Parent: netlink.HANDLE_INGRESS}}
		if err := netlink.QdiscAdd(ingress); err != nil {
			return err
		}
		if err := netlink.FilterAdd(&netlink.U32{
			FilterAttrs: netlink.FilterAttrs{LinkIndex: from.Attrs().Index, Parent: ingress.Handle, Protocol: unix.ETH_P_ALL},
			RedirIndex:  to.Attrs().Index,
			ClassId:     netlink.MakeHandle(1, 1),
		}); err != nil {
			return err
		}
	}
	return nil
}
