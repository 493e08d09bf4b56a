// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"bytes"
	"fmt"
	"log/slog"
	"math"
	"strings"
	"testing"
	"time"

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
	limit := func(rate, burst uint64) Limit { return Limit{Rate: rate, Burst: burst} }
	for keys, want := range map[string]Both[Limit]{
		"":                     {},
		`"ingressRate":0`:      {},
		`"ingressRate":null`:   {},
		runtime(""):            {},
		`"runtimeConfig":null`: {},
		`"egressRate":100000000000,"egressBurst":8`:              {Egress: limit(1e11, 8)},
		`"egressRate":1000,"egressBurst":8`:                      {Egress: limit(1000, 8)},
		`"ingressRate":1000000,"ingressBurst":34359738367`:       {Ingress: limit(1e6, 1<<35-1)},
		`"maxBurst":5,"ingressRate":1000000,"ingressBurst":8000`: {Ingress: limit(1e6, 8000)}, // values in the conflist are used as they are
		runtime(`"ingressRate":20000000`):                        {Ingress: limit(20e6, 0)},
		runtime(`"ingressRate":1000000,"egressRate":2000000`):    {Ingress: limit(1e6, 0), Egress: limit(2e6, 0)},
		runtime(`"ingressRate":1,"egressRate":999`):              {Ingress: limit(1000, 0), Egress: limit(1000, 0)},
		runtime(`"ingressRate":100000000001`):                    {Ingress: limit(1e11, 0)},
		runtime(`"ingressRate":18446744073709551615`):            {Ingress: limit(1e11, 0)},
		runtime(`"ingressBurst":4294967295,"egressBurst":7`):     {}, // runtimes send a burst with or without a rate
		// Any limit in the conflist overrides all limits of the runtime.
		`"ingressRate":1000000,"ingressBurst":8000,` + runtime(`"ingressRate":5,"egressRate":2000000`): {Ingress: limit(1e6, 8000)},
		`"egressBurst":0,` + runtime(`"ingressRate":2000000`):                                          {},
	} {
		got, _, err := parsed(keys)
		if err != nil || got.Allowed != want || got.Latency != defaultLatency { // TestLook covers Asked
			t.Errorf("%s: %+v, %v, want %+v", keys, got, err, want)
		}
	}
}

// Without an annotation for the burst, the huge bursts that runtimes send are ignored (S-14).
func TestUnlimitedBursts(t *testing.T) {
	for _, c := range []struct {
		max         string
		rate, burst uint64
		want        uint64
	}{
		{"", 20e6, 1<<31 - 1, 0}, {"", 20e6, 1<<32 - 1, 0}, {"", 20e6, 1<<35 - 9, 0}, {"", 20e6, math.MaxUint64, 0}, {"", 20e6, 20e6 + 1, 0},
		{"", 20e6, 20e6, 20e6}, {"", 20e6, 1e6, 1e6}, {"", 20e6, 0, 0}, {"", 10e9, 1<<32 - 1, 1<<32 - 1},
		{`"maxBurst":40000000,`, 20e6, 40e6, 40e6}, {`"maxBurst":40000000,`, 20e6, 40e6 + 1, 0}, {`"maxBurst":1000,`, 20e6, 2000, 0},
		{`"maxBurst":1,`, 20e6, 2000, 0},
		{"", 1, 1001, 0}, {"", 1, 1000, 1000}, // the applied rate counts
	} {
		got, log, err := parsed(c.max + runtime(fmt.Sprintf(`"egressRate":%d,"egressBurst":%d`, c.rate, c.burst)))
		if err != nil || got.Allowed.Egress.Burst != c.want {
			t.Errorf("%+v: %+v, %v", c, got, err)
		}
		if dropped := c.burst != c.want; dropped != strings.Contains(log, "deriving one") {
			t.Errorf("%+v: logged %q", c, log)
		}
	}
}

