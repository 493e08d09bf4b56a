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
	"github.com/podlace/podlace/integration/snapshot"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

const codeStateDiffers = 100

// TestCheckNeeds checks that CHECK fails without prevResult and in versions of the specification without CHECK.
func TestCheckNeeds(t *testing.T) {
	harness.ForEach(t, func(t *testing.T, f *harness.Fixture, plugin string) {
		check := f.Good("CHECK", plugin)
		mustRefuse(t, f, "C-60 CHECK without prevResult", editedKeys("prevResult", nil)(check), "prevResult", harness.CodeConfig)
		mustRefuse(t, f, "C-60 CHECK in version 0.3.1", editedKeys("cniVersion", "0.3.1")(check), "CHECK", harness.CodeVersion)
	})
}

// breakage damages the state of an attached pod. plugin is the index of the plugin whose CHECK must report it.
type breakage struct {
	plugin int
	change func(attachedPod) error
}

// onNode returns a breakage of a link on the node, and inPod one of a link in the pod.
func onNode(name func(attachedPod) string, change func(netlink.Link) error) breakage {
	return breakage{0, func(h attachedPod) error { return onHost(name(h), change) }}
}

func inPod(change func(netlink.Link) error) breakage {
	return breakage{0, func(h attachedPod) error { return h.inPod(change) }}
}

func bridgeOf(h attachedPod) string { return h.confs[0]["bridge"].(string) }

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
		"C-61 pod side renamed":             inPod(rename),
		"C-61 MTU of the pod side raised":   inPod(setMTU(9000)),
		"C-61 MTU of the host side lowered": onNode(attachedPod.hostVeth, setMTU(1400)),
		"C-61 MTU of the host side raised":  onNode(attachedPod.hostVeth, setMTU(9000)),
		"C-61 bridge deleted":               onNode(bridgeOf, netlink.LinkDel),
		"C-61 port disabled":                byCommand("bridge link set dev HOST state 0"),
		"C-61 multicast flood off":          byCommand("bridge link set dev HOST mcast_flood off"),
		"C-61 host side renamed":            byCommand("ip link set HOST down; ip link set HOST name renamed0; ip link set renamed0 up"),
		"C-62 IPv4 forwarding off":          byCommand("sysctl -qw net.ipv4.ip_forward=0"),
		"C-62 IPv6 forwarding off":          byCommand("sysctl -qw net.ipv6.conf.all.forwarding=0"),
	}
}

// byCommand returns a breakage by a shell command on the node, in which HOST stands for the host-side veth.
func byCommand(command string) breakage {
	return breakage{0, func(h attachedPod) error {
		out, err := exec.Command("sh", "-ec", strings.ReplaceAll(command, "HOST", h.hostVeth())).CombinedOutput()
		if err != nil {
			err = fmt.Errorf("%s: %w: %s", command, err, out)
		}
		return err
	}}
}

// podAddress returns address number i of the pod.
func (h attachedPod) podAddress(i int) *netlink.Addr {
	return &netlink.Addr{IPNet: &h.result.IPs[i].Address}
}

func layer3Breakages() map[string]breakage {
	routed := func(i int, gw string) breakage {
		return breakage{0, func(h attachedPod) error {
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
		"C-62 IPv4 address changed": {0, func(h attachedPod) error {
			return h.inPod(func(l netlink.Link) error {
				other := &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(10, 140, 7, 7), Mask: net.CIDRMask(16, 32)}}
				return errors.Join(netlink.AddrDel(l, h.podAddress(0)), netlink.AddrAdd(l, other),
					netlink.RouteReplace(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: &h.result.Routes[0].Dst, Gw: h.result.Routes[0].GW}))
			})
		}},
		"C-62 IPv4 route changed": routed(0, "10.140.7.8"), "C-62 IPv6 route changed": routed(1, "fd00:140::7:8"),
	}
}

