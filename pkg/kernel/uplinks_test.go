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

// TestInUse checks which interfaces may serve the node itself.
func TestInUse(t *testing.T) {
	w := newWire(t)
	index := map[string]int{}
	add := func(name string, link netlink.Link) {
		link.Attrs().Name = name
		kerneltest.Must(t, w.pod.h.LinkAdd(link))
		index[name] = link.Attrs().Index
	}
	for _, name := range []string{"idle", "addressed", "up", "port", "lower"} {
		add(name, &netlink.Veth{PeerName: "peer" + name})
	}
	add("br9", &netlink.Bridge{})
	add("upper", &netlink.Macvlan{LinkAttrs: netlink.LinkAttrs{ParentIndex: index["lower"]}})
	port, err := w.pod.h.LinkByName("port")
	kerneltest.Must(t, err, w.pod.h.LinkSetMasterByIndex(port, index["br9"]), w.pod.SetUp(Link{Index: index["up"], Name: "up"}),
		w.pod.AddAddress(Link{Index: index["addressed"], Name: "addressed"}, netip.MustParsePrefix("169.254.7.7/16"), false))
	got, err := w.pod.InUse()
	kerneltest.Must(t, err)
	maps.DeleteFunc(got, func(name, _ string) bool {
		return !slices.Contains(strings.Fields("idle addressed up port lower"), name)
	})
	if diff := cmp.Diff(map[string]string{"addressed": "has the address 169.254.7.7/16", "up": "is up",
		"port": "is a port of another interface", "lower": "is the lower interface of upper"}, got); diff != "" {
		t.Error(diff)
	}
}
