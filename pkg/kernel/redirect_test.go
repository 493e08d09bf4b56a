// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
)

func redirectAsReference(t *testing.T, w wire, to Link) {
	t.Helper()
	qdisc := &netlink.Ingress{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: w.hostSide.Index, Handle: clsact, Parent: netlink.HANDLE_INGRESS}}
	if err := w.host.h.QdiscAdd(qdisc); err != nil && !errors.Is(err, unix.EEXIST) {
		t.Fatal(err)
	}
	kerneltest.Must(t, w.host.h.FilterAdd(&netlink.U32{
		FilterAttrs: netlink.FilterAttrs{LinkIndex: w.hostSide.Index, Parent: clsact, Priority: 1, Protocol: unix.ETH_P_ALL},
		ClassId:     netlink.MakeHandle(1, 1), RedirIndex: to.Index,
		Actions: []netlink.Action{&netlink.MirredAction{MirredAction: netlink.TCA_EGRESS_REDIR, Ifindex: to.Index}},
	}))
}

// TestDelRedirectOfReference: DelRedirect removes the reference plugin's filter, even without its ifb, but no other of the same priority.
func TestDelRedirectOfReference(t *testing.T) {
	for _, c := range []struct{ others, gone bool }{{false, false}, {false, true}, {true, false}, {true, true}} {
		w := newWire(t)
		ifb, kinds := newIFB(t, w), w.qdiscKinds(t)
		redirectAsReference(t, w, ifb)
		if c.others {
			filtersOfOthers(t, w)
		}
		if c.gone {
			kerneltest.Must(t, w.host.DelLink(ifb.Name))
			ifb = Link{}
		} else if have, err := w.host.Redirected(w.hostSide, ifb); have != RedirectsLong || err != nil {
			t.Errorf("%+v: the redirect is not seen: %d, %v", c, have, err)
		}
		kerneltest.Must(t, w.host.DelRedirect(w.hostSide, ifb, false))
		left := filterPriorities(t, w)
		if c.others != (len(left) == 3) || !c.others && (len(left) != 0 || w.qdiscKinds(t) != kinds) {
			t.Errorf("%+v: left filters %v, qdiscs %s", c, left, w.qdiscKinds(t))
		}
		kerneltest.Must(t, w.host.DelLink("ktifb0"), w.host.DelLink(w.hostSide.Name), w.host.DelLink(w.bridge.Name))
	}
}

// TestRedirectAfterReference: Redirect replaces a filter of the reference plugin whose ifb was deleted, because it drops all frames.
func TestRedirectAfterReference(t *testing.T) {
	w := newWire(t)
	ifb := newIFB(t, w)
	redirectAsReference(t, w, ifb)
	kerneltest.Must(t, w.host.DelLink(ifb.Name))
	ifb = newIFB(t, w)
	kerneltest.Must(t, w.host.Redirect(w.hostSide, ifb))
	if diff := cmp.Diff([]uint16{redirectPriority}, filterPriorities(t, w)); diff != "" {
		t.Errorf("filters:\n%s", diff)
	}
}

// TestRedirectedMirror: a filter with a mirror action is no redirect, so DelRedirect keeps it.
func TestRedirectedMirror(t *testing.T) {
	w := newWire(t)
	ifb := newIFB(t, w)
	kerneltest.Must(t, w.host.h.QdiscAdd(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: w.hostSide.Index, Handle: clsact,
		Parent: netlink.HANDLE_CLSACT}}),
		w.host.h.FilterAdd(&netlink.U32{
			FilterAttrs: netlink.FilterAttrs{LinkIndex: w.hostSide.Index, Parent: netlink.HANDLE_MIN_INGRESS, Priority: 5, Protocol: unix.ETH_P_ALL},
			ClassId:     netlink.MakeHandle(1, 7),
			Actions: []netlink.Action{&netlink.MirredAction{MirredAction: netlink.TCA_EGRESS_MIRROR, Ifindex: ifb.Index,
				ActionAttrs: netlink.ActionAttrs{Action: netlink.TC_ACT_PIPE}}},
		}))
	if have, err := w.host.Redirected(w.hostSide, ifb); have != RedirectsNone || err != nil {
		t.Errorf("redirected: %v", err)
	}
	kerneltest.Must(t, w.host.DelRedirect(w.hostSide, ifb, false))
	if got := filterPriorities(t, w); len(got) != 1 {
		t.Errorf("left %v", got)
	}
}

