// SPDX-License-Identifier: Apache-2.0

package noderoutes

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/netip"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/kernel"
)

// Options says whether Apply deletes unwanted routes, and how it treats those of other programs.
type Options struct {
	Keep  bool  // delete nothing
	Adopt []int // protocols of routes to take over (rtm_protocol)
	// Inside makes Apply search the main table for routes of other programs to a part of a peer's podCIDR, for Result.Inside.
	Inside bool
}

// Ways returns this node's current route to each gateway. For an address of this node itself, Way has the link with the address and, in
// Reason, why it cannot be a gateway.
func Ways(n *kernel.NS, gateways []netip.Addr) map[netip.Addr]Way {
	ways, links := make(map[netip.Addr]Way, len(gateways)), map[int]kernel.Link{}
	for _, gateway := range gateways {
		if _, asked := ways[gateway]; !asked {
			ways[gateway] = wayTo(n, gateway, links)
		}
	}
	return ways
}

// wayTo asks the kernel for the route to a gateway. links caches the links that it has read.
func wayTo(n *kernel.NS, gateway netip.Addr, links map[int]kernel.Link) Way {
	m, err := n.MatchRoute(gateway)
	switch {
	case kernel.NoRoute(err):
		return Way{Reason: fmt.Sprintf("this node has no route to %s", gateway)}
	case err != nil:
		return Way{Reason: err.Error()}
	}
	link, read := links[m.FirstLink()]
	if !read {
		var ok bool
		if link, ok, err = n.LinkByIndex(m.FirstLink()); err != nil || !ok {
			return Way{Reason: fmt.Sprintf("the route to %s leads through no link", gateway)}
		}
		links[link.Index] = link
	}
	if m.Local {
		return Way{Link: link, Reason: fmt.Sprintf("%s is an address of this node", gateway)}
	}
	return Way{Link: link, OnLink: m.OnLink}
}

// Apply brings the kernel into the wanted state. It adds and replaces objects before it deletes unwanted ones with Protocol, and loses no
// packet to a peer whose route stays the same. Changes that the kernel refuses are in Result, and the others are made nevertheless. If the
// kernel's state cannot be read, nothing is deleted and an error returned.
func Apply(n *kernel.NS, want Wanted, opt Options) (Result, error) {
	first, err := apply(n, want, opt)
	if err != nil || len(first.Failed) == 0 || first.deleted == 0 {
		return first.Result, err
	}
	// The second pass retries failed changes, since an object that the first one deleted may have been the cause.
	second, err := apply(n, want, opt)
	second.Changes += first.Changes
	second.Had, second.Unwanted = first.Had, first.Unwanted
	return second.Result, err
}

// Remove deletes the tunnel, and all routes, nexthop objects and neighbours with Protocol.
func Remove(n *kernel.NS) (changes int, err error) {
	r, err := Apply(n, Wanted{}, Options{})
	return r.Changes, errors.Join(append(slices.Collect(maps.Values(r.Failed)), r.Other, err)...)
}

// pass is the state of one pass of Apply, in which apply compares the kernel with the wanted state once and makes the changes.
type pass struct {
	Result
	n           *kernel.NS
	opt         Options
	tunnel      kernel.Link
	badNexthops map[uint32]error         // nexthop objects that routes cannot use, with the reason
	badHops     map[netip.Addr]error     // gateways behind the tunnel that cannot be used, with the reason
	existing    []kernel.FoundRoute      // existing routes with Protocol
	foreign     map[netip.Prefix][]found // routes of other programs, read on demand
	deleted     int
}

type found = kernel.FoundRoute

