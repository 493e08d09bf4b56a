// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
)

// healthyPod is a pod in a correct state: its configuration, and changes that CHECK must accept. In commands, BR is the bridge, HOST the
// host-side veth, and V4 and V6 the pod's addresses.
type healthyPod struct {
	keys       []any
	need       string // kernel feature that the node needs
	node, pod  string // commands before ADD
	then, work string // commands after ADD, on the node and in the pod
	history    func(attached) attached
	tells      string // expected log line; CHECK with strictCheck fails
}

const (
	vlanFilter = "ip link add bhtry type bridge vlan_filtering 1; ip link del bhtry"
	vrf        = "ip link add bhtry type vrf table 91; ip link del bhtry"
	tun        = "ip tuntap add bhtry mode tun; ip tuntap del bhtry mode tun"
)

func podsByConfiguration(subnets []string) map[string]healthyPod {
	layer2 := []any{"ipam", nil, "isGateway", nil, "ipMasq", nil}
	with := func(keys ...any) []any { return []any{"ipam", hostLocal(subnets...).With(keys...)} }
	return map[string]healthyPod{
		"dual stack": {}, "IPv4": {keys: []any{"ipam", hostLocal(subnets[0])}}, "IPv6": {keys: []any{"ipam", hostLocal(subnets[1])}},
		"default gateway":         {keys: []any{"isDefaultGateway", true, "ipam", hostLocal(subnets...)}},
		"without a gateway":       {keys: []any{"isGateway", nil}},
		"gateway of an admin":     {keys: []any{"isGateway", nil}, then: "ip addr add GW4/24 dev BR"},
		"layer 2":                 {keys: layer2},
		"layer 2, left down":      {keys: append(layer2, "disableContainerInterface", true)},
		"VLAN":                    {need: vlanFilter, keys: []any{"vlan", 100}},
		"VLAN without a gateway":  {need: vlanFilter, keys: []any{"vlan", 100, "isGateway", nil, "ipMasq", nil}},
		"VLAN beside the default": {need: vlanFilter, keys: []any{"vlan", 100, "preserveDefaultVlan", true, "isGateway", nil}},
		"trunk":                   {need: vlanFilter, keys: []any{"vlanTrunk", []any{object{"minID": 7, "maxID": 9}}}},
		"vlan_filtering later":    {need: vlanFilter, then: "ip link set BR type bridge vlan_filtering 1"},
		"no default VLAN":         {need: vlanFilter, node: "ip link add BR type bridge vlan_filtering 1 vlan_default_pvid 0"},
		"promiscuous":             {keys: []any{"promiscMode", true, "hairpinMode", nil}},
		"small MTU":               {keys: []any{"mtu", 1400}},
		"large MTU":               {keys: []any{"mtu", 9000}},
		"MTU of the uplink":       {keys: []any{"mtu", "auto"}},
		"no hairpin":              {keys: []any{"hairpinMode", nil}},
		"isolated":                {keys: []any{"portIsolation", true}},
		"MAC checked":             {keys: []any{"macspoofchk", true}},
		"addresses checked":       {keys: []any{"antiSpoof", true}},
		"duplicate detection":     {keys: []any{"enabledad", true}},
		"not masqueraded":         {keys: []any{"ipMasq", nil}},
		"masquerade of IPv4":      {keys: []any{"ipMasq", object{"v6": false}}},
		"iptables":                {need: "iptables -V; ip6tables -V", keys: []any{"ipMasqBackend", "iptables"}},
		"addresses asked for": {keys: []any{"capabilities", object{"ips": true},
			"runtimeConfig", object{"ips": []string{"10.90.0.77", "fd00:90::77"}}}},
		"MAC asked for":             {keys: []any{"capabilities", object{"mac": true}, "runtimeConfig", object{"mac": "02:00:00:00:09:09"}}},
		"version 0.4.0":             {keys: []any{"cniVersion", "0.4.0"}},
		"version 1.0.0":             {keys: []any{"cniVersion", "1.0.0"}},
		"two addresses in a subnet": {keys: []any{"ipam", ranges(object{"subnet": "10.89.0.0/31", "gateway": "10.89.0.0"})}},
		"routes with attributes": {keys: with("routes", []any{object{"dst": "0.0.0.0/0", "mtu": 1300, "advmss": 1260},
			object{"dst": "192.0.2.0/24", "priority": 70}, object{"dst": "::/0", "mtu": 1300}})},
		"routes in a table, on the link": {keys: with("routes", []any{object{"dst": "0.0.0.0/0", "table": 90},
			object{"dst": "198.51.100.0/24", "scope": 253}})},
	}
}