// TestRedirectedSome: Redirect replaces a filter that redirects only some packets.
func TestRedirectedSome(t *testing.T) {
	w := newWire(t)
	ifb := newIFB(t, w)
	some := func(protocol uint16, mask uint32) *netlink.U32 {
		return &netlink.U32{
			FilterAttrs: netlink.FilterAttrs{LinkIndex: w.hostSide.Index, Parent: netlink.HANDLE_MIN_INGRESS, Priority: redirectPriority,
				Protocol: protocol},
			ClassId: netlink.MakeHandle(1, 1), Actions: []netlink.Action{netlink.NewMirredAction(ifb.Index)},
			Sel: &netlink.TcU32Sel{Nkeys: 1, Flags: netlink.TC_U32_TERMINAL, Keys: []netlink.TcU32Key{{Mask: mask, Val: 1 & mask}}},
		}
	}
	kerneltest.Must(t, w.host.h.QdiscAdd(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: w.hostSide.Index, Handle: clsact,
		Parent: netlink.HANDLE_CLSACT}}))
	for _, f := range []*netlink.U32{some(unix.ETH_P_IP, 0), some(unix.ETH_P_ALL, 0xff)} {
		kerneltest.Must(t, w.host.h.FilterAdd(f))
		if have, err := w.host.Redirected(w.hostSide, ifb); have != RedirectsNone || err != nil {
			t.Errorf("protocol %d: redirected: %v", f.Protocol, err)
		}
		if from, ok, err := w.host.RedirectedFrom(ifb); !ok || from.Index != w.hostSide.Index || err != nil {
			t.Errorf("protocol %d: it is used: %+v, %v", f.Protocol, from, err)
		}
		kerneltest.Must(t, w.host.Redirect(w.hostSide, ifb))
		if have, err := w.host.Redirected(w.hostSide, ifb); have != RedirectsAll || err != nil || len(filterPriorities(t, w)) != 1 {
			t.Errorf("protocol %d: %d, %v, filters %v", f.Protocol, have, err, filterPriorities(t, w))
		}
		kerneltest.Must(t, w.host.DelRedirect(w.hostSide, ifb, false))
	}
}

// TestEnsureIFBJoins: EnsureIFB adds a stale ifb to the link's device group, so that DelGroup deletes it.
func TestEnsureIFBJoins(t *testing.T) {
	w := newWire(t)
	newIFB(t, w)
	kerneltest.Must(t, w.host.SetUpLeader(w.hostSide, "x"))
	w.hostSide = mustLink(t, w.host, w.hostSide.Name)
	newIFB(t, w)
	kerneltest.Must(t, w.host.DelGroup(w.hostSide))
	if _, ok, err := w.host.Link("ktifb0"); ok || err != nil {
		t.Errorf("the device is left: %v", err)
	}
}

// TestBucketsOfOthers: Buckets ignores a fair queue whose parent is not a token bucket, and a child of another kind.
func TestBucketsOfOthers(t *testing.T) {
	w := newWire(t)
	s := Bucket{Rate: 8e6, Burst: 20_000, Limit: 30_000}
	kerneltest.Must(t, w.host.Shape(w.hostSide, s))
	list, err := w.host.qdiscs()
	kerneltest.Must(t, err)
	queue := func(link int) qdisc {
		return qdisc{link: link, handle: childHandle, parent: childParent, kind: fairQueue, Counters: Counters{Dropped: 7},
			options: []byte{8, 0, 1, 0, 100, 0, 0, 0}}
	}
	// The kernel may list qdiscs in any order.
	got := bucketsIn(append([]qdisc{queue(w.hostSide.Index), queue(1 << 20)}, list...))
	if b := got[w.hostSide.Index]; len(got) != 1 || b.Rate != s.Rate || b.Dropped != 7 || b.Fair.Target == 0 {
		t.Errorf("%+v", got)
	}
	codel := queue(w.hostSide.Index) // the same attribute numbers as fq_codel
	codel.kind = "codel"
	if b := bucketsIn(append([]qdisc{codel}, list...))[w.hostSide.Index]; b.Rate != s.Rate || b.Dropped != 0 || b.Fair != (FairQueue{}) {
		t.Errorf("with codel: %+v", b)
	}
}

// TestNamesWhatIsMissing: missingFeature returns a *MissingFeature only for ENOENT, the kernel's error for an unknown kind of qdisc.
func TestNamesWhatIsMissing(t *testing.T) {
	w := newWire(t)
	err := qdisc{link: w.hostSide.Index, handle: rootHandle, parent: netlink.HANDLE_ROOT, kind: "podlace"}.replace(&w.host.NS)
	var missing *MissingFeature
	if err = missingFeature(err, "podlace (CONFIG_X)"); !errors.As(err, &missing) || missing.What != "podlace (CONFIG_X)" ||
		!errors.Is(err, unix.ENOENT) {
		t.Errorf("got %v", err)
	}
	if err := missingFeature(unix.EINVAL, "x"); err != unix.EINVAL {
		t.Errorf("got %v", err)
	}
}

// TestRedirectFails: if a link has a qdisc for received frames, but no filter, a redirect to a link that is gone is an error.
func TestRedirectFails(t *testing.T) {
	w := newWire(t)
	for range 2 {
		if err := w.host.Redirect(w.hostSide, Link{Index: 99999, Name: "gone"}); !errors.Is(err, unix.ENODEV) {
			t.Errorf("%v, want %v", err, unix.ENODEV)
		}
	}
}
