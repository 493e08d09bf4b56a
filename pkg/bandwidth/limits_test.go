// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"errors"
	"os"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

func (l lab) key(id string) attachment.Key {
	return attachment.Key{Network: "net", ContainerID: id, IfName: "eth0"}
}

// look returns the result of Look for the only attachment that has a record.
func (l lab) look() Limits {
	l.Helper()
	all, _, err := attachment.Scan()
	l.must(err)
	list, err := Look(l.Context(), l.host, Records(all), time.Millisecond)
	if err != nil || len(list) != 1 {
		l.Fatalf("%d attachments: %+v, %v", len(list), list, err)
	}
	return list[0]
}

func (l lab) set(ingress, egress *uint64) error {
	return Set(l.host, l.key("a"), ingress, egress)
}

func TestParseRate(t *testing.T) {
	for text, want := range map[string]uint64{"none": 0, "20M": 20e6, "1k": 1000, "100G": 1e11, "1.5Gi": 3 << 29, "64000": 64000, "1Ki": 1024,
		"2e6": 2e6, "5E3": 5000,
		"+1M": 1e6, ".5M": 5e5, "5.k": 5000, "1000000m": 1000, "1000.5": 1001, "999.9": 1000, "2e+3": 2000, "0.1T": 1e11} {
		if got, err := ParseRate(text); got != want || err != nil {
			t.Errorf("%s: %d, %v, want %d", text, got, err, want)
		}
	}
	for text, says := range map[string]string{"": "no rate", "20K": "no rate", "20Mbit": "no rate", "-20M": "no rate", " 20M": "no rate",
		"20 M": "no rate", "fast": "no rate",
		"None": "no rate", "1e": "no rate", "1e100": "no rate", "0x10": "no rate", "1_000": "no rate", strings.Repeat("9", 10000): "no rate",
		"0": "want 1k to 100G", "999": "want 1k to 100G", "998.9": "want 1k to 100G", "1k5": "no rate", "1.2.3": "no rate", ".": "no rate",
		"i": "no rate", "1ii": "no rate", "1e+-5": "no rate", "100000000001": "want 1k to 100G", "1T": "want 1k to 100G",
		"1e99": "want 1k to 100G", "1n": "want 1k"} {
		if got, err := ParseRate(text); err == nil || !strings.Contains(err.Error(), says) || len(err.Error()) > 150 {
			t.Errorf("%.40q: %d, %v", text, got, err)
		}
	}
}

// Look returns both the limits that the runtime requested, unclamped, and those in the kernel.
func TestLook(t *testing.T) {
	l := newLab(t)
	l.OK(l.Call("ADD", "a", "CNI_ARGS", "K8S_POD_NAMESPACE=shop;K8S_POD_NAME=web-0", "runtimeConfig",
		object{"bandwidth": object{"ingressRate": 500, "ingressBurst": 1<<32 - 1, "egressRate": 20e6}}))
	fair := hasFairQueue(l)
	got := l.look()
	want := Limits{Key: l.key("a"), Pod: "shop/web-0",
		Both: Both[*Direction]{
			Ingress: &Direction{Asked: Limit{Rate: 500, Burst: 1<<32 - 1}, Rate: got.Ingress.Rate,
				Applied: &kernel.Bucket{Rate: 1000, Burst: 4 * 1418, Limit: 16*1414 + 707}},
			Egress: &Direction{Asked: Limit{Rate: 20e6}, Rate: got.Egress.Rate, Applied: &kernel.Bucket{Rate: 20e6, Burst: 10_000, Limit: 25_000}}}}
	near := cmp.Comparer(func(a, b kernel.Bucket) bool {
		return a.Rate == b.Rate && a.Limit == b.Limit && nearBurst(a.Burst, b.Burst, b.Rate) && (a.Fair.Packets > 0 || b.Fair.Packets > 0) == fair
	})
	if diff := cmp.Diff(want, got, near); diff != "" || got.Missing() {
		t.Errorf("%+v\n%s", got, diff)
	}
	l.OK(l.Call("ADD", "a", "runtimeConfig", limits(0, 3e6)))
	if got := l.look(); got.Ingress != nil || got.Egress.Applied.Rate != 3e6 {
		t.Errorf("%+v", got)
	}
	l.OK(l.Call("DEL", "a"))
}

