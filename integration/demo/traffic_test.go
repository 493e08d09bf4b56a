// SPDX-License-Identifier: Apache-2.0

package main

import (
	"errors"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/meter"
	"github.com/podlace/podlace/pkg/cli/sandbox"
	"github.com/podlace/podlace/pkg/kernel"
)

// outside returns a client that a veth pair connects to the node, as in the demo.
func outside(t *testing.T) *sandbox.Pod {
	t.Helper()
	client, err := sandbox.NewPod("client")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// Without DelLink, the kernel would delete the veth pair with the namespace, but only some time later.
		if host, err := kernel.Host(); err == nil {
			_ = host.DelLink(nodeSide)
			host.Close()
		}
		_ = client.Close()
	})
	if err := connect(client, ipv6Error() == nil); err != nil {
		t.Fatal(err)
	}
	return client
}

func addresses() []netip.Addr {
	if ipv6Error() != nil {
		return []netip.Addr{nodeV4()}
	}
	return []netip.Addr{nodeV4(), nodeV6()}
}

func TestTrafficWithTheClient(t *testing.T) {
	client := outside(t)
	s, err := serve(meter.Here, "node")
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	sources := map[netip.Addr]netip.Addr{nodeV4(): clientV4(), nodeV6(): clientV6()}
	for _, addr := range addresses() {
		for network, port := range map[string]uint16{"tcp": httpPort, "udp": dnsPort} {
			got, err := ask(t.Context(), client.Do, network, netip.AddrPortFrom(addr, port))
			if err != nil {
				t.Errorf("%s to %s: %v", network, addr, err)
				continue
			}
			if got.name != "node" || got.seen != sources[addr] {
				t.Errorf("%s to %s: got %+v", network, addr, got)
			}
		}
		ping := meter.Flow{From: client.Do, Listen: netip.AddrPortFrom(addr, 0), Duration: 3 * meter.PingInterval}
		trips, err := meter.Ping(t.Context(), ping)
		if err != nil || trips.Sent != 3 || trips.Lost != 0 || slices.Min(trips.Samples) <= 0 {
			t.Errorf("ping %s: %+v, %v", addr, trips, err)
		}
	}
	silent := nodeV4().Next().Next()
	ping := meter.Flow{From: client.Do, Listen: netip.AddrPortFrom(silent, 0), Duration: meter.PingInterval}
	if got, err := meter.Ping(t.Context(), ping); err != nil || got.Sent != 1 || got.Lost != 1 {
		t.Errorf("ping of an address without a host: %+v, %v, want one echo sent and no reply", got, err)
	}
	if got, err := ask(t.Context(), client.Do, "tcp", netip.AddrPortFrom(nodeV4(), hostHTTP)); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("a port without a server: %+v, %v, want %v", got, err, syscall.ECONNREFUSED)
	}
}

func TestReachAndMasqueradeMiss(t *testing.T) {
	l := playedLab(t)
	l.client = outside(t)
	s, err := serve(meter.Here, "pod-a")
	if err != nil {
		t.Fatal(err)
	}
	defer s.close()
	target := netip.AddrPortFrom(nodeV4(), httpPort)
	for name, test := range map[string]struct {
		run  outcome
		want Verdict
	}{
		"right pod, right source": {reachA(fromClient, "tcp", target, clientV4)(t.Context(), l), OK},
		"right pod, wrong source": {reachA(fromClient, "tcp", target, nodeV4)(t.Context(), l), Miss},
		"any source":              {reachA(fromHost, "tcp", target, anySource)(t.Context(), l), OK},
		"no way":                  {reachA(fromA, "tcp", target, anySource)(t.Context(), l), Miss},
		"no way out":              {masquerade(fromA, clientV4, nodeV4)(t.Context(), l), Miss},
		"no address":              {pingA(func(p *pod) netip.Addr { return p.v4 })(t.Context(), l), Miss},
	} {
		if test.run.verdict != test.want {
			t.Errorf("%s: got %+v, want %s", name, test.run, test.want)
		}
	}
	for source, want := range map[netip.Addr]Verdict{nodeV4(): OK, clientV4(): Miss} {
		got := masquerade(fromHost, clientV4, func() netip.Addr { return source })(t.Context(), l)
		if got.verdict != want {
			t.Errorf("seen as %s: %+v", source, got)
		}
	}
	l.a.Name = "pod-z"
	if got := reachA(fromClient, "tcp", target, clientV4)(t.Context(), l); got.verdict != Miss {
		t.Errorf("another pod: %+v", got)
	}
}

func TestLimitsMissOnAnOpenLink(t *testing.T) {
	l := playedLab(t)
	p := path{
		protocol: meter.TCP, took: 200 * time.Millisecond, from: fromHost, to: fromHost,
		listen: func(*lab) netip.Addr { return netip.MustParseAddr("127.0.0.1") },
	}
	flow := p.measure(t.Context(), l)
	if got := flow.evaluate(firstSecond, 0, mostAtFirst); got.verdict != Miss {
		t.Errorf("first second: %+v", got)
	}
	if got := flow.evaluate(afterwards, leastLater, mostLater); got.verdict != Miss {
		t.Errorf("afterwards: %+v", got)
	}
	p.listen = func(*lab) netip.Addr { return netip.Addr{} }
	if got := p.measure(t.Context(), l).evaluate(firstSecond, 0, mostAtFirst); got.verdict != Miss {
		t.Errorf("no address: %+v", got)
	}
}

func TestJudge(t *testing.T) {
	const ms = time.Millisecond
	for _, test := range []struct {
		first, later float64
		lead, paused time.Duration
		want         [2]Verdict
	}{
		{24e6, 20e6, 0, 0, [2]Verdict{OK, OK}},
		{24.1e6, 21.1e6, 0, 0, [2]Verdict{Miss, Miss}},
		{1e6, 17.9e6, 0, 0, [2]Verdict{OK, Miss}},
		{24.1e6, 21.1e6, 100 * ms, 0, [2]Verdict{Info, Info}}, // the receiver started late and read the earlier bytes at once
		{20e6, 16.6e6, 0, 326 * ms, [2]Verdict{OK, Info}},
		{20e6, 2e6, 0, 150 * ms, [2]Verdict{OK, Miss}}, // pauses of 150 ms in 3 s do not explain a tenth of the rate
		{4000e6, 4000e6, 100 * ms, time.Second, [2]Verdict{Miss, Miss}},
		{24.1e6, 20e6, 0, time.Second, [2]Verdict{Miss, OK}}, // pauses cannot explain a burst at the beginning
		{0, 0, 0, 0, [2]Verdict{OK, Miss}},
	} {
		m := measuredFlow{Result: meter.Result{
			FirstSecond: meter.Rate{Wire: test.first}, Steady: meter.Rate{Wire: test.later}, Duration: 3 * time.Second, Lead: test.lead,
			Paused: test.paused,
		}}
		first, later := m.evaluate(firstSecond, 0, mostAtFirst), m.evaluate(afterwards, leastLater, mostLater)
		if got := [2]Verdict{first.verdict, later.verdict}; got != test.want {
			t.Errorf("%.1f then %.1f Mbit/s, lead %v, paused %v: got %v, want %v", test.first/1e6, test.later/1e6, test.lead, test.paused, got,
				test.want)
		}
		for _, o := range []outcome{first, later} {
			if slow := strings.Contains(o.note, "slow machine: "); slow != (o.verdict == Info) {
				t.Errorf("verdict %s with the note %q", o.verdict, o.note)
			}
		}
	}
}
