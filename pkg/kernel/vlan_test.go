// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
)

func TestVLANsText(t *testing.T) {
	for want, v := range map[string]VLANs{
		"none":                              nil,
		"100 pvid untagged":                 {{100, true, true}},
		"1 untagged, 5 pvid untagged, 7, 9": {{1, false, true}, {5, true, true}, {7, false, false}, {9, false, false}},
		"1-3, 4 pvid, 5-6, 7-8 untagged":    {{ID: 1}, {ID: 2}, {ID: 3}, {4, true, false}, {ID: 5}, {ID: 6}, {7, false, true}, {8, false, true}},
		"4093 untagged, 4094 pvid untagged": {{4093, false, true}, {4094, true, true}},
		"10 pvid untagged, 11 untagged":     {{10, true, true}, {11, false, true}},
		"2 pvid, 3":                         {{2, true, false}, {3, false, false}},
	} {
		if got := v.String(); got != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}

// hasFiltering returns the result of HasVLANFiltering, which must be true with KERNELTEST=full.
func hasFiltering(t *testing.T, h *Node) bool {
	t.Helper()
	has, err := h.HasVLANFiltering()
	if err != nil {
		t.Fatal(err)
	}
	return kerneltest.Feature(t, has, "bridge VLAN filtering")
}

func TestHasVLANFiltering(t *testing.T) {
	kerneltest.Clean(t)
	h := host(t)
	has := hasFiltering(t, h)
	err := h.AddBridge("kt0", nil, 0, false, true)
	t.Cleanup(func() { kerneltest.Must(t, h.DelLink("kt0")) })
	if link, _, _ := h.Link("kt0"); has != (err == nil && link.FiltersVLANs && link.DefaultVLAN == 1) {
		t.Errorf("the probe says %t; making a bridge: %v, %+v", has, err, link)
	}
	kerneltest.Must(t, h.DelLink("kt0"), h.AddBridge("kt0", nil, 0, false, false))
	err = h.SetVLANFiltering(mustLink(t, h, "kt0"))
	if link := mustLink(t, h, "kt0"); has != (err == nil && link.FiltersVLANs) {
		t.Errorf("the probe says %t; setting it: %v, %+v", has, err, link)
	}
	if !has && !errors.Is(err, unix.EOPNOTSUPP) {
		t.Errorf("%v, want %v", err, unix.EOPNOTSUPP)
	}
}

func TestChangeVLANs(t *testing.T) {
	w := newWire(t)
	if !hasFiltering(t, w.host) {
		if err := w.host.ChangeVLANs(w.hostSide, nil, VLANs{{ID: 5}}); err == nil {
			t.Error("VLANs can be set without the feature")
		}
		if _, err := w.host.PortVLANs(w.hostSide); !errors.Is(err, unix.EOPNOTSUPP) {
			t.Errorf("%v, want %v", err, unix.EOPNOTSUPP)
		}
		return
	}
	all := make(VLANs, 4094)
	for i := range all {
		all[i].ID = uint16(i + 1)
	}
	odd := slices.DeleteFunc(slices.Clone(all), func(v VLAN) bool { return v.ID%2 == 0 })
	has := VLANs{{1, true, true}}
	for _, want := range []VLANs{has, {{100, true, true}},
		{{1, false, true}, {5, true, true}, {7, false, false}, {8, false, false}, {9, false, false}},
		{{5, false, false}, {8, true, false}}, all, odd, {{1, true, true}}, nil} {
		kerneltest.Must(t, w.host.ChangeVLANs(w.hostSide, has, want))
		got, err := w.host.PortVLANs(w.hostSide)
		if err != nil || !slices.Equal(got, want) {
			t.Errorf("%s, %v, want %s", got, err, want)
		}
		if shown := shownVLANs(t, "kth0"); shown != want.String() {
			t.Errorf("the oracle shows %s, want %s", shown, want)
		}
		has = want
	}
	if got, err := w.host.PortVLANs(w.bridge); err != nil || got.String() != "1 pvid untagged" {
		t.Errorf("the bridge itself: %s, %v", got, err)
	}
}

// shownVLANs returns the VLANs of a port in a snapshot of the host.
func shownVLANs(t *testing.T, port string) string {
	t.Helper()
	var v VLANs
	for _, line := range records(t, "host: vlan ", " dev "+port+" ") {
		var id uint16
		var flags int
		if _, err := fmt.Sscanf(strings.ReplaceAll(line, port, "x"), "vlan %d dev x flags %d", &id, &flags); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		v = append(v, VLAN{id, flags&2 != 0, flags&4 != 0})
	}
	slices.SortFunc(v, func(a, b VLAN) int { return int(a.ID) - int(b.ID) })
	return v.String()
}

// TestVethOnNode: AddVeth creates both ends on the node if Netns is nil.
func TestVethOnNode(t *testing.T) {
	kerneltest.Clean(t)
	h := host(t)
	bridge := addBridge(t, h, "kt0")
	index, err := h.AddVeth(Veth{Host: "kth1", Pod: "kt0.7"})
	kerneltest.Must(t, err)
	t.Cleanup(func() { kerneltest.Must(t, h.DelLink("kt0.7")) })
	port := mustLink(t, h, "kth1")
	if end := mustLink(t, h, "kt0.7"); port.Index != index || port.Peer != end.Index || end.Peer != index || port.Master != 0 {
		t.Errorf("%+v, %+v", port, end)
	}
	kerneltest.Must(t, h.SetMaster(port, bridge))
	if port = mustLink(t, h, "kth1"); port.Master != bridge.Index {
		t.Errorf("%+v is no port of %d", port, bridge.Index)
	}
}
