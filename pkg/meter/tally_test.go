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
	// A burst first, then a quarter of it, in a link that needs its time to come up.
	for ms := 0; ms < 4000; ms += 50 {
		n := 1000
		if ms >= 1000 {
			n = 250
		}
		_, open := counts.add(start.Add(time.Duration(ms)*time.Millisecond), n)
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
		counts.add(start.Add(time.Duration(ms)*time.Millisecond), 1000)
	}
	got := counts.result(perSegment(1448, 66))
	within(t, "payload", got.FirstSecond.Payload, 63999, 64001)
	within(t, "wire", got.FirstSecond.Wire, 64000*1514./1448-1, 64000*1514./1448+1)
	if got.Steady != got.Mean {
		t.Errorf("steady %v, mean %v", got.Steady, got.Mean)
	}
}