func otherBreakages() map[string]breakage {
	lease := func(i int, text string) breakage {
		return breakage{0, func(h attachedPod) error {
			path := "/var/lib/cni/networks/" + h.confs[0]["name"].(string) + "/" + h.result.IPs[i].Address.IP.String()
			if text == "" {
				return os.Remove(path)
			}
			return os.WriteFile(path, []byte(strings.ReplaceAll(text, "OWN", h.pod.Name)), 0o600)
		}}
	}
	return map[string]breakage{
		"C-64 egress device deleted":     {2, func(h attachedPod) error { return onHost(h.ifbDevice(), netlink.LinkDel) }},
		"C-65 lease of another of ours":  lease(1, "OWN\r\neth1"),
		"C-65 lease whose text names us": lease(0, "other-OWN\r\neth0"),
	}
}

// TestCheckTells causes one kind of damage at a time, which CHECK must report. ADD of the next pod repairs shared state, and CHECK then
// succeeds.
func TestCheckTells(t *testing.T) {
	n := newNode(t, "tells", 140, "nftables")
	for _, table := range []map[string]breakage{linkBreakages(), layer3Breakages(), otherBreakages(), filterBreakages()} {
		for title, b := range harness.InOrder(table) {
			t.Run(title, func(t *testing.T) {
				n := n.inSubtest(t)
				n.checkBroken(b)
				next := n.attach("tells-next")
				next.checkChain()
				next.delChain()
			})
		}
	}
}

// checkBroken attaches a pod, damages its state, and fails the test unless CHECK reports the damage.
func (n testNode) checkBroken(b breakage) {
	n.Helper()
	h := n.attach("tells")
	defer func() {
		h.delChain()
		for _, ip := range h.result.IPs { // DEL must not delete another attachment's lease
			_ = os.Remove("/var/lib/cni/networks/tells/" + ip.Address.IP.String())
		}
	}()
	h.checkChain()
	if err := b.change(h); err != nil {
		n.Fatal(err)
	}
	h.callOf(b.plugin, "CHECK").Run(n.T).Refused(n.T, codeStateDiffers)
}

func TestCheckTellsIPTables(t *testing.T) {
	n := newNode(t, "tells-ipt", 141, "iptables")
	for _, program := range []string{"iptables", "ip6tables"} {
		t.Run("C-63 "+program+" flushed", func(t *testing.T) {
			n := n.inSubtest(t)
			h := n.attach("flushed")
			h.checkChain()
			if out, err := exec.Command(program, "-t", "nat", "-F").CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			for i := range 2 {
				h.callOf(i, "CHECK").Run(t).Refused(t, codeStateDiffers)
			}
			h.delChain()
			next := n.attach("flushed-next")
			next.checkChain()
			next.delChain()
		})
	}
}

// TestCheckAllows: CHECK accepts changes that a later plugin of the chain makes and that are in this plugin's result, and a changed MAC of
// the bridge.
func TestCheckAllows(t *testing.T) {
	n := newNode(t, "allows", 142, "nftables")
	t.Run("C-66 MAC and routes as the result says", func(t *testing.T) {
		n := n.inSubtest(t)
		h := n.attach("allows")
		err := h.inPod(func(l netlink.Link) error {
			return errors.Join(setMAC(l), netlink.RouteDel(&netlink.Route{LinkIndex: l.Attrs().Index, Dst: &h.result.Routes[0].Dst,
				Gw: h.result.Routes[0].GW}))
		})
		if err != nil {
			t.Fatal(err)
		}
		h.callOf(0, "CHECK").Run(t).Refused(t, codeStateDiffers)
		h.result.Interfaces[2].Mac, h.result.Routes = "02:00:00:00:00:77", h.result.Routes[1:]
		if h.prev, err = json.Marshal(h.result); err != nil {
			t.Fatal(err)
		}
		h.checkChain()
		h.delChain()
	})
	t.Run("C-66 habits of a tenant", func(t *testing.T) {
		n := n.inSubtest(t)
		h := n.attach("habits")
		err := h.inPod(func(l netlink.Link) error {
			return errors.Join(setMTU(1400)(l), os.WriteFile("/proc/sys/net/ipv6/conf/"+l.Attrs().Name+"/accept_ra", []byte("2"), 0))
		})
		if err != nil {
			t.Fatal(err)
		}
		h.checkChain()
		h.confs[0]["strictCheck"] = true
		h.callOf(0, "CHECK").Run(t).Refused(t, codeStateDiffers)
		h.delChain()
	})
	t.Run("C-61 MAC of the bridge changed", func(t *testing.T) {
		n := n.inSubtest(t)
		h := n.attach("bridge-mac")
		if err := onHost(bridgeOf(h), setMAC); err != nil {
			t.Fatal(err)
		}
		h.checkChain()
		h.delChain()
	})
}

