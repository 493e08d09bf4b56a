// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

func TestParseVLANs(t *testing.T) {
	const gateway = `"isGateway":true,"ipam":{"type":"x"},`
	for keys, want := range map[string]string{
		"": "not used", `"vlan":0,"vlanTrunk":[],"preserveDefaultVlan":true`: "not used", `"vlanTrunk":null`: "not used",
		`"vlan":100`: "100 pvid untagged", `"vlan":1`: "1 pvid untagged", `"vlan":4094`: "4094 pvid untagged",
		`"vlan":100,"preserveDefaultVlan":true`:                                 "1 untagged, 100 pvid untagged",
		`"vlan":1,"preserveDefaultVlan":true`:                                   "1 pvid untagged",
		`"vlanTrunk":[{"id":7}]`:                                                "1 pvid untagged, 7",
		`"vlanTrunk":[{"id":7}],"preserveDefaultVlan":true`:                     "1 pvid untagged, 7",
		`"vlanTrunk":[{"minID":1,"maxID":4094}]`:                                "1 pvid untagged, 2-4094",
		`"vlan":100,"vlanTrunk":[{"minID":200,"maxID":202},{"id":4094}]`:        "100 pvid untagged, 200-202, 4094",
		`"vlan":100,"vlanTrunk":[{"id":7,"minID":1,"maxID":3}]`:                 "1-3, 7, 100 pvid untagged",
		`"vlan":5,"vlanTrunk":[{"id":1}],"preserveDefaultVlan":true`:            "1, 5 pvid untagged",
		gateway + `"bridge":"twelve-bytes","vlan":10`:                           "10 pvid untagged",
		`"bridge":"fifteen-bytes-x","vlan":10`:                                  "10 pvid untagged",
		`"bridge":"fifteen-bytes-x","ipam":{"type":"x"},"vlan":10`:              "10 pvid untagged",
		`"bridge":"fifteen-bytes-x","isGateway":true,"vlanTrunk":[{"id":4000}]`: "1 pvid untagged, 4000",
	} {
		c, err := parsed(keys, "1.1.0", nil)
		got := "not used"
		if c.VLANs.used() {
			got = c.VLANs.onPort(1).String()
		}
		if err != nil || got != want {
			t.Errorf("%s: %s, %v, want %s", keys, got, err, want)
		}
	}
	for keys, says := range map[string]string{
		`"vlan":-100`: "vlan -100: want 0-4094", `"vlan":5000`: "vlan 5000", `"vlan":4095`: "vlan 4095",
		`"vlanTrunk":[{}]`:                                                           "want id, or minID and maxID",
		`"vlanTrunk":[{"minID":5}]`:                                                  "want id, or minID and maxID",
		`"vlanTrunk":[{"maxID":5}]`:                                                  "want id, or minID and maxID",
		`"vlanTrunk":[{"minID":6,"maxID":5}]`:                                        "want id, or minID and maxID",
		`"vlanTrunk":[{"id":1},{"id":0}]`:                                            "vlanTrunk[1] 0: want 1-4094",
		`"vlanTrunk":[{"id":4095}]`:                                                  "vlanTrunk[0] 4095",
		`"vlanTrunk":[{"minID":-1,"maxID":5}]`:                                       "vlanTrunk[0] -1",
		`"vlanTrunk":[{"minID":1,"maxID":5000}]`:                                     "vlanTrunk[0] 5000",
		`"vlanTrunk":[{"id":5},{"id":5}]`:                                            "vlanTrunk[1]: VLAN 5 is in vlanTrunk[0] already",
		`"vlanTrunk":[{"minID":10,"maxID":20},{"minID":20,"maxID":30}]`:              "vlanTrunk[1]: VLAN 20 is in vlanTrunk[0] already",
		`"vlanTrunk":[{"id":12,"minID":10,"maxID":20}]`:                              "vlanTrunk[0]: VLAN 12 is in vlanTrunk[0] already",
		`"vlan":100,"vlanTrunk":[{"id":7},{"minID":1,"maxID":4094}]`:                 "VLAN 7 is in vlanTrunk[0] already",
		`"vlan":100,"vlanTrunk":[{"minID":1,"maxID":4094}]`:                          "vlan 100 is in vlanTrunk[0] as well",
		`"ipam":{"type":"x"},"antiSpoof":true,"vlanTrunk":[{"id":5}]`:                "antiSpoof and vlanTrunk exclude each other",
		gateway + `"bridge":"twelve-bytes","vlan":100`:                               "the gateway would be the interface twelve-bytes.100, want at most 15",
		`"isDefaultGateway":true,` + gateway + `"bridge":"fifteen-bytes-x","vlan":1`: "fifteen-bytes-x.1",
	} {
		if _, err := parsed(keys, "1.1.0", nil); plugin.Code(err) != plugin.CodeConfig || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %q", keys, err, says)
		}
	}
}

