// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"math/big"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
)

// testedRates returns rates from 1 kbit/s to 100 Gbit/s, with those just below and above 2^32 bit/s and 2^32 byte/s.
func testedRates() []uint64 {
	return []uint64{1000, 1001, 8000, 64_000, 1_000_000, 15_600_000, 20_000_000, 1_000_000_000, 4_294_967_295, 4_294_967_296, 10_000_000_000,
		34_359_738_360, 34_359_738_368, 34_359_738_376, 100_000_000_000}
}

// TestShape: Shaped returns what Shape set, except that the kernel rounds the burst to ticks.
func TestShape(t *testing.T) {
	w := newWire(t)
	for _, rate := range testedRates() {
		for _, burst := range []uint32{12_144, 65_536, 1 << 20} {
			want := Bucket{Rate: rate, Burst: burst, Limit: 100_000}
			if seconds := float64(burst) * 8 / float64(rate); seconds > 270 {
				continue // exceeds the kernel's range
			}
			kerneltest.Must(t, w.host.Shape(w.hostSide, want))
			got, ok, err := w.host.Shaped(w.hostSide)
			if !ok || err != nil || got.Rate != rate/8*8 || got.Limit != want.Limit || !withinTicks(got.Burst, burst, rate) {
				t.Errorf("%+v: got %+v, %t, %v", want, got, ok, err)
			}
		}
	}
	for range 2 {
		kerneltest.Must(t, w.host.Unshape(w.hostSide))
	}
	if got, ok, err := w.host.Shaped(w.hostSide); ok || err != nil {
		t.Errorf("after Unshape: %+v, %v", got, err)
	}
}

// withinTicks reports whether two bursts differ by at most two ticks of 64 ns and one byte.
func withinTicks(got, want uint32, rate uint64) bool {
	difference := max(got, want) - min(got, want)
	return float64(difference) <= float64(rate)/8*128e-9+1
}

// TestTicks: burstTicks rounds by at most two ticks and does not overflow.
func TestTicks(t *testing.T) {
	ticksPerSecond := big.NewInt(int64(netlink.TickInUsec() * 1e6))
	for _, rate := range testedRates() {
		for _, burst := range []uint32{0, 1, 12_144, 1 << 20, 1 << 31, 1<<32 - 1} {
			got := burstTicks(burst, rate/8)
			want := new(big.Int).Mul(ticksPerSecond, big.NewInt(int64(burst)))
			want.Div(want, big.NewInt(int64(rate/8)))
			if want.Cmp(big.NewInt(1<<32-1)) > 0 {
				want.SetInt64(1<<32 - 1)
			}
			off := new(big.Int).Sub(want, new(big.Int).SetUint64(uint64(got)))
			if off.CmpAbs(big.NewInt(2)) > 0 {
				t.Errorf("rate %d burst %d: %d ticks, want %v", rate, burst, got, want)
			}
		}
	}
}

// TestShapeOther: Shaped returns no token bucket for another root qdisc, which Shape replaces.
func TestShapeOther(t *testing.T) {
	for _, major := range []uint16{7, 1} {
		w := newWire(t)
		other := &netlink.GenericQdisc{QdiscType: "pfifo",
			QdiscAttrs: netlink.QdiscAttrs{LinkIndex: w.hostSide.Index, Handle: netlink.MakeHandle(major, 0), Parent: netlink.HANDLE_ROOT}}
		kerneltest.Must(t, w.host.h.QdiscReplace(other))
		if got, ok, err := w.host.Shaped(w.hostSide); ok || err != nil {
			t.Errorf("got %+v, %v", got, err)
		}
		kerneltest.Must(t, w.host.Shape(w.hostSide, Bucket{Rate: 1e6, Burst: 20000, Limit: 20000}))
		if _, ok, err := w.host.Shaped(w.hostSide); !ok || err != nil {
			t.Errorf("it was not replaced: %v", err)
		}
		kerneltest.Must(t, w.host.Unshape(w.hostSide), w.host.DelLink(w.hostSide.Name), w.host.DelLink(w.bridge.Name))
	}
}

