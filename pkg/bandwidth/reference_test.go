// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"encoding/json"
	"errors"
	"os"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// removeRecord removes the record of an attachment.
func (l lab) removeRecord(key attachment.Key) {
	l.Helper()
	l.must(os.Remove("/run/podlace/" + key.Network + "/bandwidth-" + key.Hash()))
}

// DEL without a record removes the limits that ADD set. While the pod and its link exist, it finds them by the names of their devices.
func TestLostRecord(t *testing.T) {
	kerneltest.Slow(t)
	for name, c := range map[string]struct {
		config object
		keys   []any // configuration of DEL
		left   string
	}{
		"both":                         {limits(20e6, 10e6), nil, none},
		"ingress":                      {limits(20e6, 0), nil, none},
		"egress":                       {limits(0, 10e6), nil, none},
		"egress, without a prevResult": {limits(0, 10e6), []any{"prevResult", nil}, none},
		"egress, by the prevResult":    {limits(0, 10e6), []any{"runtimeConfig", nil}, none},
		"egress, without either":       {limits(0, 10e6), []any{"runtimeConfig", nil, "prevResult", nil}, none},
		"a wrong configuration":        {limits(20e6, 10e6), []any{"runtimeConfig", limits(-1, 0)}, none},
		"egress, without a namespace":  {limits(0, 10e6), []any{"CNI_NETNS", ""}, none},
		// the limits are deleted when the main plugin deletes the link
		"both, without a namespace":      {limits(20e6, 10e6), []any{"CNI_NETNS", ""}, "20000000/0 redirected false"},
		"a record of an unknown version": {limits(20e6, 10e6), []any{"CNI_ARGS", "IgnoreUnknown=1"}, none},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLab(t)
			var result json.RawMessage = l.OK(l.Call("ADD", "a", "runtimeConfig", c.config)).Stdout
			l.removeRecord(l.key("a"))
			if name == "a record of an unknown version" {
				l.must(os.WriteFile("/run/podlace/net/bandwidth-"+l.key("a").Hash(), []byte(`{"format":2}`), 0o600))
			}
			for range 2 {
				l.OK(l.Call("DEL", "a", append([]any{"runtimeConfig", c.config, "prevResult", result}, c.keys...)...))
				if got := l.applied("a"); got != c.left {
					t.Errorf("left %s, want %s", got, c.left)
				}
			}
			l.must(l.host.Unshape(l.hostSide))
		})
	}
}

// ADD adopts or replaces a stale ifb device, token bucket or redirect of any program. CHECK detects them, and DEL leaves none (F-19).
func TestLeftOver(t *testing.T) {
	kerneltest.Slow(t)
	for name, leave := range map[string]func(l lab, ifb kernel.Link) error{
		"everything":  func(lab, kernel.Link) error { return nil },
		"no redirect": func(l lab, _ kernel.Link) error { return l.host.DelRedirect(l.hostSide, kernel.Link{}, true) },
		"no bucket": func(l lab, ifb kernel.Link) error {
			return errors.Join(l.host.Unshape(ifb), l.host.Unshape(l.hostSide))
		},
		"device down": func(l lab, ifb kernel.Link) error { return l.host.SetDown(ifb) },
		"device alone": func(l lab, _ kernel.Link) error {
			return errors.Join(l.host.DelRedirect(l.hostSide, kernel.Link{}, true), l.host.Unshape(l.hostSide))
		},
		"redirect only": func(l lab, ifb kernel.Link) error { return l.host.DelLink(ifb.Name) },
	} {
		for _, recorded := range []bool{true, false} {
			l := connected(t)
			l.OK(l.Call("ADD", "a", "runtimeConfig", limits(7e6, 7e6)))
			l.must(leave(l, l.link(l.ifb("a"))))
			if name != "everything" {
				l.Fails(l.Call("CHECK", "a", "runtimeConfig", limits(7e6, 7e6)), plugin.CodeStateDiffers, "")
			}
			if !recorded {
				l.removeRecord(l.key("a"))
			}
			l.OK(l.Call("ADD", "a"))
			l.OK(l.Call("CHECK", "a"))
			if got := l.applied("a"); got != "20000000/10000000 redirected true" {
				t.Errorf("%s, recorded %t: %s", name, recorded, got)
			}
			l.OK(l.Call("DEL", "a"))
			if got := l.applied("a"); got != none {
				t.Errorf("%s, recorded %t: left %s", name, recorded, got)
			}
			l.must(l.host.DelLink("bwt0"))
		}
	}
}

