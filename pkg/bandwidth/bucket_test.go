// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"math"
	"math/big"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/kernel"
)

// model computes the expected token bucket with integers of unlimited size.
func model(l Limit, mtu int, latency time.Duration) (burst, limit *big.Int) {
	n := func(v uint64) *big.Int { return new(big.Int).SetUint64(v) }
	in := func(t time.Duration) *big.Int {
		v := new(big.Int).Mul(n(l.Rate/8), big.NewInt(t.Microseconds()))
		return v.Div(v, big.NewInt(1e6))
	}
	atLeast := func(v *big.Int, least int64) *big.Int {
		if v.Cmp(big.NewInt(least)) < 0 {
			return big.NewInt(least)
		}
		return v
	}
	atMost := func(v, most *big.Int) *big.Int {
		if v.Cmp(most) > 0 {
			return most
		}
		return v
	}
	frame := int64(mtu) + 18
	burst = in(4 * time.Millisecond)
	if l.Burst >= 8 {
		burst = n(l.Burst / 8)
	}
	burst = atMost(atMost(atLeast(burst, 4*frame), in(274*time.Second)), n(math.MaxUint32))
	whole := atMost(burst, big.NewInt(65536+18)) // a longer segment is split into frames
	limit = atLeast(atLeast(in(latency), 16*frame), 2*whole.Int64())
	counted := big.NewInt(int64(mtu) + 14)
	rest, half := new(big.Int).Mod(limit, counted), big.NewInt((int64(mtu)+14)/2)
	limit.Add(limit, half.Sub(half, atMost(rest, half))) // the queue keeps room for half a frame beside full frames
	return burst, atMost(limit, n(math.MaxUint32))
}

// mustBeSound fails the test if a token bucket differs from that of model, or if the kernel would round its values.
func mustBeSound(t *testing.T, l Limit, mtu int, latency time.Duration) {
	t.Helper()
	got := l.bucket(mtu, latency, false)
	burst, limit := model(l, mtu, latency)
	if got.Rate != l.Rate || burst.Cmp(big.NewInt(int64(got.Burst))) != 0 || limit.Cmp(big.NewInt(int64(got.Limit))) != 0 {
		t.Fatalf("%+v with mtu %d: %+v, want burst %v limit %v", l, mtu, got, burst, limit)
	}
	// one tick of the kernel's clock is 64 ns
	ticks := new(big.Int).Mul(big.NewInt(int64(got.Burst)), big.NewInt(15_625_000))
	ticks.Div(ticks, new(big.Int).SetUint64(l.Rate/8))
	if ticks.Cmp(big.NewInt(math.MaxUint32)) > 0 {
		t.Fatalf("%+v with mtu %d: a burst of %v ticks", l, mtu, ticks)
	}
	if frames := uint64(got.Burst) / uint64(mtu+overhead); frames < burstFrames && mtu <= 1500 {
		t.Fatalf("%+v with mtu %d: a burst of %d frames", l, mtu, frames)
	}
	if got.Limit < uint32(mtu+overhead) || got.Limit < min(got.Burst, 65536+18) {
		t.Fatalf("%+v with mtu %d: an unsplit segment never fits into the queue of %+v", l, mtu, got)
	}
	fair := l.bucket(mtu, latency, true).Fair
	perFrame := time.Duration(float64(mtu+18) * 8 / float64(l.Rate) * 1e9)
	if fair.Target < latency/2 || fair.Target < perFrame || fair.Interval < 2*fair.Target || fair.Interval < 100*time.Millisecond ||
		fair.Interval.Microseconds() > math.MaxUint32 || fair.Packets < 64 || fair.Packets > 10240 {
		t.Fatalf("%+v with mtu %d: %+v", l, mtu, fair)
	}
}

// Fair queues of fast links get the kernel's default target and interval; slow links get a longer target and fewer packets.
func TestFairQueueOf(t *testing.T) {
	for _, c := range []struct {
		rate    uint64
		latency time.Duration
		want    kernel.FairQueue
	}{
		{20e6, defaultLatency, kernel.FairQueue{Target: 5 * time.Millisecond, Interval: 100 * time.Millisecond, Packets: 164}},
		{100e9, defaultLatency, kernel.FairQueue{Target: 5 * time.Millisecond, Interval: 100 * time.Millisecond, Packets: 10240}},
		{1e6, defaultLatency, kernel.FairQueue{Target: 18_216 * time.Microsecond, Interval: 100 * time.Millisecond, Packets: 64}},
		{64e3, defaultLatency, kernel.FairQueue{Target: 284_625 * time.Microsecond, Interval: 569_250 * time.Microsecond, Packets: 64}},
		{20e6, time.Second, kernel.FairQueue{Target: 500 * time.Millisecond, Interval: time.Second, Packets: 1646}},
	} {
		if diff := cmp.Diff(c.want, Limit{Rate: c.rate}.bucket(1500, c.latency, true).Fair); diff != "" {
			t.Errorf("%d, %s:\n%s", c.rate, c.latency, diff)
		}
	}
}

