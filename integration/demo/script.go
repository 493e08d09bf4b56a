// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"github.com/podlace/podlace/integration/meter"
)

// Features that a step may need and a machine or configuration may lack.
const (
	portmap      = "portmap"
	bandwidth    = "bandwidth"
	ipv4         = "IPv4"
	ipv6         = "IPv6"
	gateway      = "gateway"
	masquerading = "masquerading"
	brNetfilter  = "br_netfilter"
)

// The steps whose times PrintTimes compares.
const (
	addRow = "ADD pod-a, all plugins"
	delRow = "DEL pod-a, all plugins"
)

const (
	addTime = 100 * time.Millisecond // expected maximum time of the whole chain, unless the machine is slow
	delTime = 150 * time.Millisecond
	pings   = 20
)

// script returns all steps in order. Some depend on the results of earlier ones.
func script(plugins []string) []step {
	var steps []step
	steps = append(steps, stepsOfADD(plugins)...)
	steps = append(steps, stepsOfReach()...)
	steps = append(steps, stepsOfHostPort()...)
	steps = append(steps, stepsOfMasquerade()...)
	steps = append(steps, stepsOfLimits()...)
	return append(steps, stepsOfTheEnd()...)
}

func stepsOfADD(plugins []string) []step {
	steps := []step{
		{name: "ADD and DEL, first pod of the node", want: "both work", run: warmUp},
		{name: addRow, want: "succeeds", run: addPod(func(l *lab) *pod { return l.a })},
	}
	for _, p := range plugins {
		steps = append(steps, step{name: "  " + p, needs: []string{p}, run: timeOf(p)})
	}
	return append(steps,
		step{name: "ADD pod-b, all plugins", want: "succeeds", run: addPod(func(l *lab) *pod { return l.b })},
		step{name: "lo of pod-a by the loopback plugin", want: "127.0.0.1 answers", run: loopbackAnswers},
	)
}

func stepsOfReach() []step {
	none := "none lost"
	return []step{
		{name: "ping pod-b to pod-a, IPv4", want: none, needs: []string{ipv4}, run: pingA(func(p *pod) netip.Addr { return p.v4 })},
		{name: "ping pod-b to pod-a, IPv6", want: none, needs: []string{ipv6}, run: pingA(func(p *pod) netip.Addr { return p.v6 })},
	}
}

func stepsOfHostPort() []step {
	http4 := netip.AddrPortFrom(nodeV4(), hostHTTP)
	http6 := netip.AddrPortFrom(nodeV6(), hostHTTP)
	dns4 := netip.AddrPortFrom(nodeV4(), hostDNS)
	dns6 := netip.AddrPortFrom(nodeV6(), hostDNS)
	local4 := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), hostHTTP)
	reply, preserved := "pod-a replies", "pod-a replies, sees the client"
	four, six := []string{portmap, gateway, ipv4}, []string{portmap, gateway, ipv6}
	steps := []step{
		{name: "hostPort tcp from the host", want: reply, needs: four, run: reachA(fromHost, "tcp", http4, anySource)},
		{name: "hostPort tcp from 127.0.0.1", want: reply, needs: four, run: reachA(fromHost, "tcp", local4, anySource)},
		{name: "hostPort tcp from outside", want: preserved, needs: four, run: reachA(fromClient, "tcp", http4, clientV4)},
		{name: "hostPort tcp from pod-a itself (hairpin)", want: reply, needs: four, run: reachA(fromA, "tcp", http4, anySource)},
		{name: "hostPort tcp from pod-b", want: reply, needs: four, run: reachA(fromB, "tcp", http4, anySource)},
		{name: "hostPort udp from outside", want: preserved, needs: four, run: reachA(fromClient, "udp", dns4, clientV4)},
		{name: "hostPort tcp from outside, IPv6", want: preserved, needs: six, run: reachA(fromClient, "tcp", http6, clientV6)},
		{name: "hostPort udp from outside, IPv6", want: preserved, needs: six, run: reachA(fromClient, "udp", dns6, clientV6)},
		{name: "hostPort tcp from pod-b, IPv6", want: reply, needs: six, run: reachA(fromB, "tcp", http6, anySource)},
	}
	return append(steps,
		step{
			name: "hostPort tcp from pod-a itself, br_netfilter on", want: reply, needs: append(four, brNetfilter),
			run: withBridgeNetfilter(reachA(fromA, "tcp", http4, anySource)),
		},
		step{
			name: "hostPort tcp from pod-b, br_netfilter on", want: reply, needs: append(four, brNetfilter),
			run: withBridgeNetfilter(reachA(fromB, "tcp", http4, anySource)),
		})
}

