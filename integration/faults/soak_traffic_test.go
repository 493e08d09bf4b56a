// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"net"
	"net/netip"
	"time"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/pkg/meter"
	"github.com/podlace/podlace/pkg/sandbox"
)

// attempts is the number of tries of a probe. A machine under load may lose a packet.
const attempts = 3

// asks checks that the server with a given name answers.
func (s *soak) asks(from *sandbox.Pod, protocol, address, port, want string) {
	s.Helper()
	var got string
	var err error
	for range attempts {
		if got, err = harness.Ask(from, protocol, net.JoinHostPort(address, port), harness.TrafficLimit); err == nil {
			break
		}
	}
	if got != want || err != nil {
		s.Errorf("%s %s -> %s port %s: %q answers, want %q (%v)", protocol, harness.NameOf(from), address, port, got, want, err)
	}
}

// reachable checks all of a pod's permitted traffic, except that to its neighbours.
func (s *soak) reachable(a *actor) {
	s.Helper()
	outside := [2]string{harness.LANV4, harness.LANV6}
	node := [2]string{harness.NodeV4, harness.NodeV6}
	gateway := [2]string{a.network.gateway4, a.network.gateway6}
	for family, ip := range a.ips {
		s.asks(nil, "tcp", ip, "80", a.pod.Name)
		s.asks(nil, "udp", ip, "80", a.pod.Name)
		s.asks(a.pod, "tcp", outside[family], "7000", node[family]) // through masquerade
		s.asks(a.pod, "udp", gateway[family], "7001", "host")
		if other := s.elsewhere(a); other != nil {
			s.asks(a.pod, "tcp", other.ips[family], "80", other.pod.Name)
		}
		if !a.ports {
			continue
		}
		for _, protocol := range []string{"tcp", "udp"} {
			s.asks(nil, protocol, node[family], a.port(), a.pod.Name)
			s.asks(s.lan, protocol, node[family], a.port(), a.pod.Name)
			if family == 0 {
				s.asks(nil, protocol, "127.0.0.1", a.port(), a.pod.Name)
			}
		}
	}
}

// elsewhere returns a pod of the other network, or nil if there is none. The path to it leads through the node, so it needs no
// additional neighbour entry.
func (s *soak) elsewhere(a *actor) *actor {
	var list []*actor
	for _, other := range s.live() {
		if other.network != a.network && len(other.lost) == 0 { // a pod that lost a record may lack state that only the record names
			list = append(list, other)
		}
	}
	if len(list) == 0 {
		return nil
	}
	return list[a.slot%len(list)]
}

// neighbours checks the traffic between some pods of one bridge. All network namespaces of a machine share the neighbour table of
// 1,024 entries, so the test does not connect every pair of pods.
func (s *soak) neighbours() {
	s.Helper()
	live := s.live()
	for range min(12, len(live)) {
		a, b := live[s.random.IntN(len(live))], live[s.random.IntN(len(live))]
		if a == b || a.network != b.network {
			continue
		}
		for _, ip := range b.ips {
			s.asks(a.pod, "tcp", ip, "80", b.pod.Name)
		}
	}
}

// measured checks that a pod's limits are effective.
func (s *soak) measured() {
	s.Helper()
	a := s.some(limited)
	if a == nil {
		return
	}
	for what, c := range map[string]struct {
		flow meter.Flow
		mbit int
	}{
		"receives": {meter.Flow{To: a.pod.Do, Listen: netip.AddrPortFrom(netip.MustParseAddr(a.ips[0]), 0)}, a.limits.Ingress},
		"sends":    {meter.Flow{From: a.pod.Do, Listen: netip.AddrPortFrom(netip.MustParseAddr(a.network.gateway4), 0)}, a.limits.Egress},
	} {
		c.flow.Protocol, c.flow.Duration, c.flow.Rate = meter.UDP, time.Second/2, 3e6*float64(c.mbit)
		r, err := meter.Run(s.Context(), c.flow)
		if got := r.Mean.Wire / 1e6; err != nil || got <= 0 || got > 1.2*float64(c.mbit) {
			s.Errorf("%s %s %.2f Mbit/s, %v; want at most %d", a, what, got, err, c.mbit)
		}
	}
}
