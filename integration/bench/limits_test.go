// SPDX-License-Identifier: Apache-2.0

package main

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/integration/meter"
)

func TestLimitRows(t *testing.T) {
	in, out := flowLane{intoPod, sideOurs}, flowLane{outOfPod, sideOurs}
	r := &report{}
	r.addLimit("holds", permittedShare{95, 101}, figuresByLane{in: 95, out: 101, flowLane{intoPod, sideReference}: 400})
	r.addLimit("too slow into", permittedShare{95, 101}, figuresByLane{in: 94.9, out: 100})
	r.addLimit("too fast out of", permittedShare{0, 111}, figuresByLane{in: 3, out: 111.1})
	r.addLimit("one way", permittedShare{0, 111}, figuresByLane{in: 3})
	var got []target
	for _, row := range r.Limits {
		got = append(got, row.target)
	}
	want := []target{{Bar: "95-101", Verdict: met}, {Bar: "95-101", Verdict: missed}, {Bar: "<= 111", Verdict: missed}, {}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(map[string]map[string]float64{intoPod: {sideOurs: 95, sideReference: 400}, outOfPod: {sideOurs: 101}},
		r.Limits[0].Percent); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// The flow has a burst in the first interval, a pause until 1.2 s, and then 80 % of the rate.
func TestPassed(t *testing.T) {
	const rate = 8e6 // 100 kB in an interval
	var came meter.Arrivals
	for i := 1; i <= 22; i++ {
		next := meter.Arrival{At: time.Duration(i) * meter.Interval, Wire: 500e3}
		if i > 12 {
			next.Wire += float64(i-12) * 80e3
		}
		came = append(came, next)
	}
	l := &limitedFlow{rate: rate, costs: true, first: true}
	way := flowLane{intoPod, sideOurs}
	l.addArrivals(way, came, 2200*time.Millisecond, 16*time.Millisecond)
	l.addArrivals(way, meter.Arrivals{{At: meter.Interval, Wire: 100e3}}, 2200*time.Millisecond, time.Hour) // nothing arrived later
	l.addArrivals(flowLane{outOfPod, sideOurs}, came, 2200*time.Millisecond, 0)                             // unknown cost
	near := cmp.Comparer(func(a, b float64) bool { return a-b < 1e-6 && b-a < 1e-6 })
	want := passedShares{first: []float64{50, 100}, peak: []float64{500, 100}, steady: []float64{80, 0}, cost: []float64{2500}}
	if diff := cmp.Diff(want, *l.seen[way], cmp.AllowUnexported(passedShares{}), near); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	r := &report{}
	r.addBeginning(l)
	r.addCosts(l)
	if len(r.Limits) != 2 || r.Limits[0].Percent[intoPod][sideOurs] != 75 || r.Limits[1].Percent[intoPod][sideOurs] != 300 {
		t.Errorf("got %+v, want medians of 75 and 300", r.Limits)
	}
	if len(r.Loads) != 2 || r.Loads[0].Sides[sideOurs].Value != 2500 || len(r.Loads[1].Sides) != 0 {
		t.Errorf("got %+v, want 2500 ms into the pod, and nothing out of it", r.Loads)
	}
	l = &limitedFlow{rate: rate}
	r.addBeginning(l)
	r.addCosts(l)
	if len(r.Limits) != 2 || len(r.Loads) != 2 {
		t.Error("unwanted rows")
	}
}

func TestBriefRun(t *testing.T) {
	full, brief := options{rounds: 30}, options{rounds: 5}
	if full.repeats() != 3 || brief.repeats() != 1 || (options{rounds: 1000}).repeats() != 3 {
		t.Errorf("%d and %d repeats, want 3 and 1", full.repeats(), brief.repeats())
	}
	got := map[string][2]time.Duration{}
	for _, l := range limits() {
		got[l.what()] = [2]time.Duration{l.steadyTime(full), l.steadyTime(brief)}
	}
	const s, part = time.Second, 300 * time.Millisecond
	want := map[string][2]time.Duration{
		"1 Mbit/s, TCP": {2 * s, s}, "1 Mbit/s, TCP, 8 flows": {2 * s, s},
		"10 Mbit/s, TCP": {s, part}, "10 Mbit/s, TCP, 8 flows": {s, part}, "10 Mbit/s, UDP": {s, part},
		"100 Mbit/s, TCP": {s, part}, "100 Mbit/s, TCP, 8 flows": {s, part},
		"1000 Mbit/s, TCP": {2 * s, s}, "1000 Mbit/s, TCP, 8 flows": {s, part},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("measured, in a full and in a brief run (-want +got):\n%s", diff)
	}
}

func TestRoundTripFigure(t *testing.T) {
	if got := roundTrip(48.5, 5); got != (figure{Value: 48.5}) {
		t.Errorf("some lost: %+v", got)
	}
	if got := roundTrip(999.6, 62.4); got != (figure{Value: 999.6, Note: "at least 1000, 62 % lost"}) {
		t.Errorf("many lost: %+v", got)
	}
}

func TestAlone(t *testing.T) {
	entries := map[string]*contenderEntry{}
	for i, name := range []string{entryName(sideOurs, besideNone), entryName(sideOurs, besideMany), entryName(sideReference, besideNone),
		entryName(sideReference, besideMany)} {
		e := newEntry(name, nil)
		for _, verb := range []string{verbAdd, verbDel} {
			ms := time.Duration(i+1) * time.Millisecond
			e.samples[verb].processes = map[string][]time.Duration{"bridge": {time.Hour}, "bandwidth": {ms, ms, time.Hour}}
		}
		entries[name] = e
	}
	r := &report{}
	r.addAlone(entries)
	if diff := cmp.Diff(map[string]figure{sideOurs: {Value: 2}, sideReference: {Value: 6}}, r.Loads[0].Sides); diff != "" {
		t.Errorf("both verbs (-want +got):\n%s", diff)
	}
	for _, row := range r.Growth {
		if diff := cmp.Diff(map[string]figure{sideOurs: {Base: 1, Value: 2}, sideReference: {Base: 3, Value: 4}}, row.Sides); diff != "" {
			t.Errorf("%s (-want +got):\n%s", row.What, diff)
		}
	}
}

func TestIdleTime(t *testing.T) {
	count, idle, err := idleTime([]byte("cpu  1 2 3 400 500 6 7\ncpu0 1 2 3 10 20 6 7\ncpu1 1 2 3 30 40 6 7\nintr 1 2 3 4 5\n"))
	if err != nil || count != 2 || idle != time.Second {
		t.Errorf("got %d, %v, %v, want 2 processors that idled 1 s", count, idle, err)
	}
	if _, _, err := idleTime([]byte("cpu0 1 2 3 x 5 6\n")); err == nil {
		t.Error("what is no number is no error")
	}
	start := time.Now()
	before := processorTimes{at: start, count: 2, idle: 5 * time.Second, others: time.Second}
	after := processorTimes{at: start.Add(time.Second), count: 2, idle: 6 * time.Second, others: 1300 * time.Millisecond}
	if got := after.timeSince(before); got != 700*time.Millisecond {
		t.Errorf("got %v, want 2 s - 1 s - 0.3 s", got)
	}
	after.others = 999 * time.Millisecond
	if got := after.timeSince(before); got != 0 {
		t.Errorf("got %v although the other processes' time is negative", got)
	}
}
