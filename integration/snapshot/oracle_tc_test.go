// SPDX-License-Identifier: Apache-2.0

package snapshot_test

import (
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

func TestDetectsQdiscs(t *testing.T) {
	checkChanges(t, []change{
		{"tbf", vethUp, tbf(0, 1_000_000), []string{"class tbf auto:1 dev v0 parent auto:0 appeared",
			"qdisc tbf auto:0 dev v0 parent root appeared"}},
		{"tbf with a handle", vethUp, tbf(netlink.MakeHandle(1, 0), 1_000_000),
			[]string{"class tbf 1:1 dev v0 parent 1:0 appeared", "qdisc tbf 1:0 dev v0 parent root appeared"}},
		{"rate", func(t *testing.T) { vethUp(t); tbf(0, 1_000_000)(t) }, tbf(0, 2_000_000),
			[]string{"qdisc tbf auto:0 dev v0 parent root changed: options .*"}},
		{"tbf gone", func(t *testing.T) { vethUp(t); tbf(0, 1_000_000)(t) }, func(t *testing.T) {
			must(t, netlink.QdiscDel(&netlink.Tbf{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: index(t, "v0"), Parent: netlink.HANDLE_ROOT}}))
		}, []string{"class tbf .* vanished", "qdisc tbf .* vanished"}},
		{"ingress", vethUp, ingress, []string{"qdisc ingress ffff:0 dev v0 parent ingress appeared"}},
		{"clsact", vethUp, clsact, []string{"qdisc clsact ffff:0 dev v0 parent ingress appeared"}},
		{"on a link that is down", addVeth, tbf(0, 1_000_000), []string{"class tbf .* appeared", "qdisc tbf .* appeared"}},
	})
}

func TestDetectsFilters(t *testing.T) {
	checkChanges(t, []change{
		{"u32 and mirred on ingress", func(t *testing.T) { vethUp(t); ingress(t) }, mirrorTo(unix.ETH_P_ALL, netlink.MakeHandle(0xffff, 0), "v1"),
			[]string{"filter u32 dev v0 parent ffff:0 protocol 0003 pref 49152  appeared", "filter u32 .* appeared",
				"filter u32 dev v0 parent ffff:0 protocol 0003 pref 49152 .* actions mirred .* dev v1.* appeared"}},
		{"another target", func(t *testing.T) {
			vethUp(t)
			ingress(t)
			mirrorTo(unix.ETH_P_ALL, netlink.MakeHandle(0xffff, 0), "v1")(t)
		}, func(t *testing.T) {
			must(t, netlink.LinkAdd(&netlink.Ifb{LinkAttrs: netlink.LinkAttrs{Name: "ifb0"}}))
			filters, err := netlink.FilterList(get(t, "v0"), netlink.MakeHandle(0xffff, 0))
			must(t, err)
			for _, f := range filters {
				must(t, netlink.FilterDel(f))
			}
			mirrorTo(unix.ETH_P_ALL, netlink.MakeHandle(0xffff, 0), "ifb0")(t)
		}, []string{"filter u32 .* dev ifb0.* appeared", "filter u32 .* dev v1.* vanished", "link ifb0 appeared"}},
		{"clsact egress", func(t *testing.T) { vethUp(t); clsact(t) }, mirrorTo(unix.ETH_P_IP, netlink.HANDLE_MIN_EGRESS, "v1"),
			[]string{"filter u32 dev v0 parent ffff:fff3 protocol 0800 .* appeared", "filter u32 .* appeared", "filter u32 .* dev v1.* appeared"}},
		{"gone", func(t *testing.T) { vethUp(t); clsact(t); mirrorTo(unix.ETH_P_IP, netlink.HANDLE_MIN_INGRESS, "v1")(t) }, func(t *testing.T) {
			must(t, netlink.QdiscDel(&netlink.Clsact{QdiscAttrs: clsactAttrs(t)}))
		}, []string{"filter .* vanished", "filter .* vanished", "filter .* vanished", "qdisc clsact .* vanished"}},
	})
}

func tbf(handle uint32, rate uint64) func(*testing.T) {
	return func(t *testing.T) {
		must(t, netlink.QdiscReplace(&netlink.Tbf{
			QdiscAttrs: netlink.QdiscAttrs{LinkIndex: index(t, "v0"), Handle: handle, Parent: netlink.HANDLE_ROOT},
			Rate:       rate, Buffer: 65536, Limit: 1 << 20,
		}))
	}
}

func ingress(t *testing.T) {
	must(t, netlink.QdiscAdd(&netlink.Ingress{QdiscAttrs: netlink.QdiscAttrs{
		LinkIndex: index(t, "v0"), Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_INGRESS,
	}}))
}

func clsactAttrs(t *testing.T) netlink.QdiscAttrs {
	return netlink.QdiscAttrs{LinkIndex: index(t, "v0"), Handle: netlink.MakeHandle(0xffff, 0), Parent: netlink.HANDLE_CLSACT}
}

func clsact(t *testing.T) { must(t, netlink.QdiscAdd(&netlink.Clsact{QdiscAttrs: clsactAttrs(t)})) }

// mirrorTo redirects all packets of v0 to another link.
func mirrorTo(protocol uint16, parent uint32, to string) func(*testing.T) {
	return func(t *testing.T) {
		must(t, netlink.FilterAdd(&netlink.U32{
			FilterAttrs: netlink.FilterAttrs{LinkIndex: index(t, "v0"), Parent: parent, Protocol: protocol},
			Actions:     []netlink.Action{netlink.NewMirredAction(index(t, to))},
		}))
	}
}

func index(t *testing.T, name string) int { t.Helper(); return get(t, name).Attrs().Index }
