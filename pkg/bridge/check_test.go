// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"bytes"
	"errors"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

func delAddress(prefix string) func(netlink.Link) error {
	return func(link netlink.Link) error {
		return netlink.AddrDel(link, &netlink.Addr{IPNet: kernel.IPNet(netip.MustParsePrefix(prefix))})
	}
}

func setMAC(link netlink.Link) error {
	return netlink.LinkSetHardwareAddr(link, net.HardwareAddr{2, 0, 0, 0, 0, 0x77})
}

func delDefault(gateway, dst string) func(netlink.Link) error {
	return func(link netlink.Link) error {
		return netlink.RouteDel(&netlink.Route{LinkIndex: link.Attrs().Index, Dst: kernel.IPNet(netip.MustParsePrefix(dst)),
			Gw: net.ParseIP(gateway)})
	}
}

// breakages returns functions that each damage an attachment in one way, with the text that CHECK's error must contain. repair mends the
// bridge.
func breakages() map[string]struct {
	change func(attached) error
	says   string
	repair func(attached) error
} {
	type b = struct {
		change func(attached) error
		says   string
		repair func(attached) error
	}
	host := func(change func(netlink.Link) error) func(attached) error {
		return func(a attached) error { return onHost(a.hostVeth(), change) }
	}
	pod := func(change func(netlink.Link) error) func(attached) error {
		return func(a attached) error { return a.inPod("eth0", change) }
	}
	bridge := func(change func(netlink.Link) error) func(attached) error {
		return func(attached) error { return onHost("bt0", change) }
	}
	return map[string]b{
		"pod side down":        {pod(netlink.LinkSetDown), "eth0 is down in the pod", nil},
		"host side down":       {host(netlink.LinkSetDown), "the host side of eth0, is down", nil},
		"bridge down":          {bridge(netlink.LinkSetDown), "bridge bt0 is down", bridge(netlink.LinkSetUp)},
		"off the bridge":       {host(netlink.LinkSetNoMaster), "is not a port of bt0", nil},
		"pod side deleted":     {pod(netlink.LinkDel), "eth0 is missing in the pod", nil},
		"IPv4 address":         {func(a attached) error { return a.inPod("eth0", delAddress(a.address(0))) }, "is missing on eth0", nil},
		"IPv6 address":         {func(a attached) error { return a.inPod("eth0", delAddress(a.address(1))) }, "is missing on eth0", nil},
		"IPv4 route":           {pod(delDefault("10.60.0.1", "0.0.0.0/0")), "route to 0.0.0.0/0 through eth0 is missing", nil},
		"IPv6 route":           {pod(delDefault("fd00:60::1", "::/0")), "route to ::/0 through eth0 is missing", nil},
		"MAC of the pod side":  {pod(setMAC), "eth0 has MAC 02:00:00:00:00:77", nil},
		"MAC of the host side": {host(setMAC), "has MAC 02:00:00:00:00:77", nil},
		"hairpin off":          {host(func(l netlink.Link) error { return netlink.LinkSetHairpin(l, false) }), "has hairpin false", nil},
		"isolated":             {host(func(l netlink.Link) error { return netlink.LinkSetIsolated(l, true) }), "isolated true", nil},
		"IPv4 gateway":         {bridge(delAddress("10.60.0.1/24")), "gateway address 10.60.0.1/24 is missing on bt0", nil},
		"IPv6 gateway":         {bridge(delAddress("fd00:60::1/64")), "gateway address fd00:60::1/64 is missing on bt0", nil},
		"rules flushed": {func(attached) error { return kerneltest.FlushNFT() }, "masquerade of [10.60.0.0/24 fd00:60::/64] is missing",
			nil},
		"one family flushed": {func(attached) error { return flushSet("pods6-") }, "masquerade of [fd00:60::/64] is missing",
			func(attached) error { return kerneltest.FlushNFT() }},
		"lease deleted": {func(a attached) error { return os.Remove(a.leaseFile(0)) }, "lease of", nil},
		"lease of another": {func(a attached) error { return os.WriteFile(a.leaseFile(1), []byte("other\r\neth0"), 0o600) },
			"belongs to container",
			func(a attached) error { return os.Remove(a.leaseFile(1)) }},
	}
}

func (a attached) address(i int) string { return a.result.IPs[i].Address.String() }

func (a attached) leaseFile(i int) string {
	return "/var/lib/cni/networks/net/" + a.result.IPs[i].Address.IP.String()
}

// TestCheckDetects (C-61, C-62, C-63, C-65): CHECK fails after each of the breakages, and the next pod's ADD repairs what all pods share.
func TestCheckDetects(t *testing.T) {
	l := newLab(t)
	for what, b := range breakages() {
		l.Run(what, func(t *testing.T) {
			own := l
			own.T, own.Pod = t, kerneltest.NewPod(t)
			a := own.add("a")
			own.OK(a.check())
			if err := b.change(a); err != nil {
				t.Fatal(err)
			}
			own.Fails(a.check(), plugin.CodeStateDiffers, b.says)
			if b.repair != nil {
				if err := b.repair(a); err != nil {
					t.Fatal(err)
				}
			}
			next := own
			next.Pod = kerneltest.NewPod(t)
			n := next.add("next")
			next.OK(n.check())
		})
	}
}