// podsByChanges returns healthy pods that nodes, runtimes, other plugins or workloads changed.
func podsByChanges() map[string]healthyPod {
	return map[string]healthyPod{
		"sysctls of the runtime": {pod: "sysctl -qw net.ipv6.conf.all.disable_ipv6=1 net.ipv4.ip_forward=1 net.ipv4.conf.all.rp_filter=1"},
		"routes of the workload": {work: "ip route add 192.0.2.0/24 via GW4; ip route add blackhole 198.51.100.0/24; " +
			"ip route add 203.0.113.0/24 dev eth0"},
		"addresses of the workload":  {work: "ip addr add 192.0.2.7/24 dev eth0; ip addr add fd00:99::7/64 dev eth0; ip addr add 192.0.2.8/32 dev lo"},
		"interfaces of the workload": {work: "ip link add v0 type veth peer name v1; ip link set v0 up; ip link add b0 type bridge; ip link set v1 master b0"},
		"tunnel of the workload": {need: tun, work: "ip tuntap add tun0 mode tun; ip addr add 192.0.2.1/32 dev tun0; ip link set tun0 up; " +
			"ip route add 0.0.0.0/1 dev tun0; ip route add 128.0.0.0/1 dev tun0"},
		"rules of the workload": {work: "ip route add default via GW4 table 77; ip rule add from V4 lookup 77; ip rule add fwmark 7 lookup 77"},
		"sysctls of the workload": {work: "sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1 net.ipv4.conf.eth0.arp_ignore=1 " +
			"net.ipv4.conf.eth0.rp_filter=2 net.ipv4.tcp_syncookies=0"},
		"accept_ra of the workload": {work: "sysctl -qw net.ipv6.conf.eth0.accept_ra=2", tells: "eth0 accepts router advertisements"},
		"flags by the workload":     {work: "ip link set eth0 promisc on allmulticast on txqueuelen 77"},
		"MTU by a later plugin":     {work: "ip link set eth0 mtu 1300", tells: "eth0 has mtu 1300 in the pod"},
		"IPv4 forwarded by single links": {then: "sysctl -qw net.ipv4.ip_forward=0; sysctl -qw net.ipv4.conf.BR.forwarding=1 " +
			"net.ipv4.conf.lo.forwarding=1"},
		"IPv4 forwarded by other links alone before": {node: "sysctl -qw net.ipv4.ip_forward=1; sysctl -qw net.ipv4.conf.default.forwarding=0"},
		"IPv6 forwarded by single links": {need: "test -e /proc/sys/net/ipv6/conf/lo/force_forwarding",
			then: "sysctl -qw net.ipv6.conf.all.forwarding=0; sysctl -qw net.ipv6.conf.BR.force_forwarding=1"},
		"bridge of an admin":        {node: "ip link add BR type bridge; ip link set BR mtu 9000 up"},
		"bridge with spanning tree": {node: "ip link add BR type bridge stp_state 1 forward_delay 200"},
		"bridge in a VRF":           {need: vrf, node: "ip link add vrf0 type vrf table 91; ip link set vrf0 up; ip link add BR type bridge; ip link set BR master vrf0"},
		"bridge with another MAC":   {then: "ip link set BR address 02:00:00:00:09:01"},
		"bridge with a larger MTU":  {then: "ip link set BR mtu 9000"},
		"bridge with another port":  {then: "ip link add up0 type veth; ip link set up0 master BR up"},
		"names and aliases":         {then: "ip link property add dev HOST altname web0 || true; ip link set HOST alias mine; ip link set BR alias ours"},
		"limits on the host side":   {then: "ip link set HOST txqueuelen 77 gso_max_size 16000"},
		"routes of the node":        {then: "ip route add blackhole 10.90.0.0/16; ip route add unreachable fd00:90::/32; ip route add blackhole 192.0.2.0/24"},
		"rules of the node":         {then: "ip rule add from 192.0.2.9 lookup 77; ip rule add fwmark 7 lookup 78; ip route add blackhole default table 78"},
		"VPN of the node": {then: "ip link add up0 type veth; ip link set up0 up; ip route add default dev up0 table 79; " +
			"ip rule add not fwmark 0xca6c table 79 pref 99; ip rule add table main suppress_prefixlength 0 pref 98"},
		"link of the pod down and up": {work: "ip link set eth0 down; ip link set eth0 up; " +
			"ip route add default via GW4 || true; ip -6 route add default via GW6 || true"},
		"overlapping subnet": {then: "ip link add up0 type veth; ip link set up0 up; ip addr add GW4/25 dev up0", tells: "through up0"},
	}
}

