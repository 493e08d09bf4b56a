// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"errors"
	"os"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
)

// If another program removes any kernel object of the limits, Look reports it as missing, and Restore restores it without changing the
// others.
func TestMissingAndRestore(t *testing.T) {
	kerneltest.Slow(t)
	ifb := func(l lab) kernel.Link { return l.link(l.ifb("a")) }
	name := ifbName(attachment.Key{Network: "net", ContainerID: "a", IfName: "eth0"})
	bucket, device := "the token bucket of bwt0 is missing", "device "+name+" is missing or down"
	for what, c := range map[string]struct {
		lose            func(lab) error
		ingress, egress string // expected missing parts
	}{
		"ingress bucket": {func(l lab) error { return l.host.Unshape(l.hostSide) }, bucket, ""},
		"egress bucket":  {func(l lab) error { return l.host.Unshape(ifb(l)) }, "", "the token bucket of " + name + " is missing"},
		"device":         {func(l lab) error { return l.host.DelLink(name) }, "", device},
		"device is down": {func(l lab) error { return l.host.SetDown(ifb(l)) }, "", device},
		"redirect": {func(l lab) error { return l.host.DelRedirect(l.hostSide, kernel.Link{}, true) }, "",
			"the redirect from bwt0 to " + name + " is missing"},
		"all": {func(l lab) error {
			return errors.Join(l.host.Unshape(l.hostSide), l.host.DelRedirect(l.hostSide, kernel.Link{}, true), l.host.DelLink(name))
		}, bucket, device},
	} {
		t.Run(what, func(t *testing.T) {
			l := newLab(t)
			l.OK(l.Call("ADD", "a"))
			index := ifb(l).Index
			l.must(l.host.Shape(l.hostSide, kernel.Bucket{Rate: 7e6, Burst: 20_000, Limit: 30_000})) // another program may set this bucket
			l.must(c.lose(l))
			got := l.look()
			if got.Ingress.Missing != c.ingress || got.Egress.Missing != c.egress || !got.Missing() ||
				(got.Ingress.Applied == nil) != (c.ingress != "") || (got.Egress.Applied == nil) != (c.egress != "") {
				t.Errorf("%+v, %+v", got.Ingress, got.Egress)
			}
			want := "7000000/10000000 redirected true"
			if c.ingress != "" {
				want = "20000000/10000000 redirected true"
			}
			for range 2 {
				l.must(Restore(l.host, discard()))
				if got := l.applied("a"); got != want || l.look().Missing() || !ifb(l).Up {
					t.Errorf("restored %s, want %s", got, want)
				}
			}
			if ifb(l).Index != index && c.egress != device {
				t.Error("the device was recreated")
			}
			if c.ingress != "" {
				l.OK(l.Call("CHECK", "a"))
			}
			l.OK(l.Call("DEL", "a"))
		})
	}
}