func TestBucket(t *testing.T) {
	for _, mtu := range []int{68, 1280, 1400, 1500, 9000, 65535} {
		for rate := uint64(minRate); rate <= maxRate; rate = rate*3/2 + 1 {
			for _, burst := range []uint64{0, 1, 7, 8, 1000, 1e6, 1<<32 - 1, 1 << 32, 1<<35 - 1} {
				mustBeSound(t, Limit{Rate: rate, Burst: burst}, mtu, defaultLatency)
				mustBeSound(t, Limit{Rate: rate, Burst: burst}, mtu, maxLatency)
			}
		}
		mustBeSound(t, Limit{Rate: maxRate, Burst: 0}, mtu, minLatency)
	}
	for _, c := range []struct {
		limit   Limit
		latency time.Duration
		want    kernel.Bucket
	}{
		{Limit{Rate: 20e6, Burst: 0}, defaultLatency, kernel.Bucket{Rate: 20e6, Burst: 10_000, Limit: 25_000}},
		{Limit{Rate: 20e6, Burst: 0}, 50 * time.Millisecond, kernel.Bucket{Rate: 20e6, Burst: 10_000, Limit: 125_000}},
		{Limit{Rate: 20e6, Burst: 400_000}, defaultLatency, kernel.Bucket{Rate: 20e6, Burst: 50_000, Limit: 100_681}},
		{Limit{Rate: 100e6, Burst: 0}, time.Millisecond, kernel.Bucket{Rate: 100e6, Burst: 50_000, Limit: 100_681}},
		{Limit{Rate: 20e6, Burst: 8e6}, defaultLatency, kernel.Bucket{Rate: 20e6, Burst: 1e6, Limit: 131_108}},
		{Limit{Rate: 1000, Burst: 0}, defaultLatency, kernel.Bucket{Rate: 1000, Burst: 4 * 1518, Limit: 24_981}},
		{Limit{Rate: 1e9, Burst: 0}, defaultLatency, kernel.Bucket{Rate: 1e9, Burst: 500_000, Limit: 1_250_000}},
		{Limit{Rate: 1e9, Burst: 0}, time.Millisecond, kernel.Bucket{Rate: 1e9, Burst: 500_000, Limit: 131_108}},
		{Limit{Rate: 1e11, Burst: 0}, defaultLatency, kernel.Bucket{Rate: 1e11, Burst: 50e6, Limit: 125e6}},
		// the kernel's clock cannot represent a longer burst
		{Limit{Rate: 10e6, Burst: 1<<32 - 1}, defaultLatency, kernel.Bucket{Rate: 10e6, Burst: 342_500_000, Limit: 131_108}},
	} {
		if diff := cmp.Diff(&c.want, c.limit.bucket(1500, c.latency, false)); diff != "" {
			t.Errorf("%+v:\n%s", c.limit, diff)
		}
	}
}

func FuzzBucket(f *testing.F) {
	f.Add(uint64(20e6), uint64(0), uint16(1500))
	f.Add(uint64(1000), uint64(1<<35-1), uint16(65535))
	f.Add(uint64(1e11), uint64(1), uint16(68))
	f.Fuzz(func(t *testing.T, rate, burst uint64, mtu uint16) {
		if rate < minRate || rate > maxRate || mtu < 68 {
			return
		}
		mustBeSound(t, Limit{Rate: rate, Burst: burst}, int(mtu), defaultLatency)
	})
}

func TestNear(t *testing.T) {
	for _, c := range []struct {
		a, b uint32
		rate uint64
		want bool
	}{{0, 0, 20e6, true}, {0, 64, 20e6, true}, {64, 0, 20e6, true}, {0, 66, 1e6, false}, {1e6, 1.02e6, 20e6, true}, {1.02e6, 1e6, 20e6, true},
		{1e6, 1.03e6, 20e6, false},
		{0, 864, 100e9, true}, {0, 900, 100e9, false}, {math.MaxUint32, math.MaxUint32 - 1e6, 100e9, true}} {
		if got := nearBurst(c.a, c.b, c.rate); got != c.want {
			t.Errorf("%d and %d at %d: %t", c.a, c.b, c.rate, got)
		}
	}
}
