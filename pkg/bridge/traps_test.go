// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"net/netip"
	"os/exec"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
)

const trapped = "does not have the effect that it suggests"

// runOnNode runs a shell script on the node, and a second one when the test ends.
func (l lab) runOnNode(script, undo string) {
	l.Helper()
	if _, err := exec.LookPath("ip"); err != nil {
		l.Skip("SKIPPED: no program ip")
	}
	if out, err := exec.Command("sh", "-ec", script).CombinedOutput(); err != nil {
		l.Fatalf("%s: %v: %s", script, err, out)
	}
	l.Cleanup(func() { _ = exec.Command("sh", "-ec", undo).Run() })
}

func (l lab) withoutBridge() {
	l.Cleanup(func() { _ = attachment.RemoveNote(attachment.OfNode, "logged-found-bridge-"+l.Conf["name"].(string)) })
	l.Cleanup(func() { _ = onHost(l.Conf["bridge"].(string), netlink.LinkDel) })
}

// TestClashOfSubnetsIsLogged: ADD warns if another link of the node has the pods' subnet, but only when the subnet is new to the bridge.
func TestClashOfSubnetsIsLogged(t *testing.T) {
	kerneltest.Slow(t)
	for name, c := range map[string]struct {
		node, undo string
		ipam       object
		says       string
	}{
		"another bridge": {"ip link add podman0 type bridge; ip addr add 10.161.0.1/16 dev podman0; ip link set podman0 up",
			"ip link del podman0",
			hostLocal("10.161.0.0/16"), "10.161.0.0/16 overlaps 10.161.0.0/16 dev podman0"},
		"another bridge that is down": {"ip link add docker0 type bridge; ip addr add 10.161.3.1/24 dev docker0", "ip link del docker0",
			hostLocal("10.161.0.0/16"), "10.161.0.0/16 overlaps 10.161.3.0/24 dev docker0"},
		"LAN of the node": {"ip link add lan9 type veth peer name lan9b; ip addr add 10.0.0.9/8 dev lan9; ip link set lan9 up",
			"ip link del lan9",
			hostLocal("10.161.0.0/24"), "10.161.0.0/24 overlaps 10.0.0.0/8 dev lan9"},
		"route to a part": {"ip link add lan9 type veth peer name lan9b; ip addr add 192.0.2.9/24 dev lan9; ip link set lan9 up; ip link set lan9b up; ip route add 10.161.7.0/24 via 192.0.2.1",
			"ip link del lan9", hostLocal("10.161.0.0/16"), "10.161.0.0/16 overlaps 10.161.7.0/24 via 192.0.2.1 dev lan9"},
		"IPv6": {"ip link add podman0 type bridge; ip -6 addr add fd00:161::9/48 dev podman0 nodad", "ip link del podman0",
			hostLocal("fd00:161:0:1::/64"), "fd00:161:0:1::/64 overlaps fd00:161::/48 dev podman0"},
		"nothing": {"ip link add podman0 type bridge; ip addr add 10.162.0.1/16 dev podman0", "ip link del podman0", hostLocal("10.161.0.0/16"),
			""},
		"route to the pods of all nodes": {"ip link add lan9 type veth peer name lan9b; ip addr add 192.0.2.9/24 dev lan9; ip link set lan9 up; ip link set lan9b up; ip route add 10.161.0.0/16 via 192.0.2.1",
			"ip link del lan9", hostLocal("10.161.3.0/24"), ""},
		"own range that is unreachable": {"ip route add unreachable 10.161.0.0/16 metric 32767", "ip route del unreachable 10.161.0.0/16",
			hostLocal("10.161.0.0/16"), ""},
	} {
		t.Run(name, func(t *testing.T) {
			l := bareLab(t, "name", "traps", "bridge", "bttrap", "ipam", c.ipam)
			l.withoutBridge()
			l.runOnNode(c.node, c.undo)
			first := l.OK(l.Call("ADD", "first"))
			l.Cleanup(func() { l.OK(l.Call("DEL", "first")) })
			if c.says == "" && strings.Contains(first.Log, trapped) || !strings.Contains(first.Log, c.says) ||
				c.says != "" && !strings.Contains(first.Log, `key=ipam`) {
				t.Errorf("want %q in the log of the ADD that makes the bridge:\n%s", c.says, first.Log)
			}
			second := l.other()
			if log := second.OK(second.Call("ADD", "second")).Log; strings.Contains(log, trapped) {
				t.Errorf("the next ADD says it again:\n%s", log)
			}
			second.OK(second.Call("DEL", "second"))
		})
	}
}

// TestClashOfNewSubnetIsLogged: ADD warns if the subnet of an existing bridge changes to one that another link of the node has.
func TestClashOfNewSubnetIsLogged(t *testing.T) {
	l := bareLab(t, "name", "traps", "bridge", "bttrap", "ipam", hostLocal("10.162.0.0/16"))
	l.withoutBridge()
	l.runOnNode("ip link add podman0 type bridge; ip addr add 10.161.0.1/16 dev podman0", "ip link del podman0")
	first := l.OK(l.Call("ADD", "first"))
	l.OK(l.Call("DEL", "first"))
	next := l.OK(l.Call("ADD", "next", "ipam", hostLocal("10.161.0.0/16")))
	l.OK(l.Call("DEL", "next"))
	if strings.Contains(first.Log, trapped) || !strings.Contains(next.Log, "overlaps 10.161.0.0/16 dev podman0") {
		t.Errorf("before:\n%sand after the change:\n%s", first.Log, next.Log)
	}
}