// quietLab returns a lab in which the kernel sends no frames of its own on the pod's link and through new ifb devices.
func quietLab(t *testing.T) lab {
	t.Helper()
	l := connected(t)
	before, err := os.ReadFile("/proc/sys/net/ipv6/conf/default/disable_ipv6")
	l.must(err)
	quiet := func(link string) error {
		return os.WriteFile("/proc/sys/net/ipv6/conf/"+link+"/disable_ipv6", []byte("1"), 0)
	}
	l.must(quiet("bwt0"), quiet("default"), l.Pod.Do(func() error {
		link, err := netlink.LinkByName("eth0")
		return errors.Join(quiet("eth0"), err, netlink.LinkSetUp(link))
	}))
	t.Cleanup(func() { l.must(os.WriteFile("/proc/sys/net/ipv6/conf/default/disable_ipv6", before, 0)) })
	l.must(l.host.AwaitCarrier(l.hostSide, time.Now().Add(time.Minute)))
	return l
}

// counters are the numbers that Look measures.
type counters struct {
	Rate                           uint64
	Dropped, DroppedTotal, Waiting uint32
}

func measured(d *Direction) counters {
	return counters{d.Rate, d.Dropped, d.Applied.Dropped, d.Applied.Waiting}
}

// TestMeasured checks the bytes sent and packets dropped in an interval, and the bytes in the queue at its end.
func TestMeasured(t *testing.T) {
	l := quietLab(t)
	l.OK(l.Call("ADD", "a", "runtimeConfig", limits(1000, 1000)))
	fair := hasFairQueue(l)
	for name, c := range map[string]struct {
		in   func(func() error) error
		link string
		of   func(Limits) *Direction
	}{
		"ingress": {func(f func() error) error { return f() }, "bwt0", func(l Limits) *Direction { return l.Ingress }},
		"egress":  {l.Pod.Do, "eth0", func(l Limits) *Direction { return l.Egress }},
	} {
		measure := func(frames int, want counters) {
			before, err := l.host.Buckets()
			l.must(err)
			l.must(c.in(func() error { return kerneltest.Flood(c.link, frames) }))
			var got counters
			for end := time.Now().Add(time.Minute); got != want && time.Now().Before(end); time.Sleep(time.Millisecond) {
				after, err := l.host.Buckets()
				l.must(err)
				now, ok, err := (bucketSamples{before: before, after: after, took: 2 * time.Second}).look(l.host, l.key("a"))
				if !ok || err != nil {
					t.Fatalf("%t, %v", ok, err)
				}
				got = measured(c.of(now))
			}
			if got != want {
				t.Errorf("%s: %d frames: %+v, want %+v", name, frames, got, want)
			}
		}
		measure(5, counters{Rate: 5 * 1134 * 8 / 2}) // the burst except for two bytes: the next token comes after about nine seconds
		if fair {
			measure(60, counters{Waiting: 60 * 1134})
			continue
		}
		measure(60, counters{Dropped: 40, DroppedTotal: 40, Waiting: 20 * 1134}) // 16 times 1,418 bytes
		measure(1, counters{Dropped: 1, DroppedTotal: 41, Waiting: 20 * 1134})
	}
	l.OK(l.Call("DEL", "a"))
}

// The counters of a token bucket that was recreated during the interval begin at zero.
func TestMeasuredAnew(t *testing.T) {
	var d Direction
	before := kernel.Bucket{Counters: kernel.Counters{Sent: 9000, Dropped: 9}}
	after := kernel.Bucket{Counters: kernel.Counters{Sent: 500, Dropped: 2}}
	s := bucketSamples{map[int]kernel.Bucket{7: before}, map[int]kernel.Bucket{7: after}, time.Now(), time.Second}
	of := observedLimit{link: kernel.Link{Index: 7}, bucket: after}
	if d.setObserved(s, of); measured(&d) != (counters{Rate: 4000, Dropped: 2, DroppedTotal: 2}) {
		t.Errorf("%+v", d)
	}
}

