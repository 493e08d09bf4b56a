// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"encoding/json"
	"math"
	"math/big"
	"time"

	"github.com/podlace/podlace/pkg/plugin"
)

// Limit is what is asked for one direction: bits per second and bits. A zero burst is derived from the rate.
type Limit struct {
	Rate  uint64 `json:"rate"`
	Burst uint64 `json:"burst,omitempty"`
}

// Ask is what somebody wanted for one direction, before it was brought within bounds.
type Ask struct {
	Limit
	ByAdmin   bool `json:"byAdmin,omitempty"`   // with podlace limits
	Annotated bool `json:"annotated,omitempty"` // the burst, by the pod
}

// Asks are those of both directions.
type Asks struct {
	Ingress Ask `json:"ingress,omitzero"`
	Egress  Ask `json:"egress,omitzero"`
}

// Config is the validated configuration of an ADD or CHECK. The directions are the pod's: ingress is what it receives.
type Config struct {
	Ingress, Egress Limit
	Asked           Asks
	Latency         time.Duration // how long a packet may wait
}

// none tells that nothing is limited.
func (c Config) none() bool { return c.Ingress.Rate == 0 && c.Egress.Rate == 0 }

type rawLimits struct {
	IngressRate  bits `json:"ingressRate"`
	IngressBurst bits `json:"ingressBurst"`
	EgressRate   bits `json:"egressRate"`
	EgressBurst  bits `json:"egressBurst"`
}

func (l rawLimits) empty() bool { return l == rawLimits{} }

type rawConfig struct {
	rawLimits
	MaxBurst        bits            `json:"maxBurst"`
	Latency         string          `json:"latency"`
	ShapedSubnets   json.RawMessage `json:"shapedSubnets"`
	UnshapedSubnets json.RawMessage `json:"unshapedSubnets"`
	RuntimeConfig   struct {
		Bandwidth   *rawLimits        `json:"bandwidth"`
		Annotations map[string]string `json:"io.kubernetes.cri.pod-annotations"`
	} `json:"runtimeConfig"`
}

// Rates outside these bounds cannot be told from none at all, or cannot be reached by any interface: they are set to the bound.
const (
	minRate = 1_000           // 1 kbit/s
	maxRate = 100_000_000_000 // 100 Gbit/s
)

// maxBytes bounds a burst: tc counts bytes in 32 bits.
const maxBytes = math.MaxUint32

// Parse reads the configuration of an ADD, CHECK or STATUS. Limits that stand in the conflist win over the runtime's completely.
func Parse(r *plugin.Request) (Config, error) {
	var raw rawConfig
	if err := r.Decode(&raw); err != nil {
		return Config{}, err
	}
	for key, value := range map[string]json.RawMessage{"shapedSubnets": raw.ShapedSubnets, "unshapedSubnets": raw.UnshapedSubnets} {
		if len(value) > 0 && string(value) != "null" {
			return Config{}, plugin.WithHint(plugin.Errorf(plugin.CodeUnsupported, "%s %s: limits hold for all destinations", key, value),
				"the key existed in versions 1.5.0 and 1.5.1 of the reference plugin only; remove it")
		}
	}
	maxBurst, err := number("maxBurst", raw.MaxBurst)
	if err != nil {
		return Config{}, err
	}
	latency, err := parseLatency(raw.Latency)
	if err != nil {
		return Config{}, err
	}
	limits, static := raw.rawLimits, true
	if limits.empty() && raw.RuntimeConfig.Bandwidth != nil {
		limits, static = *raw.RuntimeConfig.Bandwidth, false
	}
	read := func(direction string, rate, burst bits) (a Ask, l Limit, err error) {
		if a.Rate, err = number(direction+"Rate", rate); err != nil {
			return a, l, err
		}
		if a.Burst, err = number(direction+"Burst", burst); err != nil {
			return a, l, err
		}
		if !static {
			if err := a.annotate(direction, raw.RuntimeConfig.Annotations); err != nil {
				return a, l, err
			}
		}
		l, err = a.within(r, direction, static, maxBurst)
		return a, l, err
	}
	c := Config{Latency: latency}
	if c.Asked.Ingress, c.Ingress, err = read("ingress", limits.IngressRate, limits.IngressBurst); err != nil {
		return Config{}, err
	}
	if c.Asked.Egress, c.Egress, err = read("egress", limits.EgressRate, limits.EgressBurst); err != nil {
		return Config{}, err
	}
	return c, nil
}

// annotation of a pod for the burst of a direction, in bits. Kubernetes has none.
func annotation(direction string) string { return "podlace.io/" + direction + "-burst" }

