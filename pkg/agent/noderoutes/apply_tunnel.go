// SPDX-License-Identifier: Apache-2.0

package noderoutes

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/podlace/podlace/pkg/kernel"
)

// applyTunnel creates the tunnel device with its forwarding entries and neighbours. sweep deletes unwanted entries; the caller must first
// delete the routes that use them.
func (p *pass) applyTunnel(want Wanted) (sweep func(), err error) {
	if want.Tunnel == nil {
		return p.sweepTunnels()
	}
	link, changes, err := p.n.EnsureVXLAN(want.Tunnel.VXLAN, Protocol)
	p.Changes += changes
	if err != nil {
		p.Other = errors.Join(p.Other, err)
		for _, h := range want.Nexthops {
			if h.Link == TunnelLink {
				p.badHops[h.Gateway] = err
			}
		}
		return func() {}, nil
	}
	p.tunnel = link
	neighbours, err := p.n.PermanentNeighbours(link, Protocol)
	if err != nil {
		return nil, err
	}
	remotes, err := p.n.Forwarding(link)
	if err != nil {
		return nil, err
	}
	for _, peer := range want.Tunnel.Peers {
		p.applyTunnelPeer(peer, neighbours, remotes)
	}
	if err := p.applyTunnelAddresses(want.Tunnel.Addresses); err != nil {
		return nil, err
	}
	return func() { p.sweepEntries(*want.Tunnel, neighbours, remotes) }, nil
}

// applyTunnelAddresses sets the addresses of the tunnel device. It deletes unwanted ones first, because the kernel prefers the oldest as
// the source address.
func (p *pass) applyTunnelAddresses(wanted []netip.Addr) error {
	have, err := p.n.Addresses(p.tunnel)
	if err != nil {
		return err
	}
	for _, old := range have {
		if !old.IsSingleIP() || !slices.Contains(wanted, old.Addr()) {
			p.deleteUnwanted(func() error { return p.n.DelAddress(p.tunnel, old) })
		}
	}
	for _, a := range wanted {
		if !slices.Contains(have, netip.PrefixFrom(a, a.BitLen())) {
			p.Other = errors.Join(p.Other, p.noteChange(p.n.AddHostAddress(p.tunnel, a)))
		}
	}
	return nil
}

func (p *pass) applyTunnelPeer(peer kernel.TunnelPeer, neighbours map[netip.Addr]string, remotes map[string][]netip.Addr) {
	mac := peer.MAC.String()
	if !slices.Equal(remotes[mac], []netip.Addr{peer.Remote}) {
		if err := p.noteChange(p.n.SetForwarding(p.tunnel, peer.MAC, peer.Remote)); err != nil {
			for _, hop := range peer.Hops {
				p.badHops[hop] = err
			}
			return
		}
	}
	for _, hop := range peer.Hops {
		if neighbours[hop] == mac {
			continue
		}
		if err := p.noteChange(p.n.SetNeighbour(p.tunnel, hop, peer.MAC, Protocol)); err != nil {
			p.badHops[hop] = err
		}
	}
}

// sweepEntries deletes the neighbours and forwarding entries that no peer of the tunnel needs.
func (p *pass) sweepEntries(tunnel Tunnel, neighbours map[netip.Addr]string, remotes map[string][]netip.Addr) {
	wantedHops, wantedMACs := map[netip.Addr]bool{}, map[string]bool{}
	for _, peer := range tunnel.Peers {
		wantedMACs[peer.MAC.String()] = true
		for _, hop := range peer.Hops {
			wantedHops[hop] = true
		}
	}
	for hop := range neighbours {
		if !wantedHops[hop] {
			p.deleteUnwanted(func() error { return p.n.DelNeighbour(p.tunnel, hop) })
		}
	}
	for text := range remotes {
		if wantedMACs[text] {
			continue
		}
		p.deleteUnwanted(func() error {
			mac, err := net.ParseMAC(text)
			if err != nil {
				return fmt.Errorf("fdb show dev %s: %w", p.tunnel.Name, err)
			}
			return p.n.DelForwarding(p.tunnel, mac)
		})
	}
}

// sweepTunnels returns a function that deletes the agent's tunnel devices, for when no tunnel is wanted.
func (p *pass) sweepTunnels() (sweep func(), err error) {
	all, err := p.n.VXLANs()
	if err != nil {
		return nil, err
	}
	return func() {
		for _, f := range all {
			if f.Traits.Group == Protocol {
				p.deleteUnwanted(func() error { return p.n.DelLink(f.Name) })
			}
		}
	}, nil
}
