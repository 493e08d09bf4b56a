// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"encoding/json"
	"testing"

	"github.com/podlace/podlace/integration/harness"
)

// badValue is an invalid value in a plugin's configuration, and the expected error.
type badValue struct {
	title string
	edit  []any // arguments of object.with
	says  string
	codes []int
}

func bad(title, says string, edit ...any) badValue {
	return badValue{title, edit, says, []int{harness.CodeConfig}}
}

// badType returns a value of the wrong JSON type, which either the JSON decoder or the validation reports.
func badType(title string, edit ...any) badValue {
	return badValue{title, edit, "", []int{harness.CodeDecode, harness.CodeConfig}}
}

func badValues(plugin string) []badValue {
	switch plugin {
	case "bridge":
		return badBridge()
	case "host-local":
		return badHostLocal()
	case "portmap":
		return append(badPorts(), badPortmap()...)
	case "bandwidth":
		return badRates()
	}
	return nil
}

func badBridge() []badValue {
	list := []badValue{
		bad("mtu negative", "mtu", "mtu", -1), bad("mtu 67", "mtu", "mtu", 67), bad("mtu 65536", "mtu", "mtu", 65536),
		bad("vlan negative", "vlan", "vlan", -1), bad("vlan 4095", "vlan", "vlan", 4095),
		bad("hairpin and promisc", "", "hairpinMode", true, "promiscMode", true),
		bad("masquerade by magic", "ipMasqBackend", "ipMasq", true, "ipMasqBackend", "magic"),
		bad("interface disabled with ipam", "disableContainerInterface", "disableContainerInterface", true),
		bad("trunk 0", "vlanTrunk", "vlanTrunk", []any{map[string]any{"id": 0}}),
		bad("trunk 4095", "vlanTrunk", "vlanTrunk", []any{map[string]any{"id": 4095}}),
		bad("trunk reversed", "vlanTrunk", "vlanTrunk", []any{map[string]any{"minID": 20, "maxID": 10}}),
		bad("trunk half", "vlanTrunk", "vlanTrunk", []any{map[string]any{"minID": 20}}),
		bad("a gateway in a subnet of two", "isGateway", rangesEdit("subnet", "10.70.0.0/31")...),
		bad("ipam.type with a slash", "type", "ipam.type", "../bin/host-local"),
		bad("ipam.type absolute", "type", "ipam.type", "/bin/sh"),
		badType("mtu a string", "mtu", "1500"), badType("mtu a fraction", "mtu", 1500.5), badType("isGateway a string", "isGateway", "yes"),
		badType("vlan too large for any integer", "vlan", json.Number("1e30")),
	}
	for _, name := range []string{"a/b", "..", "all", "default", "br%d", "a b", "a:b", "sixteen-bytes-xx"} {
		list = append(list, bad("bridge named "+name, "bridge", "bridge", name))
	}
	for _, mac := range []string{"x", "00:00:00:00:00:00", "ff:ff:ff:ff:ff:ff", "01:00:5e:00:00:01", "02:00:00:00:00:00:00:01",
		"0200.0000.0001.0002"} {
		list = append(list, bad("mac "+mac, "mac", "runtimeConfig.mac", mac, "capabilities.mac", true))
	}
	return append(list, badIPAM()...)
}

func badHostLocal() []badValue { return badIPAM() }

// rangesEdit returns the arguments of With that replace the address ranges.
func rangesEdit(pairs ...any) []any {
	r := map[string]any{}
	for i := 0; i < len(pairs); i += 2 {
		r[pairs[i].(string)] = pairs[i+1]
	}
	return []any{"ipam.ranges", []any{[]any{r}}}
}

