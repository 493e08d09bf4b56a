// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"bytes"
	"fmt"
	"log/slog"
	"math"
	"math/big"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

func parsed(keys string) (c Config, log string, err error) {
	var b bytes.Buffer
	c, err = Parse(&plugin.Request{Network: "net", CNIVersion: "1.1.0", Config: []byte("{" + keys + "}"),
		Log: slog.New(slog.NewTextHandler(&b, &slog.HandlerOptions{Level: slog.LevelDebug}))})
	return c, b.String(), err
}

func discard() *slog.Logger { return slog.New(slog.DiscardHandler) }

func runtime(keys string) string { return `"runtimeConfig":{"bandwidth":{` + keys + `}}` }

func TestParse(t *testing.T) {
	limit := func(rate, burst uint64) Limit { return Limit{rate, burst} }
	for keys, want := range map[string]Config{
		"":                     {},
		`"ingressRate":0`:      {},
		`"ingressRate":null`:   {},
		runtime(""):            {},
		`"runtimeConfig":null`: {},
		`"egressRate":100000000000,"egressBurst":8`:              {Egress: limit(1e11, 8)},
		`"egressRate":1000,"egressBurst":8`:                      {Egress: limit(1000, 8)},
		`"ingressRate":1000000,"ingressBurst":34359738367`:       {Ingress: limit(1e6, 1<<35-1)},
		`"maxBurst":5,"ingressRate":1000000,"ingressBurst":8000`: {Ingress: limit(1e6, 8000)}, // the conflist is honoured
		runtime(`"ingressRate":20000000`):                        {Ingress: limit(20e6, 0)},
		runtime(`"ingressRate":1000000,"egressRate":2000000`):    {Ingress: limit(1e6, 0), Egress: limit(2e6, 0)},
		runtime(`"ingressRate":1,"egressRate":999`):              {Ingress: limit(1000, 0), Egress: limit(1000, 0)},
		runtime(`"ingressRate":100000000001`):                    {Ingress: limit(1e11, 0)},
		runtime(`"ingressRate":18446744073709551615`):            {Ingress: limit(1e11, 0)},
		runtime(`"ingressBurst":4294967295,"egressBurst":7`):     {}, // runtimes send a burst whether there is a rate or not
		// Any key in the conflist makes the conflist win completely.
		`"ingressRate":1000000,"ingressBurst":8000,` + runtime(`"ingressRate":5,"egressRate":2000000`): {Ingress: limit(1e6, 8000)},
		`"egressBurst":0,` + runtime(`"ingressRate":2000000`):                                          {},
	} {
		want.Latency = defaultLatency
		got, _, err := parsed(keys)
		want.Asked = got.Asked // TestLook
		if err != nil || got != want {
			t.Errorf("%s: %+v, %v, want %+v", keys, got, err, want)
		}
	}
}

// TestUnlimitedBursts are what runtimes send because there is no annotation for a burst.
func TestUnlimitedBursts(t *testing.T) {
	for _, c := range []struct {
		max         string
		rate, burst uint64
		want        uint64
	}{
		{"", 20e6, 1<<31 - 1, 0}, {"", 20e6, 1<<32 - 1, 0}, {"", 20e6, 1<<35 - 9, 0}, {"", 20e6, math.MaxUint64, 0}, {"", 20e6, 20e6 + 1, 0},
		{"", 20e6, 20e6, 20e6}, {"", 20e6, 1e6, 1e6}, {"", 20e6, 0, 0}, {"", 10e9, 1<<32 - 1, 1<<32 - 1},
		{`"maxBurst":40000000,`, 20e6, 40e6, 40e6}, {`"maxBurst":40000000,`, 20e6, 40e6 + 1, 0}, {`"maxBurst":1000,`, 20e6, 2000, 0}, {`"maxBurst":1,`, 20e6, 2000, 0},
		{"", 1, 1001, 0}, {"", 1, 1000, 1000}, // the rate that is applied counts
	} {
		got, log, err := parsed(c.max + runtime(fmt.Sprintf(`"egressRate":%d,"egressBurst":%d`, c.rate, c.burst)))
		if err != nil || got.Egress.Burst != c.want {
			t.Errorf("%+v: %+v, %v", c, got, err)
		}
		if dropped := c.burst != c.want; dropped != strings.Contains(log, "deriving one") {
			t.Errorf("%+v: logged %q", c, log)
		}
	}
}

func TestLatency(t *testing.T) {
	for text, want := range map[string]time.Duration{"": defaultLatency, "1ms": time.Millisecond, "0.05s": 50 * time.Millisecond, "10s": 10 * time.Second} {
		if got, _, err := parsed(fmt.Sprintf(`"latency":%q`, text)); err != nil || got.Latency != want {
			t.Errorf("%q: %s, %v", text, got.Latency, err)
		}
	}
}