// podsByHistory returns healthy pods after different CNI operations.
func podsByHistory() map[string]healthyPod {
	return map[string]healthyPod{
		"record lost, without rules": {keys: []any{"ipMasq", nil}, tells: "no record", history: func(a attached) attached {
			a.loseRecord()
			return a
		}},
		"later plugins told their changes": {work: "ip route del default via GW4; ip link set eth0 address 02:00:00:00:09:02",
			history: func(a attached) (told attached) {
				told = a
				told.result.Interfaces[2].Mac, told.result.Routes = "02:00:00:00:09:02", a.result.Routes[1:]
				told.prev, _ = json.Marshal(told.result)
				return told
			}},
		"after STATUS, GC and other pods": {history: func(a attached) attached {
			a.OK(a.Call("STATUS", ""))
			a.OK(a.Call("GC", "", "cni.dev/valid-attachments", []any{object{"containerID": "a", "ifname": "eth0"}}))
			for range 2 {
				o := a.other()
				o.OK(o.Call("ADD", "other"))
				o.OK(o.Call("DEL", "other"))
			}
			return a
		}},
		"bridge deleted and made again": {history: func(a attached) attached {
			if err := a.run("ip link del " + a.Conf["bridge"].(string)); err != nil {
				a.Fatal(err)
			}
			a.other().add("other")
			return a
		}},
		"second network on the bridge": {history: func(a attached) attached {
			o := a.other()
			o.Conf = o.Conf.With("name", a.network()+"-2", "mtu", 1400, "hairpinMode", nil, "ipam", hostLocal("fd00:88::/64"))
			o.OK(o.add("second").check("strictCheck", true))
			return a
		}},
		"pod of the reference": {history: func(a attached) attached {
			o := attached{lab: a.other(), id: "theirs"}
			o.Conf = o.Conf.With("hairpinMode", nil)
			prev := o.attachAsReference(o.id, "10.90.0.77")
			o.prev, _ = json.Marshal(prev)
			o.Cleanup(func() { o.OK(o.Call("DEL", o.id, "prevResult", prev)) })
			for command, run := range map[string]func(string) error{"ip link set veth0a1b2c3d up": o.run,
				"ip addr add 10.90.0.77/24 dev eth0; ip link set eth0 up": o.runInPod} {
				if err := run(command); err != nil {
					a.Fatal(err)
				}
			}
			return o
		}},
		"second interface": {history: func(a attached) attached {
			keys := []any{"CNI_IFNAME", "net1", "name", a.network() + "-2", "isGateway", nil, "ipam", nil, "ipMasq", nil}
			a.OK(a.Call("ADD", "a", keys...))
			a.Cleanup(func() { a.OK(a.Call("DEL", "a", keys...)) })
			return a
		}},
		"bridge renamed in the configuration": {history: func(a attached) attached {
			former := a.Conf["bridge"].(string)
			a.Conf = a.Conf.With("bridge", former+"n")
			a.Cleanup(func() { _ = a.run("ip link del " + former + "n") })
			if err := a.run("ip link del " + former); err != nil {
				a.Fatal(err)
			}
			return a.other().add("renamed")
		}},
	}
}