// TestBuckets: Buckets returns the token buckets of all links, and no other qdiscs.
func TestBuckets(t *testing.T) {
	w := newWire(t)
	ifb := newIFB(t, w)
	want := map[int]Bucket{
		w.hostSide.Index: {Rate: 8_000_000, Burst: 20_000, Limit: 30_000},
		ifb.Index:        {Rate: 16_000_000, Burst: 40_000, Limit: 50_000},
	}
	for _, link := range []Link{w.hostSide, ifb} {
		kerneltest.Must(t, w.host.Shape(link, want[link.Index]))
	}
	got, err := w.host.Buckets()
	for index, b := range got { // the node may have other buckets
		if b.Sent > 0 {
			b.Sent = 0
			got[index] = b
		}
	}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Errorf("%v\n%s", err, diff)
	}
	kerneltest.Must(t, w.host.Unshape(w.hostSide))
	if got, err := w.host.Buckets(); len(got) != 1 || got[ifb.Index].Rate == 0 || err != nil {
		t.Errorf("%+v, %v", got, err)
	}
}

// TestFairQueue: Shape sets and changes a fair queue, Shaped reads it, and Buckets its drops. HasFairQueue changes no qdisc.
func TestFairQueue(t *testing.T) {
	w := newWire(t)
	before, err := w.host.qdiscs()
	kerneltest.Must(t, err)
	has, err := w.host.HasFairQueue()
	kerneltest.Must(t, err)
	after, err := w.host.qdiscs()
	if diff := cmp.Diff(before, after, cmp.AllowUnexported(qdisc{}), cmpopts.IgnoreFields(qdisc{}, "Sent")); diff != "" || err != nil {
		t.Errorf("%v\n%s", err, diff)
	}
	s := Bucket{Rate: 8e6, Burst: 20_000, Limit: 30_000,
		Fair: FairQueue{Target: 7 * time.Millisecond, Interval: 120 * time.Millisecond, Packets: 64}}
	if !kerneltest.Feature(t, has, "fq_codel") {
		if err := w.host.Shape(w.hostSide, s); !errors.Is(err, unix.ENOENT) {
			t.Errorf("got %v", err)
		}
		kerneltest.Must(t, w.host.Unshape(w.hostSide))
		return
	}
	for _, s.Fair.Packets = range []uint32{64, 4} {
		kerneltest.Must(t, w.host.Shape(w.hostSide, s))
		got, ok, err := w.host.Shaped(w.hostSide)
		if off := s.Fair.Target - got.Fair.Target; !ok || err != nil || off.Abs() > 2*time.Microsecond || got.Fair.Packets != s.Fair.Packets {
			t.Errorf("got %+v, %t, %v", got, ok, err)
		}
	}
	kerneltest.Must(t, kerneltest.Flood(w.hostSide.Name, 100))
	all, err := w.host.Buckets()
	if b := all[w.hostSide.Index]; err != nil || b.Rate != s.Rate || b.Fair.Packets != 4 || b.Dropped == 0 {
		t.Errorf("%+v, %v", b, err)
	}
	s.Fair = FairQueue{}
	kerneltest.Must(t, w.host.Unshape(w.hostSide), w.host.Shape(w.hostSide, s))
	if got, ok, err := w.host.Shaped(w.hostSide); !ok || err != nil || got.Fair != s.Fair {
		t.Errorf("got %+v, %t, %v", got, ok, err)
	}
}