// Restore changes neither the link of a dead pod nor another program's link with the recorded name.
func TestNotRestored(t *testing.T) {
	l := connected(t)
	l.OK(l.Call("ADD", "a"))
	l.must(l.host.DelLink("bwt0"))
	other := kerneltest.NewPod(t)
	netns, err := os.Open(other.Path)
	l.must(err)
	defer netns.Close()
	_, err = l.host.AddVeth(kernel.Veth{Host: "bwt0", Pod: "eth0", MTU: 1400, Netns: netns})
	l.must(err)
	if err := Restore(l.host, discard()); err == nil || !strings.Contains(err.Error(), "link bwt0 is missing or was recreated") {
		t.Errorf("got %v", err)
	}
	l.hostSide = l.link("bwt0")
	if got := l.applied("a"); got != "0/10000000 redirected false" {
		t.Errorf("another program's link has %s", got)
	}
	if got := l.look(); got.Ingress.Missing != "link bwt0 is missing" || got.Egress.Missing != "link bwt0 is missing" || got.Gone {
		t.Errorf("%+v, %+v", got.Ingress, got.Egress)
	}
	if err := l.set(new(uint64(5e6)), nil); err == nil || !strings.Contains(err.Error(), "link bwt0 is missing") {
		t.Errorf("set: %v", err)
	}
	l.must(l.Pod.Close(), l.host.DelLink(l.ifb("a")), Restore(l.host, discard()))
	if _, ok, _ := l.host.Link(l.ifb("a")); ok {
		t.Error("the limits of a dead pod were restored")
	}
	if got := l.look(); !got.Gone || got.Missing() || got.Ingress.Applied != nil {
		t.Errorf("%+v, %+v", got, got.Ingress)
	}
	if err := l.set(new(uint64(5e6)), nil); err == nil || !strings.Contains(err.Error(), "is gone") {
		t.Errorf("set: %v", err)
	}
	l.OK(l.Call("DEL", "a", "CNI_NETNS", ""))
	if err := l.set(new(uint64(5e6)), nil); err == nil || !strings.Contains(err.Error(), "the record is gone") {
		t.Errorf("set after DEL: %v", err)
	}
}

// A pod whose namespace path is gone counts as dead, even while an open file keeps the namespace alive.
func TestNotRestoredToTheDead(t *testing.T) {
	l := connected(t)
	l.OK(l.Call("ADD", "a"))
	held, err := os.Open(l.Pod.Path)
	l.must(err, l.Pod.Close(), l.host.Unshape(l.hostSide))
	defer held.Close()
	l.must(Restore(l.host, discard()))
	if got := l.applied("a"); got != "0/10000000 redirected true" {
		t.Errorf("got %s", got)
	}
	l.OK(l.Call("DEL", "a", "CNI_NETNS", ""))
}

// A renamed host side is found by its ifindex, and a changed MTU does not change the limit.
func TestRenamed(t *testing.T) {
	l := connectedAs(t, "bwt1")
	rename := func(to string) {
		link := &netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: l.hostSide.Index}}
		l.must(netlink.LinkSetDown(link), netlink.LinkSetName(link, to), netlink.LinkSetUp(link))
	}
	l.OK(l.Call("ADD", "a"))
	rename("bwt2")
	l.must(netlink.LinkSetMTU(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: l.hostSide.Index}}, 9000))
	l.OK(l.Call("CHECK", "a"))
	l.must(l.host.Unshape(l.link("bwt2")), Restore(l.host, discard()))
	if got := l.look(); got.Missing() {
		t.Errorf("%+v, %+v", got.Ingress, got.Egress)
	}
	l.OK(l.Call("CHECK", "a"))
	l.OK(l.Call("DEL", "a"))
	if s, ok, err := l.host.Shaped(l.link("bwt2")); ok || err != nil {
		t.Errorf("DEL left %+v, %v", s, err)
	}
	rename("bwt1")
}

// A damaged record with another program's link makes no CNI operation change that link.
func TestDamagedRecord(t *testing.T) {
	l := connected(t)
	bridge := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "bwbr0"}}
	l.must(netlink.LinkAdd(bridge))
	t.Cleanup(func() { l.must(l.host.DelLink("bwbr0")) })
	l.OK(l.Call("ADD", "a"))
	file := "/run/podlace/net/bandwidth-" + l.key("a").Hash()
	data, err := os.ReadFile(file)
	l.must(err, os.WriteFile(file, []byte(strings.ReplaceAll(string(data), l.ifb("a"), "bwbr0")), 0o600))
	if err := Restore(l.host, discard()); err == nil || !strings.Contains(err.Error(), "bwbr0 is no ifb") {
		t.Errorf("got %v", err)
	}
	l.OK(l.Call("DEL", "a"))
	if s, ok, err := l.host.Shaped(l.link("bwbr0")); ok || err != nil { // the link exists
		t.Errorf("%+v, %v", s, err)
	}
	l.must(l.host.DelLink(l.ifb("a")))
}