// cleanUp removes everything from the node that the commands of a healthyPod may have created.
const cleanUp = `ip -force -batch - 2>/dev/null <<END || :
link del BR
link del BR.100
link del up0
link del vrf0
rule del table 77
rule del table 78
rule del table 79
rule del pref 98
route flush table 78
route flush table 79
route del blackhole 10.90.0.0/16
route del unreachable fd00:90::/32
route del blackhole 192.0.2.0/24
END
sysctl -qw net.ipv4.conf.default.forwarding=1 net.ipv4.ip_forward=0 net.ipv6.conf.all.forwarding=1
sysctl -qw net.ipv4.ip_forward=1`

// TestCheckHealthy (C-66, C-67): CHECK succeeds for each healthy pod, without any other warning than the one that the pod expects.
func TestCheckHealthy(t *testing.T) {
	kerneltest.Slow(t)
	kinds := podsByConfiguration([]string{"10.90.0.0/24", "fd00:90::/64"})
	maps.Copy(kinds, podsByChanges())
	maps.Copy(kinds, podsByHistory())
	if len(kinds) < 60 {
		t.Errorf("%d kinds", len(kinds))
	}
	for i, what := range slices.Sorted(maps.Keys(kinds)) {
		t.Run(what, func(t *testing.T) { testHealthy(t, i, kinds[what]) })
	}
}

func testHealthy(t *testing.T, number int, h healthyPod) {
	bridge := fmt.Sprint("bh", number)
	defaults := []any{object{"dst": "0.0.0.0/0"}, object{"dst": "::/0"}}
	l := bareLab(t, append([]any{"name", "healthy-" + bridge, "bridge", bridge,
		"ipam", hostLocal("10.90.0.0/24", "fd00:90::/64").With("routes", defaults)}, h.keys...)...)
	a := attached{lab: l, id: "a"}
	if err := a.run(h.need); h.need == vlanFilter && !kerneltest.Feature(t, err == nil, "bridge VLAN filtering") || err != nil {
		t.Skipf("SKIPPED: the kernel cannot do: %s", h.need)
	}
	t.Cleanup(func() {
		_ = a.run(strings.ReplaceAll(cleanUp, "BR", bridge)) // most of these objects exist only in some of the cases
	})
	do := func(run func(attached, string) error, command string) {
		t.Helper()
		if err := run(a, strings.NewReplacer("BR", bridge, "GW4", "10.90.0.1", "GW6", "fd00:90::1").Replace(command)); err != nil {
			t.Fatal(err)
		}
	}
	do(attached.run, h.node)
	do(attached.runInPod, h.pod)
	a = l.add("a")
	a.OK(a.check("strictCheck", true))
	do(attached.run, h.then)
	do(attached.runInPod, h.work)
	if h.history != nil {
		a = h.history(a)
	}
	o := a.OK(a.check())
	if h.tells == "" {
		a.OK(a.check("strictCheck", true))
	}
	if warns := strings.Contains(o.Log, "level=WARN"); warns != (h.tells != "") || !strings.Contains(o.Log, h.tells) {
		t.Errorf("log: %q, want %q", o.Log, h.tells)
	}
}
