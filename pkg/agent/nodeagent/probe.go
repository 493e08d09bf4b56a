// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/podlace/podlace/pkg/agent/noderoutes"
)

const (
	probeRound = 32 // podCIDRs in a round
	probeTries = 3  // datagrams to an address; the kernel of the peer may answer only one in a second
	probeWait  = time.Second
	probePort  = 33434 // of UDP, where nothing listens, as for traceroute(8)
)

// prober asks the gateway addresses of peers in turn whether they answer. A peer has the address, the first one of its podCIDR, from the
// first pod after its boot on, so only one that has answered since then can be silent.
type prober struct {
	log   *slog.Logger
	nodes *nodes
	ask   func(context.Context, netip.Addr) bool

	mu    sync.Mutex
	peers []PeerStatus            // with a route, in the order of probes
	next  int                     // index of the first peer of the next round
	last  map[netip.Prefix]answer // of podCIDRs that have answered
}

// answer is the last probe of a gateway address that has answered during a boot of its node.
type answer struct {
	boot string
	yes  bool
}

func newProber(n *nodes, log *slog.Logger) *prober {
	return &prober{log: log, nodes: n, ask: answersUDP, last: map[netip.Prefix]answer{}}
}

// mark sets the peers to probe, which are those with a route of this agent, and returns all peers with the state of the silent ones.
func (p *prober) mark(peers []PeerStatus) []PeerStatus {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.peers, peers = nil, slices.Clone(peers)
	answers := p.last
	p.last = map[netip.Prefix]answer{} // without podCIDRs of deleted nodes
	for i, s := range peers {
		last, known := answers[s.PodCIDR]
		if known {
			p.last[s.PodCIDR] = last
		}
		if s.State != noderoutes.Direct && s.State != noderoutes.Tunneled {
			continue
		}
		p.peers = append(p.peers, s)
		boot, ready := p.nodes.boot(s.Name)
		switch {
		case !known || last.boot != boot:
		case last.yes:
			peers[i].Answers = "yes"
		default:
			peers[i].Answers = "no"
			if ready {
				peers[i].State, peers[i].Reason = noderoutes.Silent, s.PodCIDR.Addr().Next().String()+" has answered before, and does not now"
			}
		}
	}
	return peers
}

// run probes peers until ctx is done, and calls changed after each change of an answer.
func (p *prober) run(ctx context.Context, every time.Duration, changed func()) {
	for tick := time.NewTicker(every); ; {
		select {
		case <-ctx.Done():
			tick.Stop()
			return
		case <-tick.C:
			if p.round(ctx) {
				changed()
			}
		}
	}
}

// round probes the next peers and reports whether an answer has changed. Nodes that are not Ready are left out: the cluster shows them.
func (p *prober) round(ctx context.Context) (changed bool) {
	var all sync.WaitGroup
	for _, s := range p.take() {
		boot, ready := p.nodes.boot(s.Name)
		if !ready {
			continue
		}
		all.Go(func() {
			now := answer{boot, p.ask(ctx, s.PodCIDR.Addr().Next())}
			p.mu.Lock()
			defer p.mu.Unlock()
			before, known := p.last[s.PodCIDR]
			known = known && before.boot == boot
			if ctx.Err() != nil || known && now == before || !known && !now.yes {
				return
			}
			p.last[s.PodCIDR], changed = now, true
			if known {
				p.log.Warn("a node has ceased to answer, or answers again", "node", s.Name, "podCIDR", s.PodCIDR, "answers", now.yes)
			}
		})
	}
	all.Wait()
	return changed
}

// take returns the peers of the next round.
func (p *prober) take() (round []PeerStatus) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for range min(len(p.peers), probeRound) {
		p.next %= len(p.peers)
		round = append(round, p.peers[p.next])
		p.next++
	}
	return round
}

// answersUDP reports whether a node answers at an address: its kernel refuses a datagram to a closed port. Unlike ICMP echo, that needs no
// capability.
func answersUDP(ctx context.Context, addr netip.Addr) bool {
	conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(addr, probePort)))
	if err != nil {
		return false
	}
	defer conn.Close()
	for range probeTries {
		wait, cancel := context.WithTimeout(ctx, probeWait)
		until, _ := wait.Deadline()
		_ = conn.SetReadDeadline(until)
		_, err := conn.Write([]byte{0})
		if err == nil {
			_, err = conn.Read(make([]byte, 1))
		}
		if err == nil || errors.Is(err, syscall.ECONNREFUSED) {
			cancel()
			return true
		}
		<-wait.Done() // an error of a router may come at once
		cancel()
	}
	return false
}
