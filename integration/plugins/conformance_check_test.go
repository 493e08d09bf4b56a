// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/pkg/sandbox"
)

const codeStateDiffers = 100

// TestCheckNeeds checks that CHECK fails without prevResult, and in versions without CHECK.
func TestCheckNeeds(t *testing.T) {
	harness.ForEach(t, func(t *testing.T, f *harness.Fixture, plugin string) {
		check := f.Good("CHECK", plugin)
		mustRefuse(t, f, "C-60 CHECK without prevResult", edited("prevResult", nil)(check), "prevResult", harness.CodeConfig)
		mustRefuse(t, f, "C-60 CHECK in version 0.3.1", edited("cniVersion", "0.3.1")(check), "CHECK", harness.CodeVersion)
	})
}

// breakage is one kind of damage, and the number of the plugin whose CHECK must report it.
type breakage struct {
	plugin int
	change func(held) error
}

// onNode and inPod return breakages of links.
func onNode(name func(held) string, change func(netlink.Link) error) breakage {
	return breakage{0, func(h held) error { return onHost(name(h), change) }}
}

func inPod(change func(netlink.Link) error) breakage {
	return breakage{0, func(h held) error { return h.inPod(change) }}
}

func bridgeOf(h held) string { return h.confs[0]["bridge"].(string) }

func setMAC(link netlink.Link) error {
	return netlink.LinkSetHardwareAddr(link, net.HardwareAddr{2, 0, 0, 0, 0, 0x77})
}

func setMTU(mtu int) func(netlink.Link) error {
	return func(link netlink.Link) error { return netlink.LinkSetMTU(link, mtu) }
}

func rename(link netlink.Link) error {
	return errors.Join(netlink.LinkSetDown(link), netlink.LinkSetName(link, "renamed0"), netlink.LinkSetUp(link))
}

func linkBreakages() map[string]breakage {
	return map[string]breakage{
		"C-61 pod side down":                inPod(netlink.LinkSetDown),
		"C-61 pod side deleted":             inPod(netlink.LinkDel),
		"C-61 pod side renamed":             inPod(rename),
		"C-61 MAC of the pod side changed":  inPod(setMAC),
		"C-61 MTU of the pod side raised":   inPod(setMTU(9000)),
		"C-61 host side down":               onNode(held.hostSide, netlink.LinkSetDown),
		"C-61 host side off the bridge":     onNode(held.hostSide, netlink.LinkSetNoMaster),
		"C-61 MAC of the host side":         onNode(held.hostSide, setMAC),
		"C-61 MTU of the host side lowered": onNode(held.hostSide, setMTU(1400)),
		"C-61 MTU of the host side raised":  onNode(held.hostSide, setMTU(9000)),
		"C-61 bridge deleted":               onNode(bridgeOf, netlink.LinkDel),
		"C-61 bridge down":                  onNode(bridgeOf, netlink.LinkSetDown),
		"C-61 port disabled":                byCommand("bridge link set dev HOST state 0"),
		"C-61 multicast flood off":          byCommand("bridge link set dev HOST mcast_flood off"),
		"C-61 host side renamed":            byCommand("ip link set HOST down; ip link set HOST name renamed0; ip link set renamed0 up"),
		"C-62 IPv4 forwarding off":          byCommand("sysctl -qw net.ipv4.ip_forward=0"),
		"C-62 IPv6 forwarding off":          byCommand("sysctl -qw net.ipv6.conf.all.forwarding=0"),
	}
}

// byCommand returns a breakage by a shell command on the node. HOST stands for the host side.
func byCommand(command string) breakage {
	return breakage{0, func(h held) error {
		out, err := exec.Command("sh", "-ec", strings.ReplaceAll(command, "HOST", h.hostSide())).CombinedOutput()
		if err != nil {
			err = fmt.Errorf("%s: %w: %s", command, err, out)
		}
		return err
	}}
}

// address returns address number i of the pod.
func (h held) address(i int) *netlink.Addr { return &netlink.Addr{IPNet: &h.result.IPs[i].Address} }

func layer3Breakages() map[string]breakage {
	removed := func(i int) breakage {
		return breakage{0, func(h held) error {
			return h.inPod(func(l netlink.Link) error { return netlink.AddrDel(l, h.address(i)) })
		}}
	}
	routed := func(i int, gw string) breakage {
		return breakage{0, func(h held) error {
			return h.inPod(func(l netlink.Link) error {
				r := netlink.Route{LinkIndex: l.Attrs().Index, Dst: &h.result.Routes[i].Dst, Gw: h.result.Routes[i].GW}
				err := netlink.RouteDel(&r)
				if r.Gw = net.ParseIP(gw); err == nil && r.Gw != nil {
					err = netlink.RouteAdd(&r)
				}
				return err
			})
		}}
	}
	return map[string]breakage{
		"C-62 IPv4 address removed": removed(0), "C-62 IPv6 address removed": removed(1),
		"C-62 IPv4 address changed": {0, func(h held) error {
			return h.inPod(func(l netlink.Link) error {
				other := &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(10, 140, 7, 7), Mask: net.CIDRMask(16, 32)}}
				return errors.Join(netlink.AddrDel(l, h.address(0)), netlink.AddrAdd(l, other),
					netlink.RouteReplace(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: &h.result.Routes[0].Dst, Gw: h.result.Routes[0].GW}))
			})
		}},
		"C-62 IPv4 route removed": routed(0, ""), "C-62 IPv6 route removed": routed(1, ""),
		"C-62 IPv4 route changed": routed(0, "10.140.7.8"), "C-62 IPv6 route changed": routed(1, "fd00:140::7:8"),
	}
}

