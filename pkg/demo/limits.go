// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"context"
	"fmt"
	"net/netip"
	"time"

	"github.com/podlace/podlace/pkg/meter"
)

const (
	meterPort = 5001
	// A limit holds when the link carries no more than this share of it in the
	// first second, and stays between the other two afterwards.
	mostAtFirst = 1.20
	leastLater  = 0.90
	mostLater   = 1.05
	// UDP is offered at this multiple of the limit.
	overload = 4

	tcpTime = 2 * time.Second
	udpTime = 1500 * time.Millisecond
)

// A path is one direction in which a limit must hold.
type path struct {
	name     string
	protocol meter.Protocol
	took     time.Duration
	from     outOf
	to       outOf
	listen   func(*lab) netip.Addr
	needs    []string
}

func paths() []path {
	node := func(*lab) netip.Addr { return nodeV4() }
	a := func(l *lab) netip.Addr { return l.a.v4 }
	b := func(l *lab) netip.Addr { return l.b.v4 }
	a6 := func(l *lab) netip.Addr { return l.a.v6 }
	four, six := []string{bandwidth, gateway, ipv4}, []string{bandwidth, ipv6}
	return []path{
		{"tcp host to pod-a", meter.TCP, tcpTime, fromHost, fromA, a, four},
		{"tcp pod-a to host", meter.TCP, tcpTime, fromA, fromHost, node, four},
		{"udp host to pod-b", meter.UDP, udpTime, fromHost, fromB, b, four},
		{"udp pod-b to host", meter.UDP, udpTime, fromB, fromHost, node, four},
		{"tcp pod-b to pod-a, IPv6", meter.TCP, udpTime, fromB, fromA, a6, six},
	}
}

// stepsOfLimits gives two rows for each path: the first runs the flow, both
// judge it.
func stepsOfLimits() []step {
	const m = limit / 1e6
	first := fmt.Sprintf("at most %.1f Mbit/s", m*mostAtFirst)
	later := fmt.Sprintf("%.1f to %.1f Mbit/s", m*leastLater, m*mostLater)
	var steps []step
	for _, p := range paths() {
		steps = append(steps,
			step{name: p.name + ", first second", want: first, needs: p.needs, run: func(ctx context.Context, l *lab) outcome {
				l.flows[p.name] = p.measure(ctx, l)
				return l.flows[p.name].judge(firstSecond, 0, mostAtFirst)
			}},
			step{name: p.name + ", after it", want: later, needs: p.needs, run: func(_ context.Context, l *lab) outcome {
				return l.flows[p.name].judge(afterwards, leastLater, mostLater)
			}})
	}
	return steps
}

func (p path) measure(ctx context.Context, l *lab) measured {
	listen := p.listen(l)
	if !listen.IsValid() {
		return measured{err: errNoAddress}
	}
	result, err := meter.Run(ctx, meter.Flow{
		Protocol: p.protocol, From: p.from(l), To: p.to(l), Duration: p.took,
		Listen: netip.AddrPortFrom(listen, meterPort), Rate: overload * limit,
	})
	return measured{result, err}
}

// judge looks at the load of the link, headers included: that is what a limit
// means.
func (m measured) judge(rate func(meter.Result) meter.Rate, least, most float64) outcome {
	if m.err != nil {
		return failed(m.err)
	}
	r := rate(m.Result)
	return megabits(r.Wire, least*limit, most*limit).withNote("payload %.1f Mbit/s", r.Payload/1e6)
}

func firstSecond(r meter.Result) meter.Rate { return r.FirstSecond }
func afterwards(r meter.Result) meter.Rate  { return r.Steady }