// A pod can set its burst with an annotation, any Kubernetes quantity up to the maximum burst.
func TestAnnotations(t *testing.T) {
	annotated := func(rate int, ingress string) string {
		return fmt.Sprintf(`"runtimeConfig":{"bandwidth":{"ingressRate":%d,"ingressBurst":4294967295,"egressRate":5000000,"egressBurst":4294967295},
			"io.kubernetes.cri.pod-annotations":{"podlace.io/ingress-burst":%q,"other":"x"}}`, rate, ingress)
	}
	for _, c := range []struct {
		max, text   string
		rate        int
		want, asked uint64
		clamped     bool
	}{
		{"", "4M", 20e6, 4e6, 4e6, false}, {"", "1.5Mi", 20e6, 3 << 19, 3 << 19, false}, {"", "64000", 20e6, 64000, 64000, false},
		{"", "0.5", 20e6, 1, 1, false},
		{"", "20M", 20e6, 20e6, 20e6, false}, {"", "20000001", 20e6, 20e6, 20_000_001, true}, {"", "9e30", 20e6, 20e6, math.MaxUint64, true},
		{`"maxBurst":1000000,`, "4M", 20e6, 1e6, 4e6, true}, {`"maxBurst":40000000,`, "30M", 20e6, 30e6, 30e6, false},
		{"", "0", 20e6, 0, 0, false}, {"", "4M", 0, 0, 4e6, false},
	} {
		got, log, err := parsed(c.max + annotated(c.rate, c.text))
		if err != nil || got.Allowed.Ingress.Burst != c.want || got.Asked.Ingress.Burst != c.asked ||
			!got.Asked.Ingress.Annotated || got.Allowed.Egress.Burst != 0 || got.Asked.Egress.Annotated ||
			strings.Contains(log, "clamped") != c.clamped {
			t.Errorf("%+v: %+v, %v, logged %q", c, got, err, log)
		}
	}
	for _, text := range []string{"", "x", "-1", "4 M", "4Mbit", "1e1000", "NaN"} {
		if got, _, err := parsed(annotated(20e6, text)); plugin.Code(err) != plugin.CodeConfig ||
			!strings.Contains(err.Error(), "annotation podlace.io/ingress-burst") {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
	}
	static := `"ingressRate":1000000,"ingressBurst":8000,` + annotated(20e6, "x")
	if got, _, err := parsed(static); err != nil || got.Allowed.Ingress.Burst != 8000 {
		t.Errorf("the conflist has its own: %+v, %v", got, err)
	}
}

func TestLatency(t *testing.T) {
	for text, want := range map[string]time.Duration{"": defaultLatency, "1ms": time.Millisecond, "0.05s": 50 * time.Millisecond,
		"10s": 10 * time.Second} {
		if got, _, err := parsed(fmt.Sprintf(`"latency":%q`, text)); err != nil || got.Latency != want {
			t.Errorf("%q: %s, %v", text, got.Latency, err)
		}
	}
}

// A runtime's rate outside the bounds is clamped, and that is logged (S-14).
func TestClampIsLogged(t *testing.T) {
	for _, direction := range []string{"ingress", "egress"} {
		for asked, applied := range map[uint64]uint64{
			1: minRate, 7: minRate, 999: minRate, 1000: 1000, 1e11: 1e11, 1e11 + 1: maxRate, 1e15: maxRate, 1 << 63: maxRate,
			math.MaxUint64: maxRate,
		} {
			c, log, err := parsed(runtime(fmt.Sprintf(`"%sRate":%d,"%[1]sBurst":4294967295`, direction, asked)))
			got := max(c.Allowed.Ingress.Rate, c.Allowed.Egress.Rate)
			says := fmt.Sprintf("clamped\" direction=%s asked=%d applied=%d", direction, asked, applied)
			if err != nil || got != applied || strings.Contains(log, "clamped") != (asked != applied) ||
				asked != applied && !strings.Contains(log, says) {
				t.Errorf("%s %d: %d, %v, logged %q", direction, asked, got, err, log)
			}
		}
	}
}

// Parse refuses values that no runtime sends (S-14).
func TestParseRefused(t *testing.T) {
	for keys, says := range map[string]string{
		`"ingressRate":-1`:                              "ingressRate -1: want a whole number of bits, not negative",
		`"egressRate":1.5`:                              "egressRate 1.5: want a whole number",
		`"egressBurst":1e6`:                             "egressBurst 1e6: want a whole number",
		`"ingressBurst":100`:                            "ingressBurst 100: if burst is set, ingressRate must also be set",
		`"egressBurst":100`:                             "egressBurst 100: if burst is set, egressRate must also be set",
		`"ingressRate":1000`:                            "ingressRate 1000: if rate is set, ingressBurst must also be set",
		`"ingressRate":999,"ingressBurst":1`:            "ingressRate 999: want 1000-100000000000 bits",
		`"ingressRate":999`:                             "ingressRate 999: want 1000-100000000000 bits",
		`"egressRate":18446744073709551615`:             "egressRate 18446744073709551615: want 1000-100000000000 bits",
		`"egressRate":100000000001,"egressBurst":1`:     "want 1000-100000000000 bits",
		`"ingressRate":1000,"ingressBurst":34359738368`: "want less than 34359738368 bits",
		`"maxBurst":-1`:                                 "maxBurst -1",
		`"latency":"10"`:                                `latency "10": want a time with its unit, such as 10ms, between 1ms and 10s`,
		`"latency":"-10ms"`:                             "latency",
		`"latency":"999us"`:                             "latency",
		`"latency":"11s"`:                               "latency",
		`"ingressRate":7,"ingressBurst":1`:              "ingressRate 7: want 1000-100000000000 bits",
		runtime(`"ingressRate":-1`):                     "ingressRate -1",
		`"ingressRate":"1M"`:                            `ingressRate "1M": want a whole number of bits`,
		`"ingressBurst":"1000"`:                         `ingressBurst "1000": want a whole number of bits`,
		runtime(`"egressRate":"1M"`):                    `egressRate "1M": want a whole number of bits`,
		`"ingressRate":true`:                            "ingressRate true",
		`"egressBurst":{"a":1}`:                         "egressBurst {",
		`"maxBurst":"1"`:                                "maxBurst",
		runtime(`"egressBurst":-1`):                     "egressBurst -1",
		runtime(`"egressRate":1.5`):                     "egressRate 1.5: want a whole number",
		runtime(`"egressRate":1e20`):                    "egressRate 1e20: want a whole number",
		runtime(`"ingressRate":18446744073709551616`):   "ingressRate 18446744073709551616: want a whole number",
		`"ingressRate":` + strings.Repeat("9", 41):      "want a whole number",
		`"ingressRate":-` + strings.Repeat("9", 10000):  "want a whole number",
	} {
		if c, _, err := parsed(keys); plugin.Code(err) != plugin.CodeConfig || !strings.Contains(err.Error(), says) || len(err.Error()) > 200 {
			t.Errorf("%.80s: %+v, %v, want %q", keys, c, err, says)
		}
	}
	for _, key := range []string{"shapedSubnets", "unshapedSubnets"} {
		if _, _, err := parsed(`"` + key + `":["10.0.0.0/8"]`); plugin.Code(err) != plugin.CodeUnsupported ||
			!strings.Contains(err.Error(), key) {
			t.Errorf("%s: %v", key, err)
		}
		if _, _, err := parsed(`"` + key + `":null`); err != nil {
			t.Errorf("%s null: %v", key, err)
		}
	}
	for _, keys := range []string{`"runtimeConfig":{"bandwidth":7}`, `"latency":10`, `"ingressRate":1M`} {
		if _, _, err := parsed(keys); plugin.Code(err) != plugin.CodeDecode {
			t.Errorf("%s: %v", keys, err)
		}
	}
}

// FuzzParse checks that each error has a code, and that each accepted value is within the bounds.
func FuzzParse(f *testing.F) {
	for _, seed := range []string{"", "{}", `{"ingressRate":1}`, `{"ingressRate":1e3}`, `{"egressRate":18446744073709551616,"egressBurst":1}`,
		"{" + runtime(`"ingressRate":5,"ingressBurst":-1`) + "}",
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
		for _, l := range []Limit{c.Allowed.Ingress, c.Allowed.Egress} {
			if l.Rate != 0 {
				mustBeSound(t, l, 1500, c.Latency)
			}
			if l.Rate != 0 && (l.Rate < minRate || l.Rate > maxRate) || l.Rate == 0 && l.Burst != 0 {
				t.Errorf("%q: %+v", config, l)
			}
		}
	})
}