func badIPAM() []badValue {
	return []badValue{
		bad("no ranges", "", "ipam.ranges", nil),
		bad("empty range set", "", "ipam.ranges", []any{[]any{}}),
		bad("no subnet", "subnet", rangesEdit("gateway", "10.70.0.1")...),
		bad("subnet a word", "", rangesEdit("subnet", "net")...),
		bad("subnet without a length", "", rangesEdit("subnet", "10.70.0.0")...),
		bad("subnet with host bits", "", rangesEdit("subnet", "10.70.0.1/24")...),
		bad("subnet with leading zeros", "", rangesEdit("subnet", "010.70.0.0/24")...),
		bad("subnet /31 with host bits", "host bits", rangesEdit("subnet", "10.70.0.1/31")...),
		bad("the node's CIDR, which no file has", "/run/podlace/node.json", rangesEdit("subnet", "usePodCidr")...),
		bad("start outside", "rangeStart", rangesEdit("subnet", "10.70.0.0/24", "rangeStart", "10.71.0.1")...),
		bad("end outside", "rangeEnd", rangesEdit("subnet", "10.70.0.0/24", "rangeEnd", "10.70.1.1")...),
		bad("start after end", "", rangesEdit("subnet", "10.70.0.0/24", "rangeStart", "10.70.0.9", "rangeEnd", "10.70.0.8")...),
		bad("start of the other family", "rangeStart", rangesEdit("subnet", "10.70.0.0/24", "rangeStart", "fd70::1")...),
		bad("gateway a word", "", rangesEdit("subnet", "10.70.0.0/24", "gateway", "gw")...),
		bad("overlap", "", "ipam.ranges", []any{[]any{map[string]any{"subnet": "10.70.0.0/24"}},
			[]any{map[string]any{"subnet": "10.70.0.0/16"}}}),
		bad("mixed families", "", "ipam.ranges", []any{[]any{map[string]any{"subnet": "10.70.0.0/24"}, map[string]any{"subnet": "fd70::/64"}}}),
		bad("route a word", "route", "ipam.routes", []any{map[string]any{"dst": "nowhere"}}),
		bad("route via a word", "route", "ipam.routes", []any{map[string]any{"dst": "0.0.0.0/0", "gw": "gw"}}),
		badType("ranges a string", "ipam.ranges", "10.70.0.0/24"),
		badType("subnet a number", rangesEdit("subnet", 10)...),
	}
}

func badPorts() []badValue {
	var list []badValue
	set := func(p map[string]any) []any { return []any{"runtimeConfig.portMappings", harness.Ports(p)} }
	for title, n := range harness.InOrder(map[string]int{"0": 0, "-1": -1, "65536": 65536, "70000": 70000, "2^32+80": 1<<32 + 80}) {
		list = append(list,
			bad("hostPort "+title, "port number", set(harness.Port(n, 80, "tcp"))...),
			bad("containerPort "+title, "port number", set(harness.Port(8080, n, "tcp"))...))
	}
	for title, v := range harness.InOrder(map[string]any{"a string": "80", "a fraction": 80.5, "true": true}) {
		list = append(list, badType("hostPort "+title, set(harness.Port(v, 80, "tcp"))...),
			badType("containerPort "+title, set(harness.Port(8080, v, "tcp"))...))
	}
	for _, protocol := range []string{"icmp", "tcp; flush ruleset", "6", "any", "tcp "} {
		list = append(list, bad("protocol "+protocol, "protocol", set(harness.Port(8080, 80, protocol))...))
	}
	for _, ip := range []string{
		"bogus", "999.1.1.1", "010.0.0.1", "1.2.3", "10.0.0.1/24", "fe80::1%eth0", "::ffff:10.0.0.1", "localhost", " 10.0.0.1", "10.0.0.1 drop",
	} {
		p := harness.Port(8080, 80, "tcp")
		p["hostIP"] = ip
		list = append(list, bad("hostIP "+ip, "hostIP", set(p)...))
	}
	return append(list, badType("a list of numbers", "runtimeConfig.portMappings", []any{80}),
		badType("no list", "runtimeConfig.portMappings", "80"))
}