// checksEnv sets the number of pods of TestCheckAtOnce, which is 1,000 before a release.
const checksEnv = "PODLACE_CHECKS"

func TestCheckAtOnce(t *testing.T) {
	pods := 20
	if text := os.Getenv(checksEnv); text != "" {
		var err error
		if pods, err = strconv.Atoi(text); err != nil || pods < 1 {
			t.Fatalf("%s=%q: want a number", checksEnv, text)
		}
	}
	n := newNode(t, "at-once", 143, "nftables")
	t.Run(fmt.Sprint("C-67 CHECK right after ADD, pods: ", pods), func(t *testing.T) {
		n := n.inSubtest(t)
		before := harness.Watch(t)
		for i := range pods {
			h := n.attach(fmt.Sprint("at-once-", i))
			h.checkChain()
			h.delChain()
			if err := h.pod.Close(); err != nil {
				t.Fatal(err)
			}
		}
		before.Clean(t, "all")
	})
}

// TestCheckLooks: CHECK changes nothing on the node, and bridge returns the error of its IPAM plugin's CHECK.
func TestCheckLooks(t *testing.T) {
	for i, backend := range []string{"nftables", "iptables"} {
		t.Run("C-68 CHECK changes nothing, "+backend, func(t *testing.T) {
			h := newNode(t, "looks-"+backend[:3], 144+i, backend).attach("looks")
			o := &harness.Oracle{Options: snapshot.Options{Pods: []*sandbox.Pod{h.pod}, Dirs: harness.StateDirs()}}
			o.Rebase(t)
			h.checkChain()
			o.Clean(t, "CHECK")
			if err := h.inPod(netlink.LinkSetDown); err != nil {
				t.Fatal(err)
			}
			o.Rebase(t)
			h.callOf(0, "CHECK").Run(t).Refused(t, codeStateDiffers)
			o.Clean(t, "CHECK that fails")
			h.delChain()
		})
	}
	t.Run("C-68 CHECK of the IPAM plugin is passed on", func(t *testing.T) {
		s := newStub(t)
		prev := harness.RawObject(t, s.call("ADD").Run(t).OK(t).Stdout)
		check := s.call("CHECK").Config(s.conf().With("prevResult", prev))
		check.Run(t).OK(t)
		s.setScript(t, "CHECK", `echo '{"cniVersion":"1.1.0","code":123,"msg":"lease lost"}'; exit 1`)
		if f := check.Run(t).Refused(t, 123); !strings.Contains(f.Msg, "lease lost") {
			t.Errorf("msg %q", f.Msg)
		}
		s.call("DEL").Run(t).OK(t)
		s.f.Oracle.Clean(t, "DEL")
	})
}

// TestCheckShadowed: CHECK reports a hostPort that was flushed and then taken by another pod.
func TestCheckShadowed(t *testing.T) {
	n := newNode(t, "shadowed", 146, "nftables")
	t.Run("C-69 hostPort of another pod", func(t *testing.T) {
		n := n.inSubtest(t)
		h := n.attach("shadowed-a")
		h.checkChain()
		if err := flushRules(); err != nil {
			t.Fatal(err)
		}
		thief := n.attach("shadowed-b")
		thief.checkChain()
		f := h.callOf(1, "CHECK").Run(t).Refused(t, codeStateDiffers)
		if !strings.Contains(f.Msg, "belongs to") {
			t.Errorf("msg %q does not name the port's owner", f.Msg)
		}
		h.delChain()
		thief.checkChain()
		thief.delChain()
	})
}