// annotate takes the burst from the pod's annotation, which wins over the runtime's.
func (a *Ask) annotate(direction string, annotations map[string]string) error {
	key := annotation(direction)
	text, ok := annotations[key]
	if !ok {
		return nil
	}
	burst, ok := parseQuantity(text)
	if !ok {
		return plugin.Errorf(plugin.CodeConfig, "annotation %s %.40q: want bits, such as 4M, 1.5Mi or 64000", key, text)
	}
	a.Annotated, a.Burst = true, math.MaxUint64
	if burst.IsUint64() {
		a.Burst = burst.Uint64()
	}
	return nil
}

// within refuses what a configuration may not have, and brings what a runtime asks for within bounds.
func (a Ask) within(r *plugin.Request, direction string, static bool, maxBurst uint64) (Limit, error) {
	rate, burst := a.Rate, a.Burst
	switch {
	case rate == 0 && burst > 0 && static:
		return Limit{}, plugin.Errorf(plugin.CodeConfig, "%sBurst %d: if burst is set, rate must also be set", direction, burst)
	case static && (rate < minRate || rate > maxRate) && rate != 0:
		return Limit{}, plugin.Errorf(plugin.CodeConfig, "%sRate %d: want %d-%d bits per second", direction, rate, minRate, uint64(maxRate))
	case rate > 0 && burst == 0 && static:
		return Limit{}, plugin.WithHint(plugin.Errorf(plugin.CodeConfig, "%sRate %d: if rate is set, burst must also be set", direction, rate),
			"what a limit of the runtime would get is %d", Limit{Rate: rate}.shaper(1500, defaultLatency, false).Burst*8)
	case rate == 0:
		return Limit{}, nil // runtimes send their burst whether there is a rate or not
	case static && burst/8 > maxBytes:
		return Limit{}, plugin.Errorf(plugin.CodeConfig, "%sBurst %d: want less than %d bits", direction, burst, uint64(maxBytes+1)*8)
	}
	limit := Limit{clampRate(r, direction, rate), burst}
	switch most := mostBurst(limit.Rate, maxBurst); {
	case static || burst <= most:
	case a.Annotated:
		limit.Burst = most
		r.Log.Warn("burst is out of bounds and was clamped", "annotation", annotation(direction), "asked", burst, "applied", most)
	default:
		// Runtimes have no annotation for the burst and send "unlimited" (2^32-1, 2^31-1, 2^35-9): with it the first half gigabyte
		// would pass at full speed.
		r.Log.Debug("burst of the runtime means unlimited; deriving one from the rate", "direction", direction, "burst", burst)
		limit.Burst = 0
	}
	return limit, nil
}

// Bounds of latency: a timer may come later than the one, and nobody waits for the other.
const (
	minLatency = time.Millisecond
	maxLatency = 10 * time.Second
)

func parseLatency(text string) (time.Duration, error) {
	if text == "" {
		return defaultLatency, nil
	}
	latency, err := time.ParseDuration(text)
	if err != nil || latency < minLatency || latency > maxLatency {
		return 0, plugin.Errorf(plugin.CodeConfig, "latency %.40q: want a time with its unit, such as 10ms, between %s and %s", text, minLatency, maxLatency)
	}
	return latency, nil
}

// mostBurst is the largest burst that a runtime may ask for: the conflist's maxBurst, else one second of the rate.
func mostBurst(rate, maxBurst uint64) uint64 {
	if maxBurst > 0 {
		return maxBurst
	}
	return rate
}

func clampRate(r *plugin.Request, direction string, rate uint64) uint64 {
	clamped := min(max(rate, minRate), maxRate)
	if clamped != rate {
		r.Log.Warn("rate is out of bounds and was clamped", "direction", direction, "asked", rate, "applied", clamped)
	}
	return clamped
}

// bits is a count of bits as it is written. Whether it is one is for number to say, which names the key.
type bits string

// UnmarshalJSON takes whatever is there.
func (b *bits) UnmarshalJSON(data []byte) error {
	if string(data) != "null" {
		*b = bits(data)
	}
	return nil
}

// number reads a count of bits.
func number(key string, n bits) (uint64, error) {
	if n == "" {
		return 0, nil
	}
	v, ok := new(big.Int).SetString(string(n), 10)
	if !ok || !v.IsUint64() {
		return 0, plugin.Errorf(plugin.CodeConfig, "%s %.40s: want a whole number of bits, not negative, below 2^64", key, string(n))
	}
	return v.Uint64(), nil
}
