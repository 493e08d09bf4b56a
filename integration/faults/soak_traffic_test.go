// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"net"
	"net/netip"
	"time"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/meter"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

func (s *soakRun) checkServer(from *sandbox.Pod, protocol, address, port, want string) {
	s.Helper()
	got, err := harness.Ask(from, protocol, net.JoinHostPort(address, port), harness.TrafficLimit)
	if got != want || err != nil {
		s.Errorf("%s %s -> %s port %s: %q answers, want %q (%v)", protocol, harness.NameOf(from), address, port, got, want, err)
	}
}

// checkTraffic checks all permitted traffic of a pod, except to pods on the same bridge.
func (s *soakRun) checkTraffic(a *podSlot) {
	s.Helper()
	outside := [2]string{harness.LANV4, harness.LANV6}
	node := [2]string{harness.NodeV4, harness.NodeV6}
	gateway := [2]string{a.network.gateway4, a.network.gateway6}
	for family, ip := range a.ips {
		s.checkServer(nil, "tcp", ip, "80", a.pod.Name)
		s.checkServer(nil, "udp", ip, "80", a.pod.Name)
		s.checkServer(a.pod, "tcp", outside[family], "7000", node[family]) // through masquerade
		s.checkServer(a.pod, "udp", gateway[family], "7001", "host")
		if other := s.podElsewhere(a); other != nil {
			s.checkServer(a.pod, "tcp", other.ips[family], "80", other.pod.Name)
		}
		if !a.ports {
			continue
		}
		for _, protocol := range []string{"tcp", "udp"} {
			s.checkServer(nil, protocol, node[family], a.port(), a.pod.Name)
			s.checkServer(s.lan, protocol, node[family], a.port(), a.pod.Name)
			if family == 0 {
				s.checkServer(nil, protocol, "127.0.0.1", a.port(), a.pod.Name)
			}
		}
	}
}

// podElsewhere returns a pod of the other network, or nil. The node routes between the two, so the pods need no neighbour entry for each
// other.
func (s *soakRun) podElsewhere(a *podSlot) *podSlot {
	var list []*podSlot
	for _, other := range s.livePods() {
		if other.network != a.network && len(other.lost) == 0 { // a pod that lost a record may lack state that only the record contains
			list = append(list, other)
		}
	}
	if len(list) == 0 {
		return nil
	}
	return list[a.slot%len(list)]
}

// checkNeighbours checks traffic between some pods of one bridge. All pairs would be too many, because all namespaces of a machine share a
// neighbour table of 1,024 entries.
func (s *soakRun) checkNeighbours() {
	s.Helper()
	live := s.livePods()
	for range min(12, len(live)) {
		a, b := live[s.random.IntN(len(live))], live[s.random.IntN(len(live))]
		if a == b || a.network != b.network {
			continue
		}
		for _, ip := range b.ips {
			s.checkServer(a.pod, "tcp", ip, "80", b.pod.Name)
		}
	}
}

// measureLimits measures whether a pod's limits are effective.
func (s *soakRun) measureLimits() {
	s.Helper()
	a := s.randomPod(limited)
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