func apply(n *kernel.NS, want Wanted, opt Options) (*pass, error) {
	p := &pass{n: n, opt: opt, badNexthops: map[uint32]error{}, badHops: map[netip.Addr]error{},
		Result: Result{Failed: map[netip.Prefix]error{}, Conflicts: map[netip.Prefix]string{}, Has: map[bool]int{}}}
	sweepTunnel, err := p.applyTunnel(want)
	if err != nil {
		return p, err
	}
	nexthops, err := n.Nexthops()
	if err != nil {
		return p, err
	}
	if p.existing, err = n.ProtocolRoutes(Protocol); err != nil {
		return p, err
	}
	p.Had = len(p.existing)
	for _, r := range p.existing {
		p.Has[r.Dst.Addr().Is4()]++
	}
	wantedHops := p.applyNexthops(want, nexthops)
	staying, err := p.applyRoutes(want)
	if err != nil {
		return p, err
	}
	if opt.Inside {
		if err := p.findInside(want); err != nil {
			return p, err
		}
	}
	p.sweepRoutes(want)
	for _, h := range nexthops {
		if _, wanted := wantedHops[h.ID]; h.Protocol == Protocol && !wanted && !staying[h.ID] {
			p.deleteUnwanted(func() error { return n.DelNexthop(h.ID) })
		}
	}
	sweepTunnel()
	return p, nil
}

// noteChange counts a change if err is nil, and returns err.
func (p *pass) noteChange(err error) error {
	if err == nil {
		p.Changes++
	}
	return err
}

// deleteUnwanted calls del for an unwanted object, or only counts it with Options.Keep.
func (p *pass) deleteUnwanted(del func() error) {
	if p.opt.Keep {
		p.Kept++
		return
	}
	if err := p.noteChange(del()); err != nil {
		p.Other = errors.Join(p.Other, err)
		return
	}
	p.deleted++
}

// applyNexthops adds and replaces the wanted nexthop objects, and returns their IDs.
func (p *pass) applyNexthops(want Wanted, list []kernel.FoundNexthop) map[uint32]bool {
	have, wanted := make(map[uint32]kernel.FoundNexthop, len(list)), make(map[uint32]bool, len(want.Nexthops))
	for _, h := range list {
		have[h.ID] = h
	}
	for _, h := range want.Nexthops {
		wanted[h.ID] = true
		if err := p.applyNexthop(h, have); err != nil {
			p.badNexthops[h.ID] = err
		}
	}
	return wanted
}

func (p *pass) applyNexthop(h kernel.Nexthop, have map[uint32]kernel.FoundNexthop) error {
	if h.Link == TunnelLink {
		if err := p.badHops[h.Gateway]; err != nil {
			return err
		}
		if p.tunnel.Index == 0 {
			return fmt.Errorf("nexthop %d needs the tunnel, which does not exist", h.ID)
		}
		h.Link = p.tunnel.Index
	}
	there, ok := have[h.ID]
	switch {
	case !ok:
		return p.noteChange(p.n.AddNexthop(h, Protocol))
	case there.Protocol != Protocol:
		return fmt.Errorf("nexthop %d belongs to another program (ip nexthop show id %d: protocol %d)", h.ID, h.ID, there.Protocol)
	case there.Nexthop != h:
		return p.noteChange(p.n.ReplaceNexthop(h, Protocol))
	}
	return nil
}

// routeKey identifies a route in the main table.
type routeKey struct {
	dst    netip.Prefix
	metric int
}

func routeKeyOf(r kernel.ProtocolRoute) routeKey {
	r = r.Explicit()
	return routeKey{r.Dst, r.Metric}
}

// applyRoutes adds and replaces the wanted routes. It returns the nexthop IDs of routes that the kernel refused to change; these objects
// must stay.
func (p *pass) applyRoutes(want Wanted) (staying map[uint32]bool, err error) {
	have := make(map[routeKey]found, len(p.existing))
	for _, r := range p.existing {
		have[routeKeyOf(r.ProtocolRoute)] = r
	}
	staying = map[uint32]bool{}
	for _, r := range want.Routes {
		r = r.Explicit()
		there, ok := have[routeKeyOf(r)]
		if ok && !there.Other && there.Nexthop == r.Nexthop && p.badNexthops[r.Nexthop] == nil {
			continue
		}
		err := p.badNexthops[r.Nexthop]
		if err == nil {
			err = p.applyRoute(r, ok)
		}
		if errors.Is(err, errUnread) {
			return nil, err
		}
		if err != nil {
			p.Failed[r.Dst] = err
		}
		if _, conflict := p.Conflicts[r.Dst]; ok && (conflict || err != nil) {
			staying[there.Nexthop] = true
		}
	}
	return staying, nil
}

var errUnread = errors.New("routes of other programs could not be read")