func qdiscDel(name func(held) string, kind netlink.Qdisc) breakage {
	return breakage{2, func(h held) error {
		return onHost(name(h), func(l netlink.Link) error {
			kind.Attrs().LinkIndex = l.Attrs().Index
			return netlink.QdiscDel(kind)
		})
	}}
}

func otherBreakages() map[string]breakage {
	flushed := func(h held) error { return flushRules() }
	lease := func(i int, text string) breakage {
		return breakage{0, func(h held) error {
			path := "/var/lib/cni/networks/" + h.confs[0]["name"].(string) + "/" + h.result.IPs[i].Address.IP.String()
			if text == "" {
				return os.Remove(path)
			}
			return os.WriteFile(path, []byte(strings.ReplaceAll(text, "OWN", h.pod.Name)), 0o600)
		}}
	}
	root := func() netlink.Qdisc {
		return &netlink.Tbf{QdiscAttrs: netlink.QdiscAttrs{Parent: netlink.HANDLE_ROOT, Handle: netlink.MakeHandle(1, 0)}}
	}
	return map[string]breakage{
		"C-63 masquerade flushed":    {0, flushed},
		"C-63 hostPorts flushed":     {1, flushed},
		"C-64 ingress limit deleted": qdiscDel(held.hostSide, root()),
		"C-64 egress limit deleted":  qdiscDel(held.ifb, root()),
		"C-64 egress redirect deleted": qdiscDel(held.hostSide,
			&netlink.Ingress{QdiscAttrs: netlink.QdiscAttrs{Parent: netlink.HANDLE_INGRESS}}),
		"C-64 egress device deleted":     {2, func(h held) error { return onHost(h.ifb(), netlink.LinkDel) }},
		"C-65 IPv4 lease deleted":        lease(0, ""),
		"C-65 IPv6 lease deleted":        lease(1, ""),
		"C-65 lease of another":          lease(0, "other\r\neth0"),
		"C-65 lease of another of ours":  lease(1, "OWN\r\neth1"),
		"C-65 lease whose text names us": lease(0, "other-OWN\r\neth0"),
	}
}

// TestCheckTells damages one thing at a time, which CHECK must report. ADD of the next pod repairs shared state, and CHECK then
// succeeds.
func TestCheckTells(t *testing.T) {
	n := newNode(t, "tells", 140, "nftables")
	for _, table := range []map[string]breakage{linkBreakages(), layer3Breakages(), otherBreakages(), filterBreakages()} {
		for title, b := range harness.InOrder(table) {
			t.Run(title, func(t *testing.T) {
				n := n.in(t)
				n.broken(b)
				next := n.attach("tells-next")
				next.check()
				next.del()
			})
		}
	}
}

// broken attaches a pod, damages its state, and requires that CHECK reports the damage.
func (n node) broken(b breakage) {
	n.Helper()
	h := n.attach("tells")
	defer func() {
		h.del()
		for _, ip := range h.result.IPs { // DEL must not delete another attachment's lease
			_ = os.Remove("/var/lib/cni/networks/tells/" + ip.Address.IP.String())
		}
	}()
	h.check()
	if err := b.change(h); err != nil {
		n.Fatal(err)
	}
	h.call(b.plugin, "CHECK").Run(n.T).Refused(n.T, codeStateDiffers)
}

// TestCheckTellsIPTables flushes the iptables backend's table.
func TestCheckTellsIPTables(t *testing.T) {
	n := newNode(t, "tells-ipt", 141, "iptables")
	for _, program := range []string{"iptables", "ip6tables"} {
		t.Run("C-63 "+program+" flushed", func(t *testing.T) {
			n := n.in(t)
			h := n.attach("flushed")
			h.check()
			if out, err := exec.Command(program, "-t", "nat", "-F").CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			for i := range 2 {
				h.call(i, "CHECK").Run(t).Refused(t, codeStateDiffers)
			}
			h.del()
			next := n.attach("flushed-next")
			next.check()
			next.del()
		})
	}
}