// TestRedirectedFrom: RedirectedFrom finds the only link that redirects to an ifb, by an ingress or a clsact qdisc.
func TestRedirectedFrom(t *testing.T) {
	for _, kind := range []string{"ingress", "clsact"} {
		w := newWire(t)
		ifb := newIFB(t, w)
		find := func() string {
			t.Helper()
			from, ok, err := w.host.RedirectedFrom(ifb)
			if err != nil || ok != (from.Index != 0) {
				t.Errorf("%+v, %t, %v", from, ok, err)
			}
			return from.Name
		}
		kerneltest.Must(t, w.host.Redirect(w.bridge, w.hostSide))
		if got := find(); got != "" {
			t.Errorf("no link is redirected to it: %s", got)
		}
		kerneltest.Must(t, w.host.h.QdiscAdd(&netlink.GenericQdisc{QdiscType: kind,
			QdiscAttrs: netlink.QdiscAttrs{LinkIndex: w.hostSide.Index, Handle: clsact, Parent: netlink.HANDLE_CLSACT}}))
		kerneltest.Must(t, w.host.Redirect(w.hostSide, ifb))
		if got := find(); got != w.hostSide.Name {
			t.Errorf("%s: got %q", kind, got)
		}
		kerneltest.Must(t, w.host.DelLink(ifb.Name), w.host.DelLink(w.hostSide.Name), w.host.DelLink(w.bridge.Name))
	}
}

func TestEnsureIFB(t *testing.T) {
	w := newWire(t)
	t.Cleanup(func() { kerneltest.Must(t, w.host.DelLink("ktifb0")) })
	var first Link
	for i := range 2 {
		link, err := w.host.EnsureIFB("ktifb0", Link{MTU: 1400})
		if now := mustLink(t, w.host, "ktifb0"); err != nil || link.Kind != "ifb" || !now.Up || now.MTU != 1400 || now.Index != link.Index {
			t.Errorf("got %+v, %+v, %v", link, now, err)
		}
		if i == 0 {
			first = link
			kerneltest.Must(t, w.host.SetDown(link)) // it comes up again
		} else if link.Index != first.Index {
			t.Error("it was recreated")
		}
	}
	if _, err := w.host.EnsureIFB("kt0", Link{MTU: 1400}); err == nil || !strings.Contains(err.Error(), "is no ifb") {
		t.Errorf("a bridge of that name: %v", err)
	}
}

func newIFB(t *testing.T, w wire) Link {
	t.Helper()
	t.Cleanup(func() { kerneltest.Must(t, w.host.DelLink("ktifb0")) })
	ifb, err := w.host.EnsureIFB("ktifb0", w.hostSide)
	if err != nil {
		t.Fatal(err)
	}
	return ifb
}

func (w wire) qdiscKinds(t *testing.T) string {
	t.Helper()
	list, err := w.host.qdiscs()
	if err != nil {
		t.Fatal(err)
	}
	var kinds []string
	for _, q := range list {
		if q.link == w.hostSide.Index {
			kinds = append(kinds, q.kind)
		}
	}
	return strings.Join(kinds, " ")
}

func TestRedirect(t *testing.T) {
	w := newWire(t)
	ifb := newIFB(t, w)
	before := w.qdiscKinds(t)
	mustRedirect := func(want Redirection) {
		t.Helper()
		if got, err := w.host.Redirected(w.hostSide, ifb); got != want || err != nil {
			t.Errorf("redirected: %d, want %d, %v", got, want, err)
		}
	}
	mustRedirect(RedirectsNone)
	kerneltest.Must(t, w.host.Redirect(w.hostSide, ifb))
	mustRedirect(RedirectsAll)
	if have, err := w.host.Redirected(w.hostSide, w.bridge); have != RedirectsNone || err != nil {
		t.Errorf("redirected to another device: %v", err)
	}
	for range 2 {
		kerneltest.Must(t, w.host.DelRedirect(w.hostSide, ifb, true))
		mustRedirect(RedirectsNone)
	}
	if got := w.qdiscKinds(t); got != before {
		t.Errorf("left the qdiscs %q, were %q", got, before)
	}
}

// filtersOfOthers adds three filters, as other programs would: one with a fixed priority, and two whose priority the kernel chooses.
func filtersOfOthers(t *testing.T, w wire) {
	t.Helper()
	for _, priority := range []uint16{1, 0, 0} {
		kerneltest.Must(t, w.host.h.FilterAdd(&netlink.U32{
			FilterAttrs: netlink.FilterAttrs{LinkIndex: w.hostSide.Index, Parent: netlink.HANDLE_MIN_INGRESS, Priority: priority,
				Protocol: unix.ETH_P_ALL},
			ClassId: netlink.MakeHandle(1, 7),
		}))
	}
}