// Without a record and a namespace, DEL computes the link's name from the key. It removes the token bucket only if the link leads a device
// group, which proves that Podlace's bridge created it.
func TestLostRecordOurBridge(t *testing.T) {
	for _, ours := range []bool{true, false} {
		l := connected(t)
		l.must(l.host.SetDown(l.hostSide), netlink.LinkSetName(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: l.hostSide.Index}},
			l.key("a").HostVeth()))
		if ours {
			l.must(l.host.SetUpLeader(l.hostSide, "shop/a"))
		}
		link := l.link(l.key("a").HostVeth())
		l.OK(l.Call("ADD", "a", "runtimeConfig", limits(20e6, 0)))
		l.removeRecord(l.key("a"))
		l.OK(l.Call("DEL", "a", "runtimeConfig", limits(20e6, 0), "CNI_NETNS", ""))
		if s, ok, err := l.host.Shaped(link); ok == ours || err != nil {
			t.Errorf("ours %t: %+v %t, %v", ours, s, ok, err)
		}
		l.must(l.host.DelLink(link.Name))
	}
}

// DEL removes a limit that an admin set, although the record is lost and prevResult does not contain it.
func TestLostRecordSet(t *testing.T) {
	l := newLab(t)
	l.OK(l.Call("ADD", "a", "runtimeConfig", limits(20e6, 0)))
	l.must(l.set(nil, new(uint64(5e6))))
	l.removeRecord(l.key("a"))
	l.OK(l.Call("DEL", "a", "runtimeConfig", limits(20e6, 0)))
	if got := l.applied("a"); got != none {
		t.Errorf("left %s", got)
	}
}

func (l lab) rename(to string) error {
	return l.Pod.Do(func() error {
		return netlink.LinkSetName(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: l.hostSide.Peer}}, to)
	})
}

// DEL without a record works after the pod renamed its interface.
func TestLostRecordRenamed(t *testing.T) {
	l := newLab(t)
	l.OK(l.Call("ADD", "a", "runtimeConfig", limits(0, 10e6)))
	l.removeRecord(l.key("a"))
	rename := func(from, to string) error {
		return l.Pod.Do(func() error {
			return netlink.LinkSetName(&netlink.GenericLink{LinkAttrs: netlink.LinkAttrs{Index: l.hostSide.Peer}}, to)
		})
	}
	l.must(rename("eth0", "lan0"))
	l.OK(l.Call("DEL", "a"))
	if got := l.applied("a"); got != none {
		t.Errorf("left %s", got)
	}
	l.must(l.rename("eth0"))
}

// DEL keeps another attachment's ifb device of the same name. Names are equal if network name and container ID concatenate to the same
// text, and the reference plugin uses one for all interfaces of a container.
func TestLostRecordSpares(t *testing.T) {
	l := newLab(t)
	l.OK(l.Call("ADD", "a"))
	mustStay := func(what string) {
		t.Helper()
		if got := l.applied("a"); got != "20000000/10000000 redirected true" {
			t.Errorf("%s: left %s", what, got)
		}
	}
	other := l // its device has the same name
	other.Conf = l.Conf.With("name", "ne")
	other.OK(other.Call("DEL", "ta", "CNI_NETNS", "", "prevResult", nil))
	mustStay("another's record names the device")

	l.removeRecord(l.key("a"))
	l.OK(l.Call("DEL", "a", "CNI_IFNAME", "net1", "prevResult", nil))
	mustStay("eth0 of the same container")
	second := connectedAs(t, "bwt1")
	second.Conf = other.Conf
	second.OK(second.Call("DEL", "ta", "prevResult", nil))
	mustStay("another pod's link is redirected")
	l.OK(l.Call("DEL", "a"))
	if got := l.applied("a"); got != none {
		t.Errorf("left %s", got)
	}
}

// The reference plugin gives the ifb devices of all interfaces of a container the same name, here for another than eth0. DEL deletes it,
// with or without a redirect, but only if it is an ifb device.
func TestReferenceDevice(t *testing.T) {
	l := newLab(t)
	l.must(l.rename("net1"))
	for _, redirected := range []bool{true, false} {
		ifb, err := l.host.EnsureIFB(l.ifb("a"), kernel.Link{MTU: 1400})
		l.must(err)
		if redirected {
			l.must(l.host.Redirect(l.hostSide, ifb))
		}
		l.OK(l.Call("DEL", "a", "CNI_IFNAME", "net1", "prevResult", nil))
		if _, ok, _ := l.host.Link(l.ifb("a")); ok {
			t.Errorf("the reference's device is left, redirected: %t", redirected)
			l.must(l.host.DelRedirect(l.hostSide, kernel.Link{}, true), l.host.DelLink(ifb.Name))
		}
	}
	l.must(l.rename("eth0"))
	l.must(l.host.AddBridge(l.ifb("a"), nil, 0, false, false))
	l.OK(l.Call("DEL", "a", "prevResult", nil))
	l.must(l.host.DelLink(l.link(l.ifb("a")).Name))
	l.Fails(l.Call("CHECK", "a"), plugin.CodeStateDiffers, "missing")
}
