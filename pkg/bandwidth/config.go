// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"encoding/json"
	"math"
	"math/big"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// Limit is what is asked for one direction: bits per second and bits. A zero burst is derived from the rate.
type Limit struct{ Rate, Burst uint64 }

// Config is the validated configuration of an ADD or CHECK. The directions are the pod's: ingress is what it receives.
type Config struct{ Ingress, Egress Limit }

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
	limits, static := raw.rawLimits, true
	if limits.empty() && raw.RuntimeConfig.Bandwidth != nil {
		limits, static = *raw.RuntimeConfig.Bandwidth, false
	}
	var c Config
	if c.Ingress, err = parseLimit(r, "ingress", limits.IngressRate, limits.IngressBurst, static, maxBurst); err != nil {
		return Config{}, err
	}
	c.Egress, err = parseLimit(r, "egress", limits.EgressRate, limits.EgressBurst, static, maxBurst)
	return c, err
}

func parseLimit(r *plugin.Request, direction string, rawRate, rawBurst *json.Number, static bool, maxBurst uint64) (Limit, error) {
	rate, err := number(direction+"Rate", rawRate)
	if err != nil {
		return Limit{}, err
	}
	burst, err := number(direction+"Burst", rawBurst)
	if err != nil {
		return Limit{}, err
	}
	switch {
	case rate == 0 && burst > 0 && static:
		return Limit{}, plugin.Errorf(plugin.CodeConfig, "%sBurst %d: if burst is set, rate must also be set", direction, burst)
	case rate > 0 && burst == 0 && static:
		return Limit{}, plugin.WithHint(plugin.Errorf(plugin.CodeConfig, "%sRate %d: if rate is set, burst must also be set", direction, rate),
			"what a limit of the runtime would get is %d", Limit{Rate: rate}.shaper(1500).Burst*8)
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

// The queue holds what arrives in queueTime at the rate, and at least some full frames; a derived burst is what is sent in
// burstTime, and at least some full frames. Below 64 kB of burst the kernel cuts large segments into frames (tbf_segment), so that
// a small burst costs CPU, which only slow links can afford.
const (
	queueTime  = 50 // milliseconds
	burstTime  = 10 // milliseconds
	minFrames  = 8
	queueFrame = 20
	overhead   = 18 // Ethernet header and VLAN tag

	// longest is the time in seconds that a burst may take at the rate: the kernel keeps it in 2^32 ticks of 64 ns.
	longest = 274
)

// shaper turns a limit into a token bucket for a link with the MTU.
func (l Limit) shaper(mtu int) kernel.Shaper {
	frame := uint64(mtu + overhead)
	burst := l.Burst / 8
	if burst == 0 {
		burst = l.Rate / 8 * burstTime / 1000
	}
	burst = min(max(burst, minFrames*frame), l.Rate/8*longest, maxBytes)
	queue := max(l.Rate/8*queueTime/1000, queueFrame*frame)
	return kernel.Shaper{Rate: l.Rate, Burst: uint32(burst), Limit: uint32(min(queue, maxBytes))}
}