func stepsOfMasquerade() []step {
	four, six := []string{masquerading, gateway, ipv4}, []string{masquerading, gateway, ipv6}
	return []step{
		{name: "pod-a to outside, IPv4", want: "seen as " + nodeV4().String(), needs: four, run: masquerade(fromA, clientV4, nodeV4)},
		{name: "pod-a to outside, IPv6", want: "seen as " + nodeV6().String(), needs: six, run: masquerade(fromA, clientV6, nodeV6)},
	}
}

func stepsOfTheEnd() []step {
	a, b := func(l *lab) *pod { return l.a }, func(l *lab) *pod { return l.b }
	return []step{
		{name: "CHECK pod-a", want: "clean", run: checkPod(a)},
		{name: "CHECK pod-b", want: "clean", run: checkPod(b)},
		{name: "ADD with hostPort 70000", want: "coded error names the pod", needs: []string{portmap}, run: addInvalidPort},
		{name: delRow, want: "succeeds", run: delPod(a)},
		{name: "DEL pod-a again", want: "succeeds", run: delAgain(a)},
		{name: "DEL pod-b after its namespace is gone", want: "succeeds", run: delGone},
		{name: "leftovers", want: "0", run: leftovers},
	}
}

// A placeOf function selects a namespace of the lab. It returns a function that calls its argument inside this namespace.
type placeOf func(*lab) func(func() error) error

func fromHost(*lab) func(func() error) error     { return func(f func() error) error { return f() } }
func fromClient(l *lab) func(func() error) error { return l.client.Do }
func fromA(l *lab) func(func() error) error      { return l.a.Do }
func fromB(l *lab) func(func() error) error      { return l.b.Do }

// anySource returns the zero address, which accepts any source.
func anySource() netip.Addr { return netip.Addr{} }

func pingA(addr func(*pod) netip.Addr) func(context.Context, *lab) outcome {
	return func(ctx context.Context, l *lab) outcome {
		if !addr(l.a).IsValid() {
			return failed(errNoAddress)
		}
		r, err := meter.Ping(ctx, meter.Flow{
			From: l.b.Do, Listen: netip.AddrPortFrom(addr(l.a), 0), Duration: pings * meter.PingInterval, Patience: patience,
		})
		if err != nil {
			return failed(err)
		}
		o := verdictFor(r.Lost == 0, fmt.Sprintf("%d of %d lost", r.Lost, r.Sent))
		o.value, o.unit = float64(r.Lost), "lost"
		if len(r.Samples) == 0 {
			return o
		}
		return o.withNote("fastest %.3f ms", float64(slices.Min(r.Samples))/float64(time.Millisecond))
	}
}

// reachA connects to pod-a and checks the source address that it reports.
func reachA(from placeOf, network string, target netip.AddrPort, source func() netip.Addr) func(context.Context, *lab) outcome {
	return func(ctx context.Context, l *lab) outcome {
		got, err := ask(ctx, from(l), network, target)
		if err != nil {
			return outcome{verdict: Miss, measured: "no reply", note: err.Error()}
		}
		want := source()
		good := got.name == l.a.Name && (!want.IsValid() || got.seen == want)
		o := verdictFor(good, fmt.Sprintf("%s, %.1f ms", got.name, float64(got.took)/float64(time.Millisecond)))
		return o.withNote("pod saw %s", got.seen)
	}
}

func withBridgeNetfilter(run func(context.Context, *lab) outcome) func(context.Context, *lab) outcome {
	return func(ctx context.Context, l *lab) outcome {
		if err := bridgeNetfilter(true); err != nil {
			return failed(err)
		}
		o := run(ctx, l)
		if err := bridgeNetfilter(false); err != nil {
			return failed(err)
		}
		return o
	}
}

// masquerade connects to a server outside the node, which must see the node's address as the source.
func masquerade(from placeOf, target, source func() netip.Addr) func(context.Context, *lab) outcome {
	return func(ctx context.Context, l *lab) outcome {
		outside, err := serve(l.client.Do, "client")
		if err != nil {
			return failed(err)
		}
		defer outside.close()
		got, err := ask(ctx, from(l), "tcp", netip.AddrPortFrom(target(), httpPort))
		if err != nil {
			return outcome{verdict: Miss, measured: "no reply", note: err.Error()}
		}
		return verdictFor(got.seen == source(), "seen as "+got.seen.String())
	}
}

func loopbackAnswers(ctx context.Context, l *lab) outcome {
	lo := l.a.Attachment
	lo.IfName, lo.Ports, lo.Limit = "lo", nil, 0
	if _, _, err := l.loopback.add(ctx, lo); err != nil {
		return failed(err)
	}
	got, err := ask(ctx, l.a.Do, "tcp", netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), httpPort))
	if err != nil {
		return failed(err)
	}
	return verdictFor(got.name == l.a.Name, strings.TrimSpace(got.name+" answers"))
}