func TestClampIsLogged(t *testing.T) {
	if _, log, err := parsed(runtime(`"ingressRate":1`)); err != nil || !strings.Contains(log, "clamped") || !strings.Contains(log, "applied=1000") {
		t.Errorf("%v, logged %q", err, log)
	}
	if _, log, _ := parsed(runtime(`"ingressRate":1000`)); strings.Contains(log, "clamped") {
		t.Errorf("logged %q", log)
	}
}

func TestParseRefused(t *testing.T) {
	for keys, says := range map[string]string{
		`"ingressRate":-1`:                              "ingressRate -1: want a whole number of bits, not negative",
		`"egressRate":1.5`:                              "egressRate 1.5: want a whole number",
		`"egressBurst":1e6`:                             "egressBurst 1e6: want a whole number",
		`"ingressBurst":100`:                            "ingressBurst 100: if burst is set, rate must also be set",
		`"egressBurst":100`:                             "egressBurst 100: if burst is set, rate must also be set",
		`"ingressRate":1000`:                            "ingressRate 1000: if rate is set, burst must also be set",
		`"ingressRate":999,"ingressBurst":1`:            "ingressRate 999: want 1000-100000000000 bits",
		`"egressRate":100000000001,"egressBurst":1`:     "want 1000-100000000000 bits",
		`"ingressRate":1000,"ingressBurst":34359738368`: "want less than 34359738368 bits",
		`"maxBurst":-1`:                                 "maxBurst -1",
		`"latency":"10"`:                                `latency "10": want a time with its unit, such as 10ms, between 1ms and 10s`,
		`"latency":"-10ms"`:                             "latency",
		`"latency":"999us"`:                             "latency",
		`"latency":"11s"`:                               "latency",
		runtime(`"ingressRate":-1`):                     "ingressRate -1",
		`"ingressRate":` + strings.Repeat("9", 41):      "want a whole number",
		`"ingressRate":-` + strings.Repeat("9", 10000):  "want a whole number",
	} {
		if c, _, err := parsed(keys); plugin.Code(err) != plugin.CodeConfig || !strings.Contains(err.Error(), says) || len(err.Error()) > 200 {
			t.Errorf("%.80s: %+v, %v, want %q", keys, c, err, says)
		}
	}
	for _, key := range []string{"shapedSubnets", "unshapedSubnets"} {
		if _, _, err := parsed(`"` + key + `":["10.0.0.0/8"]`); plugin.Code(err) != plugin.CodeUnsupported || !strings.Contains(err.Error(), key) {
			t.Errorf("%s: %v", key, err)
		}
		if _, _, err := parsed(`"` + key + `":null`); err != nil {
			t.Errorf("%s null: %v", key, err)
		}
	}
	for _, keys := range []string{`"ingressRate":"fast"`, `"ingressRate":true`, `"runtimeConfig":{"bandwidth":7}`, `"egressBurst":{}`, `"latency":10`} {
		if _, _, err := parsed(keys); plugin.Code(err) != plugin.CodeDecode {
			t.Errorf("%s: %v", keys, err)
		}
	}
}

// model computes a token bucket in numbers that cannot wrap.
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
	limit = atLeast(in(latency), 16*frame)
	if burst.Cmp(big.NewInt(65536+18)) >= 0 {
		limit = atLeast(limit, 2*(65536+18))
	}
	return burst, atMost(limit, n(math.MaxUint32))
}

// mustBeSound checks one shaper against the model, and what the kernel needs to apply it as it is.
func mustBeSound(t *testing.T, l Limit, mtu int, latency time.Duration) {
	t.Helper()
	got := l.shaper(mtu, latency)
	burst, limit := model(l, mtu, latency)
	if got.Rate != l.Rate || burst.Cmp(big.NewInt(int64(got.Burst))) != 0 || limit.Cmp(big.NewInt(int64(got.Limit))) != 0 {
		t.Fatalf("%+v with mtu %d: %+v, want burst %v limit %v", l, mtu, got, burst, limit)
	}
	// The kernel's clock has ticks of 64 ns.
	ticks := new(big.Int).Mul(big.NewInt(int64(got.Burst)), big.NewInt(15_625_000))
	ticks.Div(ticks, new(big.Int).SetUint64(l.Rate/8))
	if ticks.Cmp(big.NewInt(math.MaxUint32)) > 0 {
		t.Fatalf("%+v with mtu %d: a burst of %v ticks", l, mtu, ticks)
	}
	if frames := uint64(got.Burst) / uint64(mtu+overhead); frames < burstFrames && mtu <= 1500 {
		t.Fatalf("%+v with mtu %d: a burst of %d frames", l, mtu, frames)
	}
	if got.Limit < uint32(mtu+overhead) {
		t.Fatalf("%+v with mtu %d: no room for a frame", l, mtu)
	}
}

