// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"encoding/json"
	"math"
	"math/big"
	"time"

	"github.com/podlace/podlace/pkg/kernel"
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
	ByAdmin bool `json:"byAdmin,omitempty"` // with podlace limits
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
	IngressRate  *json.Number `json:"ingressRate"`
	IngressBurst *json.Number `json:"ingressBurst"`
	EgressRate   *json.Number `json:"egressRate"`
	EgressBurst  *json.Number `json:"egressBurst"`
}

func (l rawLimits) empty() bool { return l == rawLimits{} }

type rawConfig struct {
	rawLimits
	MaxBurst        *json.Number    `json:"maxBurst"`
	Latency         string          `json:"latency"`
	ShapedSubnets   json.RawMessage `json:"shapedSubnets"`
	UnshapedSubnets json.RawMessage `json:"unshapedSubnets"`
	RuntimeConfig   struct {
		Bandwidth *rawLimits `json:"bandwidth"`
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
	c := Config{Latency: latency}
	if c.Asked.Ingress.Limit, err = readLimit("ingress", limits.IngressRate, limits.IngressBurst); err != nil {
		return Config{}, err
	}
	if c.Asked.Egress.Limit, err = readLimit("egress", limits.EgressRate, limits.EgressBurst); err != nil {
		return Config{}, err
	}
	if c.Ingress, err = c.Asked.Ingress.within(r, "ingress", static, maxBurst); err != nil {
		return Config{}, err
	}
	if c.Egress, err = c.Asked.Egress.within(r, "egress", static, maxBurst); err != nil {
		return Config{}, err
	}
	return c, nil
}

func readLimit(direction string, rawRate, rawBurst *json.Number) (l Limit, err error) {
	if l.Rate, err = number(direction+"Rate", rawRate); err == nil {
		l.Burst, err = number(direction+"Burst", rawBurst)
	}
	return l, err
}

// within refuses what a configuration may not have, and brings what a runtime asks for within bounds.
func (l Limit) within(r *plugin.Request, direction string, static bool, maxBurst uint64) (Limit, error) {
	rate, burst := l.Rate, l.Burst
	switch {
	case rate == 0 && burst > 0 && static:
		return Limit{}, plugin.Errorf(plugin.CodeConfig, "%sBurst %d: if burst is set, rate must also be set", direction, burst)
	case rate > 0 && burst == 0 && static:
		return Limit{}, plugin.WithHint(plugin.Errorf(plugin.CodeConfig, "%sRate %d: if rate is set, burst must also be set", direction, rate),
			"what a limit of the runtime would get is %d", Limit{Rate: rate}.shaper(1500, defaultLatency).Burst*8)
	case static && (rate < minRate || rate > maxRate) && rate != 0:
		return Limit{}, plugin.Errorf(plugin.CodeConfig, "%sRate %d: want %d-%d bits per second", direction, rate, minRate, uint64(maxRate))
	case rate == 0:
		return Limit{}, nil // runtimes send their burst whether there is a rate or not
	case static && burst/8 > maxBytes:
		return Limit{}, plugin.Errorf(plugin.CodeConfig, "%sBurst %d: want less than %d bits", direction, burst, uint64(maxBytes+1)*8)
	}
	limit := Limit{clampRate(r, direction, rate), burst}
	if !static && burst > mostBurst(limit.Rate, maxBurst) {
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

// number reads a count of bits.
func number(key string, n *json.Number) (uint64, error) {
	if n == nil || *n == "" {
		return 0, nil
	}
	v, ok := new(big.Int).SetString(n.String(), 10)
	if !ok || !v.IsUint64() {
		return 0, plugin.Errorf(plugin.CodeConfig, "%s %.40s: want a whole number of bits, not negative, below 2^64", key, n.String())
	}
	return v.Uint64(), nil
}

// A derived burst is what is sent in burstTime: enough for a timer that comes late. At least some full frames pass at once.
//
// A segment of up to 64 KiB that is longer than the burst is cut into frames before it waits (tbf_segment in net/sched/sch_tbf.c). That
// costs CPU, which only slow links can afford, and keeps their queue fine-grained. From 64 KiB of burst on segments wait whole, and a queue
// that cannot hold some of them would drop them for ever.
const (
	burstTime      = 4 * time.Millisecond
	burstFrames    = 4
	defaultLatency = 10 * time.Millisecond
	queueFrames    = 16
	segment        = 64<<10 + overhead
	queueSegments  = 2
	overhead       = 18 // Ethernet header and VLAN tag

	// longest is the time that a burst may take at the rate: the kernel keeps it in 2^32 ticks of 64 ns.
	longest = 274 * time.Second
)

// shaper turns a limit into a token bucket for a link with the MTU, in which a packet waits no longer than latency, or as long as what has to
// fit into any queue.
func (l Limit) shaper(mtu int, latency time.Duration) kernel.Shaper {
	frame := uint64(mtu + overhead)
	burst := l.Burst / 8
	if burst == 0 {
		burst = l.sentIn(burstTime)
	}
	burst = min(max(burst, burstFrames*frame), l.sentIn(longest), maxBytes)
	queue := max(l.sentIn(latency), queueFrames*frame)
	if burst >= segment {
		queue = max(queue, queueSegments*segment)
	}
	return kernel.Shaper{Rate: l.Rate, Burst: uint32(burst), Limit: uint32(min(queue, maxBytes))}
}

// sentIn returns the bytes that pass in a time. It cannot wrap: maxRate/8 in longest are less than 2^62 microbytes.
func (l Limit) sentIn(t time.Duration) uint64 { return l.Rate / 8 * uint64(t.Microseconds()) / 1e6 }