func TestCheckMissingBridge(t *testing.T) {
	l := newLab(t, "bridge", "bt5")
	a := l.add("a")
	l.Fails(a.check("bridge", "missing0"), plugin.CodeStateDiffers, "bridge missing0 is missing")
	l.Fails(a.check("mtu", 1400), plugin.CodeStateDiffers, "has mtu 1500, want 1400")
	l.Fails(a.check("CNI_IFNAME", "eth7"), plugin.CodeStateDiffers, "")
}

// TestOwn: ownResult leaves out other pods' addresses in prevResult.
func TestOwn(t *testing.T) {
	j := &job{}
	j.r = &plugin.Request{IfName: "eth0"}
	prev := ipamResult(t, `"interfaces":[{"name":"net0"},{"name":"net1"},{"name":"eth0"}],"routes":[{"dst":"0.0.0.0/0"}],"ips":[{"address":"10.0.0.1/24","interface":0},
		{"address":"10.0.0.2/24","interface":1},{"address":"10.0.0.3/24"},
		{"address":"10.0.0.4/24","interface":9},{"address":"10.0.0.5/24","interface":-1},{"address":"10.0.0.6/24","interface":2}]`)
	var got []string
	for _, ip := range j.ownResult(prev).IPs {
		got = append(got, ip.Address.String())
	}
	if text := strings.Join(got, " "); text != "10.0.0.3/24 10.0.0.4/24 10.0.0.5/24 10.0.0.6/24" {
		t.Errorf("got %s", text)
	}
}

func TestIPTablesMasquerade(t *testing.T) {
	kerneltest.Slow(t)
	if !iptables.Installed(true) || !iptables.Installed(false) {
		t.Skip("SKIPPED: iptables is not installed")
	}
	l := newLab(t, "bridge", "bt6", "name", "tables", "ipMasqBackend", "iptables")
	id := strings.Repeat("0123456789abcdef", 15) // this container ID leads to the longest comments
	a := l.add(id)
	l.OK(a.check())
	chain := masqueradeChain(key("tables", id))
	for _, is4 := range []bool{true, false} {
		for _, line := range []string{"-F " + chain, "-D POSTROUTING"} {
			breakRule(t, is4, chain, line)
			l.Fails(a.check(), plugin.CodeStateDiffers, "iptables masquerade of")
			l.OK(l.Call("DEL", id))
			a = l.add(id)
			l.OK(a.check())
		}
	}
	a.loseRecord()
	l.OK(l.Call("DEL", id, "prevResult", a.prev))
	if natTable(t, true).HasChain(chain) {
		t.Error("without its record the chain is left")
	}
}

func natTable(t *testing.T, is4 bool) iptables.Table {
	t.Helper()
	table, err := iptables.Open(is4, true)
	if err != nil {
		t.Fatal(err)
	}
	defer table.Close()
	return table.NAT()
}

// breakRule applies a line for iptables-restore or, if it ends with POSTROUTING, deletes POSTROUTING's jumps to the chain.
func breakRule(t *testing.T, is4 bool, chain, line string) {
	t.Helper()
	table, err := iptables.Open(is4, true)
	if err != nil {
		t.Fatal(err)
	}
	defer table.Close()
	lines := []string{line}
	if strings.HasSuffix(line, "POSTROUTING") {
		lines = table.NAT().Deletions("POSTROUTING", chain)
	}
	if err := table.Apply(lines); err != nil {
		t.Fatal(err)
	}
}

// TestCheckRoutesOfOthers: a later plugin may add routes, or remove Podlace's from both the pod and the result.
func TestCheckRoutesOfOthers(t *testing.T) {
	l := newLab(t)
	a := l.add("a")
	if err := l.inPod("eth0", delDefault("10.60.0.1", "0.0.0.0/0")); err != nil {
		t.Fatal(err)
	}
	l.Fails(a.check(), plugin.CodeStateDiffers, "route to 0.0.0.0/0")
	prev := a.result
	prev.Routes = []*types.Route{prev.Routes[1], {Dst: *kernel.IPNet(netip.MustParsePrefix("192.0.2.0/24"))}}
	l.OK(a.check("prevResult", prev))
}