func badPortmap() []badValue {
	return []badValue{
		bad("backend magic", "backend", "backend", "magic"),
		bad("bit 32", "markMasqBit", "backend", "iptables", "markMasqBit", 32),
		bad("bit -1", "markMasqBit", "backend", "iptables", "markMasqBit", -1),
		bad("two ways to mark", "externalSetMarkChain", "backend", "iptables", "markMasqBit", 5, "externalSetMarkChain", "X"),
		bad("iptables conditions for nftables", "conditionsV4", "conditionsV4", []any{"-s", "10.0.0.0/8"}),
		bad("iptables key for nftables", "externalSetMarkChain", "externalSetMarkChain", "X"),
		badType("snat a string", "snat", "yes"),
		bad("no prevResult", "prevResult", "prevResult", nil),
	}
}

// badRates (S-14) returns rates and bursts that are invalid in the conflist and in runtimeConfig. Huge values, and a rate without a burst,
// are invalid only in the conflist (see TestRuntimeRates).
func badRates() []badValue {
	var list []badValue
	for _, direction := range []string{"ingress", "egress"} {
		for _, where := range []string{"runtimeConfig.bandwidth.", ""} {
			rate, burst := where+direction+"Rate", where+direction+"Burst"
			pair := func(title string, r, b any) badValue {
				return bad(title+" "+rate, direction, "runtimeConfig", nil, rate, r, burst, b)
			}
			list = append(list,
				pair("negative rate", -1, 1000), pair("negative burst", 1_000_000, -1),
				badType("rate a string "+rate, rate, "1M", burst, 1000), badType("rate a fraction "+rate, rate, 1.5, burst, 1000),
				badType("burst a string "+burst, rate, 1_000_000, burst, "1M"), badType("burst a fraction "+burst, rate, 1_000_000, burst, 1.5),
				badType("rate 1e20 "+rate, rate, json.Number("1e20"), burst, 1000),
				pair("rate 2^64", json.Number("18446744073709551616"), 1000), pair("burst 2^64", 1_000_000, json.Number("18446744073709551616")))
			if where == "" {
				list = append(list, pair("burst without rate", 0, 1000), pair("rate without burst", 1_000_000, 0),
					pair("rate 1", 1, 1000), pair("rate 7", 7, 1000), pair("rate 999", 999, 1000), pair("rate beyond anything", 1<<62, 1000),
					pair("rate 2^63", uint64(1<<63), 1000), pair("rate 2^64-1", uint64(1<<64-1), 1000),
					pair("burst of 4 GiB", 1_000_000, 1<<35), pair("burst 2^64-1", 1_000_000, uint64(1<<64-1)))
			}
		}
	}
	return append(list, bad("no prevResult", "prevResult", "prevResult", nil))
}

// TestBadValuesAdd (S-14) checks that ADD refuses each bad value before any change.
func TestBadValuesAdd(t *testing.T) {
	harness.ForEach(t, func(t *testing.T, f *harness.Fixture, plugin string) {
		for _, v := range badValues(plugin) {
			mustRefuse(t, f, v.title, f.Good("ADD", plugin).Config(f.Conf(plugin).With(v.edit...)), v.says, v.codes...)
		}
	})
}

// TestBadValuesDel (C-48, S-14): after a valid ADD, DEL removes the attachment although its configuration has a bad value; a fourth of them
// or, with FAULTS=all, each.
func TestBadValuesDel(t *testing.T) {
	harness.ForEach(t, func(t *testing.T, f *harness.Fixture, plugin string) {
		for i, v := range badValues(plugin) {
			if i%harness.Some(4, 1) != 0 {
				continue
			}
			t.Run(v.title, func(t *testing.T) {
				delWith(t, f, v.title, plugin, v.edit...)
			})
		}
	})
}

// delWith runs ADD with a valid configuration, and then runs DEL with an edited configuration.
func delWith(t *testing.T, f *harness.Fixture, title, plugin string, edit ...any) {
	t.Helper()
	f.Life(t, plugin, func() {
		t.Helper()
		f.Good("ADD", plugin).Run(t).OK(t)
		f.Good("DEL", plugin).Config(f.Conf(plugin).With(edit...)).Run(t).OK(t)
	})
	f.Oracle.Clean(t, "DEL with "+title)
}