// The wait for a lock is part of the measured interval.
func TestMeasuredAfterWait(t *testing.T) {
	l := quietLab(t)
	l.OK(l.Call("ADD", "a"))
	l.must(kerneltest.Flood("bwt0", 3))
	s := bucketSamples{began: time.Now().Add(-2 * time.Second), took: time.Millisecond} // without traffic
	got, ok, err := s.look(l.host, l.key("a"))
	if !ok || err != nil || got.Missing() || got.Ingress.Rate == 0 || got.Ingress.Rate > 3*1134*8/2 {
		t.Errorf("%+v, %t, %v", got.Ingress, ok, err)
	}
	l.OK(l.Call("DEL", "a"))
}

// Look waits for a running ADD or DEL before it reports a kernel object as missing.
func TestLookWaits(t *testing.T) {
	l := newLab(t)
	for _, then := range []struct {
		verb string
		want int
	}{{"ADD", 1}, {"DEL", 0}} {
		l.OK(l.Call("ADD", "a"))
		all, _, err := attachment.Scan()
		l.must(err)
		working, err := attachment.Waiting.Key(l.key("a"))
		l.must(err, l.host.Unshape(l.hostSide))
		type answer struct {
			list []Limits
			err  error
		}
		answers := make(chan answer)
		go func() {
			host, err := kernel.Host()
			if err == nil {
				defer host.Close()
			}
			list, e := Look(l.Context(), host, Records(all), time.Millisecond)
			answers <- answer{list, errors.Join(err, e)}
		}()
		select {
		case got := <-answers:
			t.Errorf("%s: it did not wait: %+v", then.verb, got)
		case <-time.After(50 * time.Millisecond):
			if then.verb == "ADD" {
				l.must(l.host.Shape(l.hostSide, kernel.Bucket{Rate: 20e6, Burst: 10_000, Limit: 25_000}))
			} else {
				l.removeRecord(l.key("a"))
			}
			working.Close()
			if got := <-answers; got.err != nil || len(got.list) != then.want || slices.ContainsFunc(got.list, Limits.Missing) {
				t.Errorf("%s: %+v", then.verb, got)
			}
		}
	}
	l.OK(l.Call("DEL", "a"))
}

// Set changes the limits of a live pod in place, and CHECK and Restore use them until the next ADD.
func TestSet(t *testing.T) {
	l := newLab(t)
	l.OK(l.Call("ADD", "a", "latency", "50ms"))
	for _, c := range []struct {
		ingress, egress *uint64
		want            string
	}{
		{new(uint64(5e6)), nil, "5000000/10000000 redirected true"},
		{nil, new(uint64(6e6)), "5000000/6000000 redirected true"},
		{nil, new(uint64(0)), "5000000/0 redirected false"},
		{new(uint64(0)), nil, none},
		{nil, new(uint64(8e6)), "0/8000000 redirected true"},
		{new(uint64(30e6)), new(uint64(0)), "30000000/0 redirected false"},
	} {
		l.must(l.set(c.ingress, c.egress))
		if got := l.applied("a"); got != c.want {
			t.Errorf("%s, want %s", got, c.want)
		}
		l.OK(l.Call("CHECK", "a")) // the configuration still asks for 20 and 10 Mbit/s
	}
	got := l.look()
	if want := (Limit{Rate: 30e6, ByAdmin: true}); got.Ingress.Asked != want || got.Ingress.Applied.Burst < 14_900 ||
		got.Ingress.Applied.Limit != 187_500 { // 50 ms
		t.Errorf("%+v, %+v", got.Ingress.Asked, got.Ingress.Applied)
	}
	if got.Egress == nil || got.Egress.Asked != (Limit{ByAdmin: true}) || got.Egress.Applied != nil || got.Missing() {
		t.Errorf("%+v", got.Egress)
	}
	l.must(l.host.Unshape(l.hostSide))
	l.Fails(l.Call("CHECK", "a"), plugin.CodeStateDiffers, "the token bucket of bwt0 is missing")
	l.Fails(l.Call("CHECK", "a", "runtimeConfig", nil), plugin.CodeStateDiffers, "the token bucket of bwt0 is missing")
	l.must(Restore(l.host, discard()))
	if got := l.applied("a"); got != "30000000/0 redirected false" {
		t.Errorf("restored %s", got)
	}
	l.Fails(l.Call("CHECK", "a", "runtimeConfig", limits(-1, 0)), plugin.CodeConfig, "ingressRate -1")
	l.OK(l.Call("CHECK", "a", "runtimeConfig", nil))
	l.OK(l.Call("ADD", "a"))
	if got := l.applied("a"); got != "20000000/10000000 redirected true" || l.look().Ingress.Asked.ByAdmin {
		t.Errorf("ADD after it: %s", got)
	}
	l.Fails(l.Call("CHECK", "a", "runtimeConfig", limits(30e6, 0)), plugin.CodeStateDiffers, "the token bucket of bwt0 is")
	l.must(l.set(new(uint64(0)), new(uint64(0))))
	l.OK(l.Call("DEL", "a"))
}

