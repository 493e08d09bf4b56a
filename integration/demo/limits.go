// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/podlace/podlace/integration/meter"
	"github.com/podlace/podlace/pkg/kernel"
)

const (
	meterPort = 5001
	// A plugin enforces a limit correctly if the rate in the first second is at most `mostAtFirst` times the limit. After the first second,
	// the rate must be between leastLater and mostLater times the limit. A rate outside these bounds is not a failure if pauses of the machine
	// can explain it.
	mostAtFirst = 1.20
	leastLater  = 0.90
	mostLater   = 1.05
	// The UDP sender sends at `overload` times the limit.
	overload = 4

	// The constants tcpTime and udpTime are the durations of the measured flows. Both are longer than one second, because a delayed receiver
	// counts some bytes of the first second only after this second.
	tcpTime = 3 * time.Second
	udpTime = 1500 * time.Millisecond
)

// A path describes a packet flow between two network namespaces. The demo checks a bandwidth limit with this flow.
type path struct {
	name     string
	protocol meter.Protocol
	took     time.Duration
	from     placeOf
	to       placeOf
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
		{"tcp pod-b to pod-a, IPv6", meter.TCP, tcpTime, fromB, fromA, a6, six},
	}
}

// stepsOfLimits returns the steps that check bandwidth limits. For each direction, one step checks the kernel's settings. For each path,
// two steps evaluate one packet flow. The first step sends the packets and evaluates the first second of the transfer. The second step
// evaluates the remaining time.
func stepsOfLimits() []step {
	const m = limit / 1e6
	first := fmt.Sprintf("at most %.1f Mbit/s", m*mostAtFirst)
	later := fmt.Sprintf("%.1f to %.1f Mbit/s", m*leastLater, m*mostLater)
	asked := fmt.Sprintf("asked for %.1f Mbit/s", m)
	steps := []step{
		{name: "limit into pod-a, as applied", want: asked, needs: []string{bandwidth},
			run: func(_ context.Context, l *lab) outcome { return checkApplied(l.a, ingressLink) }},
		{name: "limit out of pod-a, as applied", want: asked, needs: []string{bandwidth},
			run: func(_ context.Context, l *lab) outcome { return checkApplied(l.a, egressLink) }},
	}
	for _, p := range paths() {
		steps = append(steps,
			step{name: p.name + ", first second", want: first, needs: p.needs, run: func(ctx context.Context, l *lab) outcome {
				l.flows[p.name] = p.measure(ctx, l)
				return l.flows[p.name].evaluate(firstSecond, 0, mostAtFirst)
			}},
			step{name: p.name + ", after it", want: later, needs: p.needs, run: func(_ context.Context, l *lab) outcome {
				return l.flows[p.name].evaluate(afterwards, leastLater, mostLater)
			}})
	}
	return steps
}

// checkApplied compares the kernel's token bucket for one direction of a pod with the requested limit.
func checkApplied(p *pod, find func(*kernel.Node, kernel.Link, map[int]kernel.Bucket) (int, error)) outcome {
	bucket, err := bucketOf(p, find)
	if err != nil {
		return failed(err)
	}
	// The kernel stores the rate in whole bytes per second.
	return megabits(float64(bucket.Rate), limit-8, limit+8).withNote("burst %.0f kB", float64(bucket.Burst)/1e3)
}

func bucketOf(p *pod, find func(*kernel.Node, kernel.Link, map[int]kernel.Bucket) (int, error)) (bucket kernel.Bucket, err error) {
	host, err := kernel.Host()
	if err != nil {
		return bucket, err
	}
	defer host.Close()
	pod, err := os.Open(p.Path)
	if err != nil {
		return bucket, err
	}
	defer pod.Close()
	inside, err := kernel.Open(pod)
	if err != nil {
		return bucket, err
	}
	defer inside.Close()
	eth0, _, err := inside.Link(p.IfName)
	if err != nil {
		return bucket, err
	}
	peer, _, err := host.PeerOf(eth0, pod)
	if err != nil {
		return bucket, err
	}
	buckets, err := host.Buckets()
	if err != nil {
		return bucket, err
	}
	index, err := find(host, peer, buckets)
	return buckets[index], err
}

// ingressLink returns the index of the link whose token bucket limits the pod's ingress. The token bucket for ingress is on the peer of the
// pod's interface.
func ingressLink(_ *kernel.Node, peer kernel.Link, _ map[int]kernel.Bucket) (int, error) {
	return peer.Index, nil
}

// egressLink returns the index of the link whose token bucket limits the pod's egress. The kernel redirects the pod's egress packets from
// the peer of the pod's interface to another link. The egress token bucket is on this other link.
func egressLink(host *kernel.Node, peer kernel.Link, buckets map[int]kernel.Bucket) (int, error) {
	for index := range buckets {
		if have, err := host.Redirected(peer, kernel.Link{Index: index}); have == kernel.RedirectsAll || err != nil {
			return index, err
		}
	}
	return 0, fmt.Errorf("what %s receives is not redirected to a limit", peer.Name)
}

func (p path) measure(ctx context.Context, l *lab) measuredFlow {
	listen := p.listen(l)
	if !listen.IsValid() {
		return measuredFlow{err: errNoAddress}
	}
	result, err := meter.Run(ctx, meter.Flow{
		Protocol: p.protocol, From: p.from(l), To: p.to(l), Duration: p.took,
		Listen: netip.AddrPortFrom(listen, meterPort), Rate: overload * limit, Patience: patience,
	})
	return measuredFlow{result, err}
}

// evaluate() compares the measured rate with the limit. The rate includes the packet headers, because the kernel's limits apply to whole
// packets. A rate outside the bounds does not count as a failure if pauses of the machine can explain it.
func (m measuredFlow) evaluate(window func(meter.Result) (r meter.Rate, from, to time.Duration), least, most float64) outcome {
	if m.err != nil {
		return failed(m.err)
	}
	r, from, to := window(m.Result)
	o := megabits(r.Wire, least*limit, most*limit).withNote("payload %.1f Mbit/s", r.Payload/1e6)
	if low, high := m.Range(r.Wire, from, to); o.verdict == Miss && low <= most*limit && high >= least*limit {
		o.verdict = Info
		o = o.withNote("slow machine: it paused for %.1f of %.1f s", m.Paused.Seconds(), m.Duration.Seconds())
	}
	return o
}

func firstSecond(r meter.Result) (rate meter.Rate, from, to time.Duration) {
	return r.FirstSecond, 0, min(r.Duration, time.Second)
}

func afterwards(r meter.Result) (rate meter.Rate, from, to time.Duration) {
	if r.Duration <= time.Second {
		return r.Mean, 0, r.Duration
	}
	return r.Steady, time.Second, r.Duration
}