// vlanLab returns a node with a bridge of its own. Without VLAN filtering, it expects ADD to return an error and change nothing.
func vlanLab(t *testing.T, keys ...any) (l lab, has bool) {
	t.Helper()
	l = bareLab(t, append([]any{"bridge", "btv", "name", "vlans", "ipMasq", false, "isGateway", false, "vlan", 100, "ipam",
		hostLocal("10.78.0.0/24")}, keys...)...)
	h := l.host()
	has, err := h.HasVLANFiltering()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, name := range []string{"btv.100", "btv.200", "btv"} {
			if err := h.DelLink(name); err != nil {
				t.Error(err)
			}
		}
	})
	if kerneltest.Feature(t, has, "bridge VLAN filtering") {
		return l, true
	}
	const says = "this kernel has no bridge VLAN filtering (CONFIG_BRIDGE_VLAN_FILTERING)"
	kerneltest.Clean(t, l.Pod)
	l.Fails(l.Call("ADD", "a"), plugin.CodeKernelFeature, says)
	l.Fails(l.Call("ADD", "a", "vlan", nil, "vlanTrunk", []any{object{"id": 5}}), plugin.CodeKernelFeature, says)
	l.Fails(l.Call("STATUS", ""), plugin.CodeNotAvailable, says)
	l.OK(l.Call("STATUS", "", "vlan", 0, "preserveDefaultVlan", true))
	l.OK(l.Call("DEL", "a"))
	return l, false
}

func (l lab) host() *kernel.Node {
	l.Helper()
	h, err := kernel.Host()
	if err != nil {
		l.Fatal(err)
	}
	l.Cleanup(h.Close)
	return h
}

func (l lab) portVLANs(name string) string {
	l.Helper()
	h := l.host()
	link, ok, err := h.Link(name)
	if err != nil || !ok {
		l.Fatalf("%s: %t, %v", name, ok, err)
	}
	v, err := h.PortVLANs(link)
	if err != nil {
		l.Fatal(err)
	}
	return v.String()
}

// gatewayPort returns the name of the bridge port that belongs to a VLAN's gateway.
func (l lab) gatewayPort(name string) (port string) {
	l.Helper()
	h := l.host()
	link, ok, err := h.Link(name)
	if err != nil || !ok {
		l.Fatalf("%s: %t, %v", name, ok, err)
	}
	peer, ok, err := h.LinkByIndex(link.Peer)
	if err != nil || !ok {
		l.Fatalf("%s: %t, %v", name, ok, err)
	}
	return peer.Name
}

func (a attached) ip() string { return a.result.IPs[0].Address.IP.String() }

func (a attached) mustReach(address, want string) {
	a.Helper()
	limit := harness.TrafficLimit
	if want == "" {
		limit = 3 * time.Second
	}
	if got, _ := a.fetchAnswer(address, limit); got != want {
		a.Errorf("%s asks %s: %q, want %q", a.id, address, got, want)
	}
}

// TestVLANs: the pods of a VLAN reach each other and no pod of another one. A pod with a trunk receives frames with VLAN tags.
func TestVLANs(t *testing.T) {
	l, has := vlanLab(t)
	if !has {
		return
	}
	a := l.add("a")
	kerneltest.Clean(t)
	for want, keys := range map[string][]any{
		"100 pvid untagged":             nil,
		"1 untagged, 100 pvid untagged": {"preserveDefaultVlan", true},
		"1 pvid untagged, 100, 200-299": {"vlan", 0, "vlanTrunk", []any{object{"minID": 200, "maxID": 299}, object{"id": 100}}},
		"1 pvid untagged":               {"vlan", 0},
	} {
		x := l.other().add("x", keys...)
		if got := l.portVLANs(x.hostVeth()); got != want {
			t.Errorf("%v: %s, want %s", keys, got, want)
		}
		l.OK(x.check(keys...))
		l.OK(x.Call("DEL", "x"))
	}
	b, c := l.other().add("b"), l.other().add("c", "vlan", 200)
	trunk := l.other().add("trunk", "vlan", 0, "vlanTrunk", []any{object{"id": 100}, object{"id": 200}})
	plain := l.other().add("plain", "vlan", 0)
	for _, pod := range []attached{a, b, c, trunk, plain} {
		pod.serve("tcp4", ":80")
	}
	if err := trunk.setTaggedVLANs(map[int]string{100: "10.81.0.200/24", 200: "10.79.0.200/24"}); err != nil {
		t.Fatal(err)
	}
	for pod, address := range map[*attached]string{&a: "10.81.0.3/24", &c: "10.79.0.3/24"} {
		if err := pod.inPod("eth0", func(link netlink.Link) error { return addAddress(link, address) }); err != nil {
			t.Fatal(err)
		}
	}
	a.mustReach(b.ip()+":80", "b")
	b.mustReach(a.ip()+":80", "a")
	a.mustReach(c.ip()+":80", "")
	a.mustReach(plain.ip()+":80", "")
	a.mustReach("10.81.0.200:80", "trunk") // tagged
	c.mustReach("10.79.0.200:80", "trunk")
	plain.mustReach(trunk.ip()+":80", "trunk") // untagged
	a.mustReach(trunk.ip()+":80", "")
	for _, pod := range []attached{a, b} {
		l.OK(pod.check())
	}
	l.OK(c.check("vlan", 200))
}