func filterPriorities(t *testing.T, w wire) (list []uint16) {
	t.Helper()
	filters, err := w.host.h.FilterList(byIndex(w.hostSide.Index), netlink.HANDLE_MIN_INGRESS)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range filters {
		list = append(list, f.Attrs().Priority)
	}
	return list
}

// TestRedirectBesideOthers: Redirect uses an existing ingress or clsact qdisc, and DelRedirect keeps it with other programs' filters.
func TestRedirectBesideOthers(t *testing.T) {
	for _, kind := range []string{"clsact", "ingress"} {
		t.Run(kind, func(t *testing.T) {
			w := newWire(t)
			ifb := newIFB(t, w)
			theirs := &netlink.GenericQdisc{QdiscType: kind,
				QdiscAttrs: netlink.QdiscAttrs{LinkIndex: w.hostSide.Index, Handle: clsact, Parent: netlink.HANDLE_CLSACT}}
			kerneltest.Must(t, w.host.h.QdiscAdd(theirs))
			filtersOfOthers(t, w)
			before := filterPriorities(t, w)
			kerneltest.Must(t, w.host.Redirect(w.hostSide, ifb))
			if got := filterPriorities(t, w); got[len(got)-1] != redirectPriority {
				t.Errorf("the redirect is not the last: %v", got)
			}
			if have, err := w.host.Redirected(w.hostSide, ifb); have != RedirectsAll || err != nil {
				t.Errorf("not redirected: %d, %v", have, err)
			}
			kerneltest.Must(t, w.host.DelRedirect(w.hostSide, ifb, true))
			if diff := cmp.Diff(before, filterPriorities(t, w)); diff != "" || len(before) == 0 {
				t.Errorf("filters of other programs:\n%s", diff)
			}
			if !strings.Contains(w.qdiscKinds(t), kind) {
				t.Errorf("left %q", w.qdiscKinds(t))
			}
		})
	}
}

// TestDelRedirectKeepsEmptyClsact: DelRedirect keeps another program's clsact qdisc without filters, because some may follow.
func TestDelRedirectKeepsEmptyClsact(t *testing.T) {
	w := newWire(t)
	ifb := newIFB(t, w)
	kerneltest.Must(t, w.host.h.QdiscAdd(&netlink.GenericQdisc{QdiscType: "clsact",
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: w.hostSide.Index, Handle: clsact, Parent: netlink.HANDLE_CLSACT}}))
	kerneltest.Must(t, w.host.Redirect(w.hostSide, ifb), w.host.DelRedirect(w.hostSide, ifb, false))
	if !strings.Contains(w.qdiscKinds(t), "clsact") {
		t.Errorf("left %q", w.qdiscKinds(t))
	}
}

// TestRedirectTwice: a link has only one redirect filter after two calls of Redirect.
func TestRedirectTwice(t *testing.T) {
	w := newWire(t)
	ifb := newIFB(t, w)
	kerneltest.Must(t, w.host.Redirect(w.hostSide, ifb))
	once := filterPriorities(t, w)
	kerneltest.Must(t, w.host.Redirect(w.hostSide, ifb))
	if got := filterPriorities(t, w); len(got) != len(once) {
		t.Errorf("filters %v, were %v", got, once)
	}
	kerneltest.Must(t, w.host.DelRedirect(w.hostSide, ifb, true))
}

func TestShapeGone(t *testing.T) {
	h := host(t)
	gone := Link{Index: 1 << 20, Name: "gone"}
	kerneltest.Must(t, h.Unshape(gone), h.DelRedirect(gone, gone, true))
	if err := h.Shape(gone, Bucket{Rate: 1e6, Burst: 20000, Limit: 20000}); !errors.Is(err, unix.ENODEV) {
		t.Errorf("got %v", err)
	}
	if err := h.Redirect(gone, gone); !errors.Is(err, unix.ENODEV) {
		t.Errorf("got %v", err)
	}
}
