// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"maps"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/kerneltest"
)

// TestInUse checks which interfaces serve the node itself. A link-local address and the peer of a veth do not count.
func TestInUse(t *testing.T) {
	w := newWire(t)
	index := map[string]int{}
	add := func(name string, link netlink.Link) {
		link.Attrs().Name = name
		kerneltest.Must(t, w.pod.h.LinkAdd(link))
		kerneltest.Must(t, w.pod.h.LinkSetUp(link))
		index[name] = link.Attrs().Index
	}
	for _, name := range []string{"idle", "addressed", "routed", "hop", "port", "lower"} {
		add(name, &netlink.Veth{PeerName: "peer" + name})
	}
	add("br9", &netlink.Bridge{})
	add("upper", &netlink.Macvlan{LinkAttrs: netlink.LinkAttrs{ParentIndex: index["lower"]}})
	port, err := w.pod.h.LinkByName("port")
	kerneltest.Must(t, err, w.pod.h.LinkSetMasterByIndex(port, index["br9"]))
	kerneltest.Must(t, w.pod.AddAddress(Link{Index: index["addressed"], Name: "addressed"}, netip.MustParsePrefix("fd00::7/64"), false),
		w.pod.AddRoute(Link{Index: index["routed"], Name: "routed"}, Route{Dst: netip.MustParsePrefix("192.0.2.0/24")}))
	kerneltest.Must(t, w.pod.h.RouteAdd(&netlink.Route{Dst: IPNet(netip.MustParsePrefix("198.51.100.0/24")),
		MultiPath: []*netlink.NexthopInfo{{LinkIndex: index["hop"]}, {LinkIndex: index["routed"]}}}))
	got, err := w.pod.InUse()
	kerneltest.Must(t, err)
	maps.DeleteFunc(got, func(name, _ string) bool {
		return !slices.Contains(strings.Fields("idle addressed routed hop port lower"), name)
	})
	if diff := cmp.Diff(map[string]string{"idle": "", "addressed": "has the address fd00::7/64", "routed": "has a route", "hop": "has a route",
		"port": "is a port of br9", "lower": "is the lower interface of upper"}, got); diff != "" {
		t.Error(diff)
	}
}
