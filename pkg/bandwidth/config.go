// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"cmp"
	"encoding/json"
	"math"
	"math/big"
	"time"

	"github.com/podlace/podlace/pkg/plugin"
)

// Both is a pair of values, for what the pod receives (ingress) and what it sends (egress).
type Both[T any] struct {
	Ingress T `json:"ingress,omitzero"`
	Egress  T `json:"egress,omitzero"`
}

// Limit is what the conflist, the runtime, the pod or an admin requested for one direction. A zero rate means no limit; a zero Burst is
// derived from the rate.
type Limit struct {
	Rate      uint64 `json:"rate"`                // bits per second
	Burst     uint64 `json:"burst,omitempty"`     // bits
	ByAdmin   bool   `json:"byAdmin,omitempty"`   // set with podlace limits
	Annotated bool   `json:"annotated,omitempty"` // the burst comes from the pod's annotation
}

// Config is the validated configuration of an ADD or CHECK.
type Config struct {
	Asked   Both[Limit]
	Allowed Both[Limit]   // Asked, adjusted to the bounds
	Latency time.Duration // maximum wait of a packet
}

// unlimited reports whether neither direction has a limit.
func (c Config) unlimited() bool { return c.Allowed == Both[Limit]{} }

// rawLimits has the JSON keys of the limits, both of the configuration and of runtimeConfig.bandwidth. A missing or null key is nil. Values
// are left to number, so that an error about a wrong type names the key.
type rawLimits struct {
	IngressRate  *json.RawMessage `json:"ingressRate"`
	IngressBurst *json.RawMessage `json:"ingressBurst"`
	EgressRate   *json.RawMessage `json:"egressRate"`
	EgressBurst  *json.RawMessage `json:"egressBurst"`
}

func (l rawLimits) empty() bool { return l == rawLimits{} }

type rawConfig struct {
	rawLimits
	MaxBurst        *json.RawMessage `json:"maxBurst"`
	Latency         string           `json:"latency"`
	ShapedSubnets   *json.RawMessage `json:"shapedSubnets"`
	UnshapedSubnets *json.RawMessage `json:"unshapedSubnets"`
	RuntimeConfig   struct {
		Bandwidth   *rawLimits        `json:"bandwidth"`
		Annotations map[string]string `json:"io.kubernetes.cri.pod-annotations"`
	} `json:"runtimeConfig"`
}

// A pod below minRate would seem to have no connection, and no interface exceeds maxRate. Rates of the runtime outside these bounds are
// clamped.
const (
	minRate = 1_000           // 1 kbit/s
	maxRate = 100_000_000_000 // 100 Gbit/s
)

// maxBytes is the maximum burst in bytes: tc stores a burst in 32 bits.
const maxBytes = math.MaxUint32

// Keys returns an empty configuration, from whose type plugin.SchemaOf derives the JSON schema.
func Keys() any { return rawConfig{} }