// Set recreates neither bucket nor device, so their counters continue.
func TestSetInPlace(t *testing.T) {
	l := quietLab(t)
	l.OK(l.Call("ADD", "a"))
	l.must(kerneltest.Flood("bwt0", 3))
	ifb := l.link(l.ifb("a")).Index
	l.must(l.set(new(uint64(5e6)), new(uint64(6e6))))
	buckets, err := l.host.Buckets()
	l.must(err)
	if b := buckets[l.hostSide.Index]; b.Sent != 3*1134 || b.Rate != 5e6 || l.link(l.ifb("a")).Index != ifb || buckets[ifb].Rate != 6e6 {
		t.Errorf("%+v", buckets)
	}
	l.OK(l.Call("DEL", "a"))
}

// If the egress limit cannot be set, Set restores the ingress limit and the record.
func TestSetFails(t *testing.T) {
	l := newLab(t)
	l.OK(l.Call("ADD", "a", "runtimeConfig", limits(20e6, 0)))
	record := func() string {
		data, err := os.ReadFile("/run/podlace/net/bandwidth-" + l.key("a").Hash())
		l.must(err)
		return string(data)
	}
	before := record()
	l.must(l.host.AddBridge(l.ifb("a"), nil, 0, false, false)) // no ifb can take the name
	if err := l.set(new(uint64(5e6)), new(uint64(6e6))); err == nil || !strings.Contains(err.Error(), "is no ifb") {
		t.Errorf("got %v", err)
	}
	if got := l.applied("a"); got != "20000000/0 redirected false" {
		t.Errorf("left %s", got)
	}
	if now := record(); now != before {
		t.Errorf("record %s, was %s", now, before)
	}
	l.OK(l.Call("CHECK", "a", "runtimeConfig", limits(20e6, 0)))
	l.OK(l.Call("DEL", "a"))
	if _, ok, _ := l.host.Link(l.ifb("a")); ok {
		l.must(l.host.DelLink(l.ifb("a")))
	}
}

// A limit stays in the record until its removal succeeds, so DEL finds it even if the process is killed before.
func TestReplaceRecords(t *testing.T) {
	l := newLab(t)
	l.OK(l.Call("ADD", "a", "runtimeConfig", limits(20e6, 0)))
	att, rec, ok, err := attachment.Reopen[state](attachment.Waiting, l.key("a"), pluginName)
	if err != nil || !ok {
		t.Fatal(ok, err)
	}
	next, got := rec.State, state{}
	old := next
	old.IFB, old.Egress = "no link can have this name", next.Ingress
	if _, err := replaceLimits(l.host, att, l.hostSide, old, next); err == nil {
		t.Error("it is gone")
	}
	if _, err := att.Load(&got); err != nil || got.IFB != old.IFB || got.Egress == nil {
		t.Errorf("recorded: %+v, %v", got, err)
	}
	l.must(att.Save(next))
	att.Close()
	l.OK(l.Call("DEL", "a"))
}