// setTaggedVLANs gives a pod addresses on VLAN interfaces, which send tagged frames.
func (a attached) setTaggedVLANs(addresses map[int]string) error {
	return a.Pod.Do(func() error {
		eth0, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		for id, address := range addresses {
			attrs := netlink.NewLinkAttrs()
			attrs.Name, attrs.ParentIndex = fmt.Sprintf("tag%d", id), eth0.Attrs().Index
			link := &netlink.Vlan{LinkAttrs: attrs, VlanId: id}
			if err := netlink.LinkAdd(link); err != nil {
				return fmt.Errorf("%s: %w", attrs.Name, err)
			}
			if err := addAddress(link, address); err != nil {
				return err
			}
			if err := netlink.LinkSetUp(link); err != nil {
				return err
			}
		}
		return nil
	})
}

func addAddress(link netlink.Link, prefix string) error {
	return netlink.AddrAdd(link, &netlink.Addr{IPNet: kernel.IPNet(netip.MustParsePrefix(prefix))})
}

// TestFilteringOfExistingBridge: ADD enables VLAN filtering on a bridge only if it has no ports.
func TestFilteringOfExistingBridge(t *testing.T) {
	l, has := vlanLab(t)
	if !has {
		return
	}
	plain := l.other().add("plain", "vlan", 0)
	before := l.Call("ADD", "a")
	l.Fails(before, plugin.CodeDevice, "bridge btv has ports and does not keep VLANs apart")
	if !strings.Contains(before.Failure.Details, "ip link set btv type bridge vlan_filtering 1") ||
		!strings.Contains(before.Failure.Details, plain.hostVeth()) {
		t.Error(before.Failure.Details)
	}
	if link, _, _ := l.host().Link("btv"); link.FiltersVLANs {
		t.Error("it filters")
	}
	l.OK(l.Call("STATUS", ""))
	l.OK(plain.Call("DEL", "plain"))
	a := l.add("a")
	if got := l.portVLANs(a.hostVeth()); got != "100 pvid untagged" {
		t.Error(got)
	}
	l.OK(a.check())
}

// setBridge changes attributes of a bridge in a request without others, some of which the kernel would reject as the library has read them.
func setBridge(set func(*netlink.Bridge)) func(netlink.Link) error {
	return func(link netlink.Link) error {
		b := &netlink.Bridge{LinkAttrs: netlink.NewLinkAttrs()}
		b.Name, b.Index = link.Attrs().Name, link.Attrs().Index
		set(b)
		return netlink.LinkModify(b)
	}
}

func filterVLANs(on bool) func(netlink.Link) error {
	return setBridge(func(b *netlink.Bridge) { b.VlanFiltering = &on })
}

// TestOtherDefaultVLAN uses bridges with another default VLAN than 1, and without one.
func TestOtherDefaultVLAN(t *testing.T) {
	l, has := vlanLab(t, "preserveDefaultVlan", true)
	if !has {
		return
	}
	for id, want := range map[uint16]string{7: "7 untagged, 100 pvid untagged", 0: "100 pvid untagged", 100: "100 pvid untagged"} {
		l.OK(l.Call("ADD", "first"))
		l.OK(l.Call("DEL", "first"))
		if err := onHost("btv", setBridge(func(b *netlink.Bridge) { b.VlanDefaultPVID = &id })); err != nil {
			t.Fatal(err)
		}
		for _, keep := range []bool{true, false} {
			a := l.add("a", "preserveDefaultVlan", keep)
			if got := l.portVLANs(a.hostVeth()); keep && got != want || !keep && got != "100 pvid untagged" {
				t.Errorf("default %d, preserve %t: %s", id, keep, got)
			}
			l.OK(a.check("preserveDefaultVlan", keep))
			l.OK(a.Call("DEL", "a"))
		}
	}
}

