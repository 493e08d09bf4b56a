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
	// A correct limit lets at most mostAtFirst times the rate pass in the first second, and between leastLater and mostLater times later. A
	// rate outside these bounds is no failure if pauses of the machine can explain it.
	mostAtFirst = 1.20
	leastLater  = 0.90
	mostLater   = 1.05
	// The UDP sender sends at overload times the limit.
	overload = 4

	// The durations of the flows. They are longer than one second, because a delayed receiver counts bytes of the first second only later.
	tcpTime = 3 * time.Second
	udpTime = 1500 * time.Millisecond
)

// A path is a flow between two namespaces with which a limit is checked.
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

// stepsOfLimits returns the steps that check limits: for each direction the kernel's settings, and for each path the first second of a flow
// and then its remaining time.
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

// checkApplied compares the kernel's token bucket for one direction with the requested limit.
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

// ingressLink returns the index of the link whose token bucket limits the pod's ingress: the peer of its interface.
func ingressLink(_ *kernel.Node, peer kernel.Link, _ map[int]kernel.Bucket) (int, error) {
	return peer.Index, nil
}

// egressLink returns the index of the link whose token bucket limits the pod's egress: the one to which the kernel redirects packets from
// the peer of the pod's interface.
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

// evaluate compares the measured rate with the limit. The rate includes packet headers, as the kernel's limits do. A rate outside the
// bounds is no failure if pauses of the machine can explain it.
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