func TestShaper(t *testing.T) {
	for _, mtu := range []int{68, 1280, 1400, 1500, 9000, 65535} {
		for rate := uint64(minRate); rate <= maxRate; rate = rate*3/2 + 1 {
			for _, burst := range []uint64{0, 1, 7, 8, 1000, 1e6, 1<<32 - 1, 1 << 32, 1<<35 - 1} {
				mustBeSound(t, Limit{rate, burst}, mtu, defaultLatency)
				mustBeSound(t, Limit{rate, burst}, mtu, maxLatency)
			}
		}
		mustBeSound(t, Limit{maxRate, 0}, mtu, minLatency)
	}
	for _, c := range []struct {
		limit   Limit
		latency time.Duration
		want    kernel.Shaper
	}{
		{Limit{20e6, 0}, defaultLatency, kernel.Shaper{Rate: 20e6, Burst: 10_000, Limit: 25_000}},
		{Limit{20e6, 0}, 50 * time.Millisecond, kernel.Shaper{Rate: 20e6, Burst: 10_000, Limit: 125_000}},
		{Limit{20e6, 8e6}, defaultLatency, kernel.Shaper{Rate: 20e6, Burst: 1e6, Limit: 131_108}},
		{Limit{1000, 0}, defaultLatency, kernel.Shaper{Rate: 1000, Burst: 4 * 1518, Limit: 16 * 1518}},
		{Limit{1e9, 0}, defaultLatency, kernel.Shaper{Rate: 1e9, Burst: 500_000, Limit: 1_250_000}},
		{Limit{1e9, 0}, time.Millisecond, kernel.Shaper{Rate: 1e9, Burst: 500_000, Limit: 131_108}},
		{Limit{1e11, 0}, defaultLatency, kernel.Shaper{Rate: 1e11, Burst: 50e6, Limit: 125e6}},
		{Limit{10e6, 1<<32 - 1}, defaultLatency, kernel.Shaper{Rate: 10e6, Burst: 342_500_000, Limit: 131_108}}, // more would not fit the kernel's clock
	} {
		if diff := cmp.Diff(c.want, c.limit.shaper(1500, c.latency)); diff != "" {
			t.Errorf("%+v:\n%s", c.limit, diff)
		}
	}
}

func FuzzShaper(f *testing.F) {
	f.Add(uint64(20e6), uint64(0), uint16(1500))
	f.Add(uint64(1000), uint64(1<<35-1), uint16(65535))
	f.Add(uint64(1e11), uint64(1), uint16(68))
	f.Fuzz(func(t *testing.T, rate, burst uint64, mtu uint16) {
		if rate < minRate || rate > maxRate || mtu < 68 {
			return
		}
		mustBeSound(t, Limit{rate, burst}, int(mtu), defaultLatency)
	})
}

// FuzzParse: an error has a code, and what passes is within the bounds.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{"", "{}", `{"ingressRate":1}`, `{"ingressRate":1e3}`, `{"egressRate":18446744073709551616,"egressBurst":1}`, "{" + runtime(`"ingressRate":5,"ingressBurst":-1`) + "}",
		`{"maxBurst":1,"runtimeConfig":{"bandwidth":{"egressRate":2,"egressBurst":3}}}`, `{"shapedSubnets":[]}`, `{"ingressRate":0x10}`} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, config string) {
		c, err := Parse(&plugin.Request{Network: "net", CNIVersion: "1.1.0", Config: []byte(config), Log: discard()})
		if err != nil {
			if code := plugin.Code(err); code != plugin.CodeDecode && code != plugin.CodeConfig && code != plugin.CodeUnsupported {
				t.Errorf("%q: code %d, %v", config, code, err)
			}
			return
		}
		for _, l := range []Limit{c.Ingress, c.Egress} {
			if l.Rate != 0 {
				mustBeSound(t, l, 1500, c.Latency)
			}
			if l.Rate != 0 && (l.Rate < minRate || l.Rate > maxRate) || l.Rate == 0 && l.Burst != 0 {
				t.Errorf("%q: %+v", config, l)
			}
		}
	})
}

func TestNear(t *testing.T) {
	for _, c := range []struct {
		a, b uint32
		want bool
	}{{0, 0, true}, {0, 64, true}, {64, 0, true}, {0, 66, false}, {1e6, 1.02e6, true}, {1.02e6, 1e6, true}, {1e6, 1.03e6, false}, {math.MaxUint32, math.MaxUint32 - 1e6, true}} {
		if got := near(c.a, c.b); got != c.want {
			t.Errorf("%d and %d: %t", c.a, c.b, got)
		}
	}
}