// TestKeysWithoutEffectAreLogged: the ADD that creates the bridge logs the key of each setting without effect.
func TestKeysWithoutEffectAreLogged(t *testing.T) {
	for name, c := range map[string]struct {
		keys []any
		says string
	}{
		"no ipam": {[]any{"ipam", nil}, "isGateway, ipMasq"},
		"no ipam, masquerade": {[]any{"ipam", nil, "isGateway", nil, "isDefaultGateway", true, "ipMasq", object{"v6": false}},
			"isDefaultGateway, ipMasq"},
		"misspelt capability":   {[]any{"ipam", hostLocal("10.163.0.0/24"), "capabilities", object{"ip": true}}, "capabilities.ip"},
		"layer 2 only":          {[]any{"ipam", nil, "isGateway", nil, "ipMasq", nil}, ""},
		"layer 2 only, in full": {[]any{"ipam", object{}, "isGateway", false, "ipMasq", object{"v4": false, "v6": false}}, ""},
		"nothing": {[]any{"ipam", hostLocal("10.163.0.0/24"), "capabilities", object{"mac": true, "ips": true, "ipRanges": true}},
			""},
	} {
		t.Run(name, func(t *testing.T) {
			l := bareLab(t, append([]any{"name", "traps", "bridge", "bttrap"}, c.keys...)...)
			l.withoutBridge()
			log := l.OK(l.Call("ADD", "first")).Log
			next := l.OK(l.Call("DEL", "first")).Log + l.OK(l.Call("ADD", "next")).Log
			l.OK(l.Call("DEL", "next"))
			if strings.Contains(log, trapped) != (c.says != "") || !strings.Contains(log, c.says) {
				t.Errorf("want %q in:\n%s", c.says, log)
			}
			if strings.Contains(next, trapped) {
				t.Errorf("said twice:\n%s", next)
			}
		})
	}
}

// TestFindingsOfConfiguration calls Findings for configuration files. The default bridge is cni0.
func TestFindingsOfConfiguration(t *testing.T) {
	pods := []netip.Prefix{netip.MustParsePrefix("10.7.0.0/16")}
	node := []kernel.Subnet{{Prefix: pods[0], Link: "cni0"}, {Prefix: netip.MustParsePrefix("10.7.9.0/24"), Link: "cni0.8"},
		{Prefix: netip.MustParsePrefix("10.7.0.0/32"), Link: "podlace.vx"}}
	for config, want := range map[string][]string{
		`{"isGateway":true,"vlan":8,"ipam":{"type":"host-local"}}`:              nil,
		`{"isGateway":true,"ipam":{"type":"host-local"}}`:                       {"ipam: the pods' subnet 10.7.0.0/16 overlaps 10.7.9.0/24 dev cni0.8"},
		`{"isDefaultGateway":true,"bridge":"br7","vlan":8,"ipam":{"type":"x"}}`: {"ipam: the pods' subnet 10.7.0.0/16 overlaps 10.7.0.0/16 dev cni0", "ipam: "},
		`{"bridge":"br7","ipam":{"type":"x"}}`:                                  nil, // the bridge leads to a network that has the subnet
		`{"isGatewy":true,"ipam":{"type":"host-local"}}`:                        {"isGatewy: unknown key is ignored; did you mean isGateway?"},
		`{"isGateway":true}`:                      {"isGateway: no effect without ipam"},
		`{"isGateway":"yes","ipam":{"type":"x"}}`: nil, // ADD refuses it
	} {
		found := Findings([]byte(config), pods, node)
		for i, f := range found {
			if i < len(want) && !strings.HasPrefix(f.String(), want[i]) {
				t.Errorf("%s: %q, want %q", config, f, want[i])
			}
		}
		if len(found) != len(want) {
			t.Errorf("%s: %q, want %q", config, found, want)
		}
	}
}

// TestForeignBridgeWithoutIPAM: ADD changes nothing on another program's bridge, and logs each finding only once.
func TestForeignBridgeWithoutIPAM(t *testing.T) {
	l := bareLab(t, "name", "foreign", "bridge", "bttrap", "ipam", nil)
	t.Cleanup(func() { _ = attachment.RemoveNote(attachment.OfNode, "logged-found-bridge-foreign") })
	addForeignBridge(t, "bttrap")
	log := l.OK(l.Call("ADD", "first")).Log
	next := l.OK(l.Call("DEL", "first")).Log + l.OK(l.Call("ADD", "next")).Log
	l.OK(l.Call("DEL", "next"))
	if !strings.Contains(log, "isGateway, ipMasq") || strings.Contains(next, trapped) {
		t.Errorf("first:\n%s\nnext:\n%s", log, next)
	}
}
