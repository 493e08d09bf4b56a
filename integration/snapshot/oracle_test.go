// SPDX-License-Identifier: Apache-2.0

package snapshot_test

import (
	"net"
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/integration/snapshot"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// change is an action in a namespace and the differences that Diff must then report.
type change struct {
	name  string
	setup func(*testing.T) // before the first snapshot
	do    func(*testing.T)
	want  []string // regular expressions for whole lines, without the scope
}

type namespace struct {
	scope string
	do    func(func() error) error
	opt   snapshot.Options
}

// newNamespaces returns a host and a pod, which have only lo.
func newNamespaces(t *testing.T) []namespace {
	host, pod := kerneltest.NewPod(t), kerneltest.NewPod(t)
	return []namespace{
		// A second pod stands for the host, so that test cases do not share the real host's state.
		{"host", host.Do, snapshot.Options{}},
		{"pod " + pod.Name, pod.Do, snapshot.Options{Pods: []*sandbox.Pod{pod}}},
	}
}

func (n namespace) take(t *testing.T) *snapshot.Snapshot {
	t.Helper()
	var s *snapshot.Snapshot
	take := func() (err error) { s, err = snapshot.Take(n.opt); return err }
	do := take
	if n.scope == "host" {
		do = func() error { return n.do(take) }
	}
	must(t, do())
	return s
}

func (n namespace) run(t *testing.T, f func(*testing.T)) {
	t.Helper()
	if f == nil {
		return
	}
	must(t, n.do(func() error { f(t); return nil }))
}

// must ends the test after an error. In a function of Pod.Do, it ends only Do's goroutine; Do then returns an error, which ends the test.
func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func checkChanges(t *testing.T, changes []change) {
	for _, c := range changes {
		t.Run(c.name, func(t *testing.T) {
			for _, n := range newNamespaces(t) {
				n.run(t, c.setup)
				before, same := n.take(t), n.take(t)
				if diff := snapshot.Diff(before, same); len(diff) > 0 {
					t.Errorf("%s: nothing changed, yet: %q", n.scope, diff)
				}
				n.run(t, c.do)
				compare(t, n.scope, snapshot.Diff(before, n.take(t)), c.want)
			}
		})
	}
}

func compare(t *testing.T, scope string, got, want []string) {
	t.Helper()
	ok := len(got) == len(want) && len(want) > 0
	for i := range min(len(got), len(want)) {
		pattern := "^" + regexp.QuoteMeta(scope+": ") + want[i] + "$"
		ok = ok && regexp.MustCompile(pattern).MatchString(got[i])
	}
	if !ok {
		t.Errorf("%s: differences:\n\t%s\nwant:\n\t%s", scope, strings.Join(got, "\n\t"), strings.Join(want, "\n\t"))
	}
}

func TestDetectsLinks(t *testing.T) {
	checkChanges(t, []change{
		{"veth", nil, addVeth, []string{"link v0 appeared", "link v1 appeared"}},
		{"gone", addVeth, func(t *testing.T) { must(t, netlink.LinkDel(get(t, "v0"))) }, []string{"link v0 vanished", "link v1 vanished"}},
		{"name", addVeth, func(t *testing.T) { must(t, netlink.LinkSetName(get(t, "v0"), "w0")) },
			[]string{"link v0 vanished", "link v1 changed: lower v0 -> w0", "link w0 appeared"}},
		{"up", addVeth, func(t *testing.T) { up(t, "v0") }, []string{"link v0 changed: flags broadcast,multicast -> up,broadcast,multicast"}},
		{"mtu", addVeth, func(t *testing.T) { must(t, netlink.LinkSetMTU(get(t, "v0"), 1400)) },
			[]string{"link v0 changed: mtu 1500 -> 1400", "sysctl net/ipv6/conf/v0 changed: mtu 1500 -> 1400"}},
		{"mac", addVeth, func(t *testing.T) {
			must(t, netlink.LinkSetHardwareAddr(get(t, "v0"), net.HardwareAddr{2, 0, 0, 0, 0, 9}))
		}, []string{"link v0 changed: mac .* -> 02:00:00:00:00:09"}},
		{"alias", addVeth, func(t *testing.T) { must(t, netlink.LinkSetAlias(get(t, "v0"), "shop/web-0")) },
			[]string{"link v0 changed: alias none -> shop/web-0"}},
		{"altname", addVeth, func(t *testing.T) { must(t, netlink.LinkAddAltName(get(t, "v0"), "other-name")) },
			[]string{`link v0 changed: altnames none -> \{53:"other-name"\}`}},
		{"queue length", addVeth, func(t *testing.T) { must(t, netlink.LinkSetTxQLen(get(t, "v0"), 7)) },
			[]string{"link v0 changed: txqlen 1000 -> 7"}},
		{"group", addVeth, func(t *testing.T) { must(t, netlink.LinkSetGroup(get(t, "v0"), 3)) }, []string{"link v0 changed: group none -> 3"}},
		{"promiscuous", addVeth, func(t *testing.T) { must(t, netlink.SetPromiscOn(get(t, "v0"))) },
			[]string{"link v0 changed: flags .* -> .*promisc.*, promiscuity none -> 1"}},
		{"address generation", addVeth, func(t *testing.T) { must(t, netlink.LinkSetIP6AddrGenMode(get(t, "v0"), 1)) },
			[]string{"link v0 changed: inet6 .* addrgenmode 0 -> .* addrgenmode 1", "sysctl net/ipv6/conf/v0 changed: addr_gen_mode 0 -> 1"}},
		{"lo", nil, func(t *testing.T) { up(t, "lo") },
			[]string{"address 127.0.0.1/8 dev lo appeared", "address ::1/128 dev lo appeared", "link lo changed: flags loopback -> up,loopback"}},
	})
}

func TestDetectsBridges(t *testing.T) {
	port := func(t *testing.T) { must(t, netlink.LinkSetMaster(get(t, "v0"), get(t, "br0").(*netlink.Bridge))) }
	portOnBridge := func(t *testing.T) { bridge(t); port(t); up(t, "br0"); up(t, "v0"); up(t, "v1") }
	checkChanges(t, []change{
		{"bridge", addVeth, func(t *testing.T) {
			must(t, netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br1"}}))
		}, []string{"link br1 appeared"}},
		{"port", bridge, port, []string{"link v0 changed: .*linkinfo kind veth -> kind veth port of bridge .*master none -> br0.*"}},
		{"hairpin", portOnBridge, func(t *testing.T) { must(t, netlink.LinkSetHairpin(get(t, "v0"), true)) },
			[]string{"link v0 changed: linkinfo .*hairpin 0 .* -> .*hairpin 1 .*"}},
		{"isolated", portOnBridge, func(t *testing.T) { must(t, netlink.LinkSetIsolated(get(t, "v0"), true)) },
			[]string{"link v0 changed: linkinfo .*isolated 0.* -> .*isolated 1.*"}},
		{"setting", bridge, func(t *testing.T) {
			age := uint32(1000)
			must(t, netlink.LinkModify(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0"}, AgeingTime: &age}))
		}, []string{"link br0 changed: linkinfo .*ageing_time 30000 .* -> .*ageing_time 1000 .*"}},
		{"forwarding entry", portOnBridge, func(t *testing.T) {
			must(t, netlink.NeighAdd(&netlink.Neigh{
				LinkIndex: get(t, "v0").Attrs().Index, Family: 7, State: netlink.NUD_NOARP, Flags: netlink.NTF_MASTER,
				HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 7},
			}))
		}, []string{"fdb 02:00:00:00:00:07 dev v0 state 64 flags 0 appeared"}},
	})
}

func TestDetectsAddresses(t *testing.T) {
	address := func(text string, flags int) func(*testing.T) {
		return func(t *testing.T) {
			must(t, netlink.AddrAdd(get(t, "v0"), &netlink.Addr{IPNet: prefix(t, text), Flags: flags}))
		}
	}
	const nodad, noprefixroute = 0x02, 0x200
	checkChanges(t, []change{
		{"IPv4", vethUp, address("10.1.2.3/24", 0),
			[]string{"address 10.1.2.3/24 dev v0 appeared", "route unicast 10.1.2.0/24 table main src 10.1.2.3 dev v0 proto 2 scope 253 appeared"}},
		{"IPv6", vethUp, address("fd00::3/64", nodad),
			[]string{"address fd00::3/64 dev v0 appeared", "route unicast fd00::/64 table main metric 256 dev v0 .*proto 2 scope 0 appeared"}},
		{"link-local", vethUp, address("fe80::1/64", nodad), []string{"address fe80::1/64 dev v0 appeared"}},
		{"without route", vethUp, address("10.1.2.3/24", noprefixroute), []string{"address 10.1.2.3/24 dev v0 appeared"}},
		{"peer", vethUp, func(t *testing.T) {
			must(t, netlink.AddrAdd(get(t, "v0"), &netlink.Addr{IPNet: prefix(t, "10.1.2.3/32"), Peer: prefix(t, "10.1.2.4/32")}))
		}, []string{"address 10.1.2.3 peer 10.1.2.4/32 dev v0 appeared", "route unicast 10.1.2.4/32 .* appeared"}},
		{"flags", func(t *testing.T) { vethUp(t); address("fd00::3/64", nodad|noprefixroute)(t) }, func(t *testing.T) {
			must(t, netlink.AddrReplace(get(t, "v0"), &netlink.Addr{IPNet: prefix(t, "fd00::3/64"), Flags: noprefixroute | 0x100}))
		}, []string{"address fd00::3/64 dev v0 changed: flags .*noprefixroute -> .*mngtmpaddr,noprefixroute"}},
		{"lifetime", func(t *testing.T) { vethUp(t); address("10.1.2.3/32", 0)(t) }, func(t *testing.T) {
			must(t, netlink.AddrReplace(get(t, "v0"), &netlink.Addr{IPNet: prefix(t, "10.1.2.3/32"), ValidLft: 600, PreferedLft: 300}))
		}, []string{"address 10.1.2.3/32 dev v0 changed: flags permanent -> none, lifetime forever -> limited"}},
	})
}

func TestDetectsRoutes(t *testing.T) {
	route := func(r netlink.Route) func(*testing.T) {
		return func(t *testing.T) {
			if r.Type == 0 {
				r.LinkIndex = get(t, "v0").Attrs().Index
			}
			must(t, netlink.RouteAdd(&r))
		}
	}
	to := func(text string) *net.IPNet { return prefix(t, text) }
	checkChanges(t, []change{
		{"IPv4", vethUp, route(netlink.Route{Dst: to("10.9.0.0/16"), Scope: netlink.SCOPE_LINK}),
			[]string{"route unicast 10.9.0.0/16 table main dev v0 proto 3 scope 253 appeared"}},
		{"IPv6", vethUp, route(netlink.Route{Dst: to("fd09::/48")}),
			[]string{"route unicast fd09::/48 table main metric 1024 dev v0 .* appeared"}},
		{"table", vethUp, route(netlink.Route{Dst: to("10.9.0.0/16"), Table: 1000, Scope: netlink.SCOPE_LINK}),
			[]string{"route unicast 10.9.0.0/16 table 1000 dev v0 .* appeared"}},
		{"local table", vethUp, route(netlink.Route{Dst: to("10.9.0.1/32"), Table: 255, Type: 2, Scope: netlink.SCOPE_HOST, LinkIndex: 1}),
			[]string{"route local 10.9.0.1/32 table local dev lo .* appeared"}},
		{"other family", vethUp, route(netlink.Route{Dst: to("10.9.0.0/16"), Via: &netlink.Via{AddrFamily: 10, Addr: net.ParseIP("fe80::9")}}),
			[]string{"route unicast 10.9.0.0/16 table main via 0a00fe80.* dev v0 .* appeared"}},
		{"blackhole", nil, route(netlink.Route{Dst: to("10.9.0.0/16"), Type: 6}), []string{"route blackhole 10.9.0.0/16 .* appeared"}},
		{"mtu", func(t *testing.T) {
			vethUp(t)
			route(netlink.Route{Dst: to("10.9.0.0/16"), Scope: netlink.SCOPE_LINK})(t)
		},
			func(t *testing.T) {
				must(t, netlink.RouteReplace(&netlink.Route{
					Dst: to("10.9.0.0/16"), Scope: netlink.SCOPE_LINK, MTU: 1300, LinkIndex: get(t, "v0").Attrs().Index,
				}))
			}, []string{"route unicast 10.9.0.0/16 table main dev v0 proto 3 scope 253 vanished",
				"route unicast 10.9.0.0/16 table main .*metrics .* appeared"}},
		{"two ways", vethUp, func(t *testing.T) {
			v0, v1 := get(t, "v0").Attrs().Index, get(t, "v1").Attrs().Index
			must(t, netlink.RouteAdd(&netlink.Route{Dst: to("10.9.0.0/16"),
				MultiPath: []*netlink.NexthopInfo{{LinkIndex: v0}, {LinkIndex: v1, Hops: 4}}}))
		}, []string{`route unicast 10.9.0.0/16 table main nexthops \[dev v0 weight 0 \] \[dev v1 weight 4 \] .* appeared`}},
	})
}

func TestDetectsRulesAndNeighbours(t *testing.T) {
	rule := func(family int, src string) func(*testing.T) {
		return func(t *testing.T) {
			r := netlink.NewRule()
			r.Family, r.Src, r.Table, r.Priority = family, prefix(t, src), 1000, 512
			must(t, netlink.RuleAdd(r))
		}
	}
	neighbour := func(addr string, state, flags int) func(*testing.T) {
		return func(t *testing.T) {
			n := &netlink.Neigh{LinkIndex: get(t, "v0").Attrs().Index, State: state, Flags: flags, IP: net.ParseIP(addr)}
			if flags == 0 {
				n.HardwareAddr = net.HardwareAddr{2, 0, 0, 0, 0, 5}
			}
			must(t, netlink.NeighAdd(n))
		}
	}
	checkChanges(t, []change{
		{"IPv4 rule", nil, rule(netlink.FAMILY_V4, "10.9.0.0/16"), []string{"rule 512: from 10.9.0.0/16 to 0.0.0.0/0 table 1000 .* appeared"}},
		{"IPv6 rule", nil, rule(netlink.FAMILY_V6, "fd09::/48"), []string{"rule 512: from fd09::/48 to ::/0 table 1000 .* appeared"}},
		{"permanent", vethUp, neighbour("10.9.0.1", netlink.NUD_PERMANENT, 0), []string{"neighbour 10.9.0.1 dev v0 state 128 flags 0 appeared"}},
		{"noarp", vethUp, neighbour("fd00::9", netlink.NUD_NOARP, 0), []string{"neighbour fd00::9 dev v0 state 64 flags 0 appeared"}},
		{"proxy", vethUp, neighbour("10.9.0.2", netlink.NUD_NONE, netlink.NTF_PROXY),
			[]string{"neighbour 10.9.0.2 dev v0 state 0 flags 8 appeared"}},
		{"lladdr", func(t *testing.T) { vethUp(t); neighbour("10.9.0.1", netlink.NUD_PERMANENT, 0)(t) }, func(t *testing.T) {
			must(t, netlink.NeighSet(&netlink.Neigh{LinkIndex: get(t, "v0").Attrs().Index, State: netlink.NUD_PERMANENT,
				IP: net.ParseIP("10.9.0.1"), HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 6}}))
		}, []string{"neighbour 10.9.0.1 dev v0 state 128 flags 0 changed: lladdr 02:00:00:00:00:05 -> 02:00:00:00:00:06"}},
	})
}

func TestDetectsSysctls(t *testing.T) {
	set := func(path, value string) func(*testing.T) {
		return func(t *testing.T) { must(t, os.WriteFile("/proc/sys/net/"+path, []byte(value), 0)) }
	}
	var changes []change
	for _, name := range strings.Fields(`ipv4/conf/v0/route_localnet ipv4/conf/v0/arp_notify ipv4/conf/v0/proxy_arp ipv4/conf/v0/forwarding
		ipv4/conf/v0/rp_filter ipv4/conf/all/rp_filter ipv6/conf/v0/disable_ipv6
		ipv6/conf/v0/keep_addr_on_down ipv6/conf/default/forwarding ipv4/ip_nonlocal_bind`) {
		dir, file := name[:strings.LastIndex(name, "/")], name[strings.LastIndex(name, "/")+1:]
		want := "sysctl net/" + dir + " changed: " + file + " 0 -> 1"
		if !strings.Contains(name, "conf") {
			want = "sysctl net/" + name + " changed: value 0 -> 1"
		}
		changes = append(changes, change{name, addVeth, set(name, "1"), []string{want}})
	}
	for _, name := range []string{"accept_ra", "accept_dad", "enhanced_dad"} {
		changes = append(changes, change{name, addVeth, set("ipv6/conf/v0/"+name, "0"),
			[]string{"sysctl net/ipv6/conf/v0 changed: " + name + " 1 -> 0"}})
	}
	changes = append(changes, change{"default", nil, set("ipv4/conf/default/rp_filter", "2"), []string{
		"sysctl net/ipv4/conf/default changed: rp_filter 0 -> 2", "sysctl net/ipv4/conf/lo changed: rp_filter 0 -> 2",
	}})
	changes = append(changes, change{"ip_forward", nil, set("ipv4/ip_forward", "1"), []string{
		"sysctl net/ipv4/conf/all changed: accept_redirects 1 -> 0, forwarding 0 -> 1",
		"sysctl net/ipv4/conf/default changed: forwarding 0 -> 1", "sysctl net/ipv4/conf/lo changed: forwarding 0 -> 1",
		"sysctl net/ipv4/ip_forward changed: value 0 -> 1",
	}})
	checkChanges(t, changes)
}

func addVeth(t *testing.T) {
	must(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "v0", TxQLen: 1000}, PeerName: "v1"}))
}

// vethUp adds a veth and sets both ends up. It does not wait until they are ready, because a snapshot must be the same before and after.
func vethUp(t *testing.T) { addVeth(t); up(t, "v0"); up(t, "v1") }

func bridge(t *testing.T) {
	addVeth(t)
	must(t, netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "br0", HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 1}}}))
}

func get(t *testing.T, name string) netlink.Link {
	t.Helper()
	l, err := netlink.LinkByName(name)
	must(t, err)
	return l
}

func up(t *testing.T, name string) { t.Helper(); must(t, netlink.LinkSetUp(get(t, name))) }

func prefix(t *testing.T, text string) *net.IPNet {
	t.Helper()
	n, err := netlink.ParseIPNet(text)
	must(t, err)
	return n
}
