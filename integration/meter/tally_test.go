// SPDX-License-Identifier: Apache-2.0

package meter

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func TestTally(t *testing.T) {
	start := time.Now()
	counts := newTally(2500 * time.Millisecond)
	// One second at full rate, then a quarter of it.
	for ms := 0; ms < 4000; ms += 50 {
		n := 1000
		if ms >= 1000 {
			n = 250
		}
		_, open := counts.addBytes(start.Add(time.Duration(ms)*time.Millisecond), n)
		if want := ms < 2500; open != want {
			t.Fatalf("at %d ms: open %v, want %v", ms, open, want)
		}
	}
	got := counts.result(perPacket(100))
	want := Result{
		Bytes: 27500, Packets: 50, Duration: 2500 * time.Millisecond,
		FirstSecond: Rate{Payload: 160000, Wire: 176000},
		Steady:      Rate{Payload: 40000, Wire: 56000},
		Mean:        Rate{Payload: 88000, Wire: 104000},
	}
	want.Samples = got.Samples
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if len(got.Samples) != 25 || got.Samples[0] != 2000 || got.Samples[24] != 500 {
		t.Errorf("samples %v", got.Samples)
	}
}

func TestWindowShorterThanASecond(t *testing.T) {
	counts := newTally(250 * time.Millisecond)
	start := time.Now()
	for _, ms := range []int{0, 240, 251} {
		counts.addBytes(start.Add(time.Duration(ms)*time.Millisecond), 1000)
	}
	got := counts.result(perSegment(1448, 66))
	within(t, "payload", got.FirstSecond.Payload, 63999, 64001)
	within(t, "wire", got.FirstSecond.Wire, 64000*1514./1448-1, 64000*1514./1448+1)
	if diff := cmp.Diff(Arrivals{{100 * time.Millisecond, 1514000. / 1448}, {200 * time.Millisecond, 1514000. / 1448},
		{250 * time.Millisecond, 2 * 1514000. / 1448}}, counts.arrivalList(perSegment(1448, 66))); diff != "" {
		t.Error(diff)
	}
	if got.Steady != got.Mean {
		t.Errorf("steady %v, mean %v", got.Steady, got.Mean)
	}
}

func TestArrivals(t *testing.T) {
	const ms = time.Millisecond
	// The samples have 800, 400 and 1600 kbit/s. The second is 100 ms late.
	a := Arrivals{{100 * ms, 10e3}, {300 * ms, 20e3}, {400 * ms, 40e3}}
	for _, c := range []struct {
		from, to time.Duration
		want     float64
	}{
		{0, 400 * ms, 800e3}, {0, time.Hour, 800e3}, {100 * ms, 200 * ms, 400e3}, {200 * ms, 400 * ms, 1000e3}, {0, 50 * ms, 800e3},
		{400 * ms, 500 * ms, 0}, {300 * ms, 300 * ms, 0},
	} {
		within(t, "rate", a.Rate(c.from, c.to), c.want-1, c.want+1)
	}
	within(t, "peak", a.Peak(), 1600e3-1, 1600e3+1)
	within(t, "peak of what was noted late", Arrivals{{100 * ms, 10e3}, {300 * ms, 35e3}}.Peak(), 1000e3-1, 1000e3+1)
	if rate, peak := Arrivals(nil).Rate(0, time.Second), Arrivals(nil).Peak(); rate != 0 || peak != 0 {
		t.Errorf("nothing arrived at %v, %v bit/s", rate, peak)
	}
}