// Parse reads and validates the configuration of ADD, CHECK or STATUS. A limit in the conflist overrides all limits of the runtime.
func Parse(r *plugin.Request) (Config, error) {
	var raw rawConfig
	if err := r.Decode(&raw); err != nil {
		return Config{}, err
	}
	for key, value := range map[string]*json.RawMessage{"shapedSubnets": raw.ShapedSubnets, "unshapedSubnets": raw.UnshapedSubnets} {
		if value != nil {
			err := plugin.Errorf(plugin.CodeUnsupported, "%s %s: limits hold for all destinations", key, *value)
			return Config{}, plugin.WithHint(plugin.WithKey(key, err),
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
	limits, annotations := raw.rawLimits, map[string]string(nil)
	static := !limits.empty() || raw.RuntimeConfig.Bandwidth == nil
	if !static {
		limits, annotations = *raw.RuntimeConfig.Bandwidth, raw.RuntimeConfig.Annotations
	}
	c := Config{Latency: latency}
	if c.Asked.Ingress, err = requestedLimit("ingress", limits.IngressRate, limits.IngressBurst, annotations); err != nil {
		return Config{}, err
	}
	if c.Allowed.Ingress, err = c.Asked.Ingress.clamp(r, "ingress", static, maxBurst); err != nil {
		return Config{}, err
	}
	if c.Asked.Egress, err = requestedLimit("egress", limits.EgressRate, limits.EgressBurst, annotations); err != nil {
		return Config{}, err
	}
	if c.Allowed.Egress, err = c.Asked.Egress.clamp(r, "egress", static, maxBurst); err != nil {
		return Config{}, err
	}
	return c, nil
}

// annotation returns the name of the pod annotation for the burst of a direction in bits, for which Kubernetes has none.
func annotation(direction string) string { return "podlace.io/" + direction + "-burst" }

// requestedLimit returns the limit requested for a direction. A burst in a pod annotation overrides that of the runtime.
func requestedLimit(direction string, rate, burst *json.RawMessage, annotations map[string]string) (l Limit, err error) {
	if l.Rate, err = number(direction+"Rate", rate); err != nil {
		return l, err
	}
	if l.Burst, err = number(direction+"Burst", burst); err != nil {
		return l, err
	}
	key := annotation(direction)
	text, ok := annotations[key]
	if !ok {
		return l, nil
	}
	quantity, ok := parseQuantity(text)
	if !ok {
		return l, plugin.Errorf(plugin.CodeConfig, "annotation %s %.40q: want bits, such as 4M, 1.5Mi or 64000", key, text)
	}
	l.Annotated, l.Burst = true, math.MaxUint64
	if quantity.IsUint64() {
		l.Burst = quantity.Uint64()
	}
	return l, nil
}

// clamp returns an error for an invalid limit in the configuration file, but moves one of the runtime to the nearest bound.
func (l Limit) clamp(r *plugin.Request, direction string, static bool, maxBurst uint64) (Limit, error) {
	rate, burst := l.Rate, l.Burst
	switch {
	case rate == 0 && burst > 0 && static:
		return Limit{}, plugin.KeyErrorf(direction+"Burst", "%sBurst %d: if burst is set, %[1]sRate must also be set", direction, burst)
	case static && (rate < minRate || rate > maxRate) && rate != 0:
		return Limit{}, plugin.KeyErrorf(direction+"Rate", "%sRate %d: want %d-%d bits per second", direction, rate, minRate, uint64(maxRate))
	case rate > 0 && burst == 0 && static:
		return Limit{}, plugin.WithHint(plugin.KeyErrorf(direction+"Rate", "%sRate %d: if rate is set, %[1]sBurst must also be set", direction, rate),
			"a runtime's limit with this rate would get burst %d", Limit{Rate: rate}.bucket(1500, defaultLatency, false).Burst*8)
	case rate == 0:
		return Limit{}, nil // runtimes send their burst with or without a rate
	case static && burst/8 > maxBytes:
		return Limit{}, plugin.KeyErrorf(direction+"Burst", "%sBurst %d: want less than %d bits", direction, burst, uint64(maxBytes+1)*8)
	}
	if l.Rate = min(max(rate, minRate), maxRate); l.Rate != rate {
		r.Log.Warn("rate, in bits per second, is out of bounds and was clamped", "direction", direction, "asked", rate, "applied", l.Rate)
	}
	switch most := cmp.Or(maxBurst, l.Rate); { // without maxBurst in the conflist, the limit is one second at the rate
	case static || burst <= most:
	case l.Annotated:
		l.Burst = most
		r.Log.Warn("burst, in bits, is out of bounds and was clamped", "annotation", annotation(direction), "asked", burst, "applied", most)
	default:
		// Without an annotation, runtimes send a burst that means "unlimited": 2^32-1, 2^31-1 or 2^35-9 bits. At least the first quarter of a
		// gigabyte would pass without any limit.
		r.Log.Debug("burst of the runtime means unlimited; deriving one from the rate", "direction", direction, "burst", burst)
		l.Burst = 0
	}
	return l, nil
}

// Timers are too imprecise for a latency below minLatency, and above maxLatency, senders would time out before their packets leave the
// queue.
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
		return 0, plugin.KeyErrorf("latency", "latency %.40q: want a time with its unit, such as 10ms, between %s and %s", text, minLatency,
			maxLatency)
	}
	return latency, nil
}

// number parses a JSON number of bits.
func number(key string, raw *json.RawMessage) (uint64, error) {
	if raw == nil {
		return 0, nil
	}
	v, ok := new(big.Int).SetString(string(*raw), 10)
	if !ok || !v.IsUint64() {
		return 0, plugin.KeyErrorf(key, "%s %.40s: want a whole number of bits, not negative, below 2^64", key, string(*raw))
	}
	return v.Uint64(), nil
}