// vlanBreakages returns functions that break the VLAN setup in different ways.
func vlanBreakages(a attached) map[string]func() error {
	vlan := func(port string, change func(netlink.Link, uint16, bool, bool, bool, bool) error, id uint16, pvid, untagged bool) func() error {
		return func() error {
			return onHost(port, func(link netlink.Link) error { return change(link, id, pvid, untagged, false, true) })
		}
	}
	port, gateway := a.hostVeth(), a.gatewayPort("btv.100")
	return map[string]func() error{
		"bridge btv does not keep VLANs apart": func() error {
			return onHost("btv", filterVLANs(false))
		},
		"has the VLANs none; want":                             vlan(port, netlink.BridgeVlanDel, 100, false, false),
		"has the VLANs 100 pvid untagged, 200 untagged; want":  vlan(port, netlink.BridgeVlanAdd, 200, false, true),
		"has the VLANs 100 pvid untagged, 300; want":           vlan(port, netlink.BridgeVlanAdd, 300, false, false),
		"has the VLANs 100 untagged, 200 pvid untagged; want":  vlan(port, netlink.BridgeVlanAdd, 200, true, true),
		"has the VLANs 100 pvid; want":                         vlan(port, netlink.BridgeVlanAdd, 100, true, false),
		"gateway btv.100 has the VLANs none; want":             vlan(gateway, netlink.BridgeVlanDel, 100, false, false),
		"gateway btv.100 has the VLANs 100 pvid untagged, 200": vlan(gateway, netlink.BridgeVlanAdd, 200, false, true),
		"btv.100, the gateway of VLAN 100, is missing":         func() error { return onHost("btv.100", netlink.LinkDel) },
		"is not connected to btv": func() error {
			return onHost(gateway,
				netlink.LinkSetNoMaster)
		},
		"or its port is down":                  func() error { return onHost(gateway, netlink.LinkSetDown) },
		"btv.100, the gateway of VLAN 100, or": func() error { return onHost("btv.100", netlink.LinkSetDown) },
		"the gateway btv.100 misses an entry in nftables table inet podlace_vlan": kerneltest.FlushNFT,
		"gateway address 10.78.0.1/24 is missing on btv.100": func() error {
			return onHost("btv.100",
				delAddress("10.78.0.1/24"))
		},
	}
}

// TestCheckVLANs: CHECK detects each of the breakages, and the next ADD repairs the links and VLANs that all pods share.
func TestCheckVLANs(t *testing.T) {
	l, has := vlanLab(t, "isGateway", true)
	if !has {
		return
	}
	sample := l.add("sample")
	for says := range vlanBreakages(sample) {
		a := l.other().add("a")
		l.OK(a.check())
		if err := vlanBreakages(a)[says](); err != nil {
			t.Fatalf("%s: %v", says, err)
		}
		l.Fails(a.check(), plugin.CodeStateDiffers, says)
		l.OK(a.Call("DEL", "a"))
		if strings.HasPrefix(says, "bridge ") { // this bridge has ports
			if err := onHost("btv", filterVLANs(true)); err != nil {
				t.Fatal(err)
			}
		}
		b := l.other().add("b")
		l.OK(b.check())
		l.OK(b.Call("DEL", "b"))
	}
}

// TestCheckDefaultVLAN (C-61): CHECK fails if a pod's port is no longer in the bridge's default VLAN, because filtering drops its frames.
func TestCheckDefaultVLAN(t *testing.T) {
	l, has := vlanLab(t)
	if !has {
		return
	}
	l.Conf = l.Conf.With("vlan", 0)
	a := l.add("a")
	if err := a.run("ip link set btv type bridge vlan_filtering 1"); err != nil {
		t.Fatal(err)
	}
	l.OK(a.check("strictCheck", true))
	if err := a.run("bridge vlan del vid 1 dev HOST"); err != nil {
		t.Fatal(err)
	}
	l.Fails(a.check(), plugin.CodeStateDiffers, "port "+a.hostVeth()+" has no VLAN for frames without a tag")
}

// TestNoHalfVLANs: without VLAN filtering in the kernel, no VLAN bridge is created.
func TestNoHalfVLANs(t *testing.T) {
	l, has := vlanLab(t)
	if has {
		return
	}
	if err := l.host().AddBridge("btv", nil, 0, false, true); plugin.Code(err) != plugin.CodeKernelFeature {
		t.Errorf("%v, want %v", err, unix.EOPNOTSUPP)
	}
}