// TestCheckAllows: later plugins of the chain may change the pod and report that in the result. A bridge may change its MAC.
func TestCheckAllows(t *testing.T) {
	n := newNode(t, "allows", 142, "nftables")
	t.Run("C-66 MAC and routes as the result says", func(t *testing.T) {
		n := n.in(t)
		h := n.attach("allows")
		err := h.inPod(func(l netlink.Link) error {
			return errors.Join(setMAC(l), netlink.RouteDel(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: &h.result.Routes[0].Dst,
				Gw: h.result.Routes[0].GW}))
		})
		if err != nil {
			t.Fatal(err)
		}
		h.call(0, "CHECK").Run(t).Refused(t, codeStateDiffers)
		h.result.Interfaces[2].Mac, h.result.Routes = "02:00:00:00:00:77", h.result.Routes[1:]
		if h.prev, err = json.Marshal(h.result); err != nil {
			t.Fatal(err)
		}
		h.check()
		h.del()
	})
	t.Run("C-66 habits of a tenant", func(t *testing.T) {
		n := n.in(t)
		h := n.attach("habits")
		err := h.inPod(func(l netlink.Link) error {
			return errors.Join(setMTU(1400)(l), os.WriteFile("/proc/sys/net/ipv6/conf/"+l.Attrs().Name+"/accept_ra", []byte("2"), 0))
		})
		if err != nil {
			t.Fatal(err)
		}
		h.check()
		h.confs[0]["strictCheck"] = true
		h.call(0, "CHECK").Run(t).Refused(t, codeStateDiffers)
		h.del()
	})
	t.Run("C-61 MAC of the bridge changed", func(t *testing.T) {
		n := n.in(t)
		h := n.attach("bridge-mac")
		if err := onHost(bridgeOf(h), setMAC); err != nil {
			t.Fatal(err)
		}
		h.check()
		h.del()
	})
}

// checksEnv sets the number of pods of TestCheckAtOnce. A release is tested with 1000.
const checksEnv = "PODLACE_CHECKS"

func TestCheckAtOnce(t *testing.T) {
	pods := 100
	if text := os.Getenv(checksEnv); text != "" {
		var err error
		if pods, err = strconv.Atoi(text); err != nil || pods < 1 {
			t.Fatalf("%s=%q: want a number", checksEnv, text)
		}
	}
	n := newNode(t, "at-once", 143, "nftables")
	t.Run(fmt.Sprint("C-67 CHECK right after ADD, pods: ", pods), func(t *testing.T) {
		n := n.in(t)
		before := harness.Watch(t)
		for i := range pods {
			h := n.attach(fmt.Sprint("at-once-", i))
			h.check()
			h.del()
			if err := h.pod.Close(); err != nil {
				t.Fatal(err)
			}
		}
		before.Clean(t, "all")
	})
}

// TestCheckLooks: CHECK changes nothing, and the bridge returns the IPAM plugin's error.
func TestCheckLooks(t *testing.T) {
	for i, backend := range []string{"nftables", "iptables"} {
		t.Run("C-68 CHECK changes nothing, "+backend, func(t *testing.T) {
			h := newNode(t, "looks-"+backend[:3], 144+i, backend).attach("looks")
			o := &harness.Oracle{Options: sandbox.Options{Pods: []*sandbox.Pod{h.pod}, Dirs: harness.StateDirs()}}
			o.Rebase(t)
			h.check()
			o.Clean(t, "CHECK")
			if err := h.inPod(netlink.LinkSetDown); err != nil {
				t.Fatal(err)
			}
			o.Rebase(t)
			h.call(0, "CHECK").Run(t).Refused(t, codeStateDiffers)
			o.Clean(t, "CHECK that fails")
			h.del()
		})
	}
	t.Run("C-68 CHECK of the IPAM plugin is passed on", func(t *testing.T) {
		s := newStub(t)
		prev := harness.RawObject(t, s.call("ADD").Run(t).OK(t).Stdout)
		check := s.call("CHECK").Config(s.conf().With("prevResult", prev))
		check.Run(t).OK(t)
		s.on(t, "CHECK", `echo '{"cniVersion":"1.1.0","code":123,"msg":"lease lost"}'; exit 1`)
		if f := check.Run(t).Refused(t, 123); !strings.Contains(f.Msg, "lease lost") {
			t.Errorf("msg %q", f.Msg)
		}
		s.call("DEL").Run(t).OK(t)
		s.f.Oracle.Clean(t, "DEL")
	})
}

// TestCheckShadowed: after a flush, another pod got the port.
func TestCheckShadowed(t *testing.T) {
	n := newNode(t, "shadowed", 146, "nftables")
	t.Run("C-69 hostPort of another pod", func(t *testing.T) {
		n := n.in(t)
		h := n.attach("shadowed-a")
		h.check()
		if err := flushRules(); err != nil {
			t.Fatal(err)
		}
		thief := n.attach("shadowed-b")
		thief.check()
		f := h.call(1, "CHECK").Run(t).Refused(t, codeStateDiffers)
		if !strings.Contains(f.Msg, "belongs to") {
			t.Errorf("msg %q does not name the port's owner", f.Msg)
		}
		h.del()
		thief.check()
		thief.del()
	})
}