// applyRoute adds a route, or replaces the agent's old one or another program's that Options.Adopt selects.
func (p *pass) applyRoute(r kernel.ProtocolRoute, ours bool) error {
	if err := p.readForeign(); err != nil {
		return err
	}
	var adopted []found
	replace := ours
	var conflicts []string
	for _, f := range p.foreign[r.Dst] {
		inPlace := f.Metric == r.Metric
		switch {
		case slices.Contains(p.opt.Adopt, f.Protocol) && (r.Nexthop != 0 || inPlace):
			adopted = append(adopted, f)
			replace = replace || inPlace
		case inPlace, r.Nexthop != 0 && f.Metric < r.Metric: // the metric decides
			conflicts = append(conflicts, p.n.Describe(f))
		}
	}
	if len(conflicts) > 0 {
		p.Conflicts[r.Dst] = strings.Join(conflicts, ", ")
		return nil
	}
	set := p.n.AddProtocolRoute
	if replace {
		set = p.n.ReplaceProtocolRoute
	}
	err := p.noteChange(set(r, Protocol))
	if !replace && errors.Is(err, fs.ErrExist) {
		p.Conflicts[r.Dst] = r.Dst.String() + ", which another program has just added"
		return nil
	}
	if err != nil {
		return err
	}
	if !ours {
		p.Has[r.Dst.Addr().Is4()]++
	}
	return p.takeOver(adopted, r, ours)
}

// takeOver deletes, after the agent's route was added, the routes that Options.Adopt selects, except one that it already replaced.
func (p *pass) takeOver(adopted []found, r kernel.ProtocolRoute, ours bool) error {
	replaced := ours
	for _, f := range adopted {
		if f.Metric == r.Metric && !replaced {
			replaced = true
			continue
		}
		if err := p.noteChange(p.n.DelProtocolRoute(f.ProtocolRoute, f.Protocol)); err != nil {
			return err
		}
	}
	return nil
}

// readForeign reads the routes of other programs once per pass, and only when a route must be added or replaced, because with many routes
// it is slow.
func (p *pass) readForeign() error {
	if p.foreign != nil {
		return nil
	}
	all, err := p.n.ProtocolRoutes(0)
	if err != nil {
		return errors.Join(errUnread, err)
	}
	p.foreign = map[netip.Prefix][]found{}
	for _, r := range all {
		if r.Protocol != Protocol {
			p.foreign[r.Dst] = append(p.foreign[r.Dst], r)
		}
	}
	return nil
}

// findInside stores in Result.Inside each route of another program to a part of a peer's podCIDR. The kernel prefers such a more specific
// route, so packets take another path.
func (p *pass) findInside(want Wanted) error {
	if err := p.readForeign(); err != nil {
		return err
	}
	wanted, lengths := map[netip.Prefix]bool{}, map[bool][]int{}
	for _, r := range want.Routes {
		if is4 := r.Dst.Addr().Is4(); r.Nexthop != 0 { // the own podCIDR is skipped, because it has routes to pods
			wanted[r.Dst] = true
			if !slices.Contains(lengths[is4], r.Dst.Bits()) {
				lengths[is4] = append(lengths[is4], r.Dst.Bits())
			}
		}
	}
	p.Inside = map[netip.Prefix]string{}
	for dst, routes := range p.foreign {
		for _, bits := range lengths[dst.Addr().Is4()] {
			if whole := netip.PrefixFrom(dst.Addr(), bits).Masked(); bits < dst.Bits() && wanted[whole] {
				text := p.n.Describe(routes[0])
				if there := p.Inside[whole]; there != "" && there < text {
					text = there // one is enough, but always the same
				}
				p.Inside[whole] = text
			}
		}
	}
	return nil
}

// sweepRoutes deletes the unwanted routes with Protocol.
func (p *pass) sweepRoutes(want Wanted) {
	wanted := make(map[routeKey]bool, len(want.Routes))
	for _, r := range want.Routes {
		wanted[routeKeyOf(r)] = true
	}
	for _, r := range p.existing {
		if !wanted[routeKeyOf(r.ProtocolRoute)] {
			p.Unwanted++
			p.deleteUnwanted(func() error {
				err := p.n.DelProtocolRoute(r.ProtocolRoute, Protocol)
				if err == nil {
					p.Has[r.Dst.Addr().Is4()]--
				}
				return err
			})
		}
	}
}