func TestMasqueradeLines(t *testing.T) {
	addresses := []netip.Prefix{netip.MustParsePrefix("10.1.0.5/24"), netip.MustParsePrefix("fd00::5/64"),
		netip.MustParsePrefix("10.2.0.5/16")}
	except := []netip.Prefix{netip.MustParsePrefix("192.0.2.0/24"), netip.MustParsePrefix("2001:db8::/32")}
	const comment = `-m comment --comment "name: \"podlace\" id: \"0123456789abcdef\""`
	want := []string{":CNI-46d35c6a9e0ed75882799dbb - [0:0]",
		"-A CNI-46d35c6a9e0ed75882799dbb -d 10.1.0.0/24 " + comment + " -j ACCEPT",
		"-A CNI-46d35c6a9e0ed75882799dbb -d 10.2.0.0/16 " + comment + " -j ACCEPT",
		"-A CNI-46d35c6a9e0ed75882799dbb -d 192.0.2.0/24 " + comment + " -j ACCEPT",
		"-A CNI-46d35c6a9e0ed75882799dbb ! -d 224.0.0.0/4 " + comment + " -j MASQUERADE",
		"-A POSTROUTING -s 10.1.0.5 " + comment + " -j CNI-46d35c6a9e0ed75882799dbb",
		"-A POSTROUTING -s 10.2.0.5 " + comment + " -j CNI-46d35c6a9e0ed75882799dbb"}
	if diff := cmp.Diff(want, masqueradeLines(key("podlace", "0123456789abcdef"), true, addresses, except)); diff != "" {
		t.Error(diff)
	}
	want = []string{":CNI-46d35c6a9e0ed75882799dbb - [0:0]", "-A CNI-46d35c6a9e0ed75882799dbb -d fd00::/64 " + comment + " -j ACCEPT",
		"-A CNI-46d35c6a9e0ed75882799dbb ! -d ff00::/8 " + comment + " -j MASQUERADE",
		"-A POSTROUTING -s fd00::5 " + comment + " -j CNI-46d35c6a9e0ed75882799dbb"}
	if diff := cmp.Diff(want, masqueradeLines(key("podlace", "0123456789abcdef"), false, addresses, except[:1])); diff != "" {
		t.Error(diff)
	}
	if lines := masqueradeLines(key("podlace", "0123456789abcdef"), false, addresses[:1], except); lines != nil {
		t.Errorf("for the other family %q", lines)
	}
}

// TestCheckWithoutRecord (F-21): without a record, as for the reference plugin's pods, Podlace cannot restore flushed masquerade. CHECK
// only logs the loss, because CRI-O drops the address of a pod whose CHECK fails.
func TestCheckWithoutRecord(t *testing.T) {
	l := newLab(t)
	a := l.add("a")
	key := attachment.Key{Network: "net", ContainerID: "a", IfName: "eth0"}
	if err := errors.Join(os.Remove("/run/podlace/net/bridge-"+key.Hash()), kerneltest.FlushNFT()); err != nil {
		t.Fatal(err)
	}
	rename := func(name string) {
		t.Helper()
		link, err := netlink.LinkByName(a.hostVeth())
		if err == nil {
			err = errors.Join(netlink.LinkSetDown(link), netlink.LinkSetName(link, name), netlink.LinkSetUp(link))
		}
		if err != nil {
			t.Fatal(err)
		}
		a.prev = bytes.ReplaceAll(a.prev, []byte(link.Attrs().Name), []byte(name))
		a.result.Interfaces[1].Name = name
	}
	ours := a.hostVeth()
	rename("vethref0") // the reference plugin chooses random names
	if log := l.OK(a.check()).Log; !strings.Contains(log, "masquerade of [10.60.0.0/24 fd00:60::/64] is missing") {
		t.Errorf("log: %s", log)
	}
	l.other().add("next") // this ADD masquerades both
	l.OK(a.check())
	rename(ours)
	l.Fails(a.check(), plugin.CodeStateDiffers, "the record of bridge is missing")
}

// TestDelForgetsLimits: DEL removes the record of the bandwidth limits with the link, even if the bridge's own record is lost or damaged.
func TestDelForgetsLimits(t *testing.T) {
	kerneltest.Slow(t)
	for what, lose := range map[string]func(path string) error{
		"there":   func(string) error { return nil },
		"lost":    os.Remove,
		"damaged": func(path string) error { return os.WriteFile(path, []byte("{"), 0o600) },
	} {
		t.Run(what, func(t *testing.T) {
			l := newLab(t)
			l.add("a")
			key := attachment.Key{Network: "net", ContainerID: "a", IfName: "eth0"}
			record := `{"format":1,"network":"net","containerID":"a","ifname":"eth0","plugin":"bandwidth","withLink":true}`
			limits := "/run/podlace/net/bandwidth-" + key.Hash()
			if err := errors.Join(lose("/run/podlace/net/bridge-"+key.Hash()), os.WriteFile(limits, []byte(record), 0o600)); err != nil {
				t.Fatal(err)
			}
			l.OK(l.Call("DEL", "a"))
			if _, err := os.Lstat(limits); err == nil {
				t.Errorf("left %s", limits)
			}
		})
	}
}
