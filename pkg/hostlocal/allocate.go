// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"net/netip"
	"slices"
	"strings"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// probes is how many addresses are tried one by one before the folder is listed to see which are taken.
const probes = 16

// allocation is one ADD under way.
type allocation struct {
	r     *plugin.Request
	l     *leases
	mine  entry
	taken map[netip.Addr]bool // nil until the folder was listed
	tried int
}

// all takes one address of each set, or none at all.
func (a *allocation) all(cfg Config) (ips []*types100.IPConfig, err error) {
	var undo plugin.Undo
	defer undo.OnError(&err)
	undo.Push(func() error {
		_, err := a.l.end(a.mine)
		return err
	})
	requests := cfg.requests
	for i, set := range cfg.Sets {
		var ip *types100.IPConfig
		if ip, requests, err = a.one(i, set, requests); err != nil {
			return nil, err
		}
		ips = append(ips, ip)
	}
	if len(requests) > 0 {
		return nil, plugin.Errorf(plugin.CodeConfig, "failed to allocate all requested IPs: %s", addresses(requests))
	}
	if err := a.l.index.put(a.mine); err != nil {
		return nil, err
	}
	return ips, a.l.index.settle()
}

func addresses(requests []request) string {
	list := make([]string, len(requests))
	for i, q := range requests {
		list[i] = q.addr.String()
	}
	return strings.Join(list, ",")
}

// one takes an address of the set: the requested one, else the next free one after the last that was given. It returns the requests
// that are left for the other sets.
func (a *allocation) one(i int, set RangeSet, requests []request) (*types100.IPConfig, []request, error) {
	wanted, rest := pick(set, requests)
	var got netip.Addr
	var err error
	if wanted.IsValid() {
		got, err = a.requested(set, wanted)
	} else {
		got, err = a.next(i, set)
	}
	if err != nil {
		return nil, nil, err
	}
	if err := a.l.setLast(i, got); err != nil {
		return nil, nil, err
	}
	in, _ := set.find(got)
	return &types100.IPConfig{Address: *kernel.IPNet(netip.PrefixFrom(got, in.Subnet.Bits())), Gateway: in.Gateway.AsSlice()}, rest, nil
}

func (a *allocation) requested(set RangeSet, addr netip.Addr) (netip.Addr, error) {
	if in, _ := set.find(addr); addr == in.Gateway {
		return addr, plugin.Errorf(plugin.CodeAddressTaken, "requested address %s is the gateway of %s", addr, in.Subnet)
	}
	ok, err := a.try(addr)
	if err == nil && !ok {
		err = plugin.Errorf(plugin.CodeAddressTaken, "requested IP address %s is not available in range set %s", addr, set)
	}
	return addr, err
}

// next prefers addresses that were not released lately, then the one that was released first. When none is left, addresses of pods
// that are certainly gone are collected.
func (a *allocation) next(i int, set RangeSet) (got netip.Addr, err error) {
	resting, err := a.l.index.resting()
	if err != nil {
		return got, err
	}
	for collected := false; ; collected = true {
		err = set.walk(a.l.last(i), func(addr netip.Addr, _ Range) (bool, error) {
			if slices.Contains(resting, addr) {
				return false, nil
			}
			ok, err := a.try(addr)
			if ok {
				got = addr
			}
			return ok, err
		})
		if plugin.Code(err) != plugin.CodeExhausted {
			return got, err
		}
		for _, addr := range resting {
			if r, in := set.find(addr); in && addr != r.Gateway {
				if ok, err := a.try(addr); ok || err != nil {
					return addr, err
				}
			}
		}
		if collected {
			return got, a.exhausted(set, err)
		}
		if n, e := a.collectDead(set); e != nil || n == 0 {
			return got, a.exhausted(set, err)
		}
		resting = nil
	}
}

func (a *allocation) exhausted(set RangeSet, err error) error {
	taken, e := a.l.names()
	if e != nil {
		return e
	}
	n := 0
	for addr := range taken {
		if _, in := set.find(addr); in {
			n++
		}
	}
	return plugin.WithHint(err, "%d of %s addresses are leased in %s", n, set.size(), a.l.dir.Path())
}

// collectDead ends the leases of pods that are certainly gone, and returns how many addresses that freed.
func (a *allocation) collectDead(set RangeSet) (int, error) {
	entries, err := a.l.index.all()
	if err != nil {
		return 0, err
	}
	freed := 0
	for _, e := range entries {
		if !a.l.index.dead(e) || !slices.ContainsFunc(e.Addresses, func(addr netip.Addr) bool { _, in := set.find(addr); return in }) {
			continue
		}
		a.r.Log.Warn("collecting the addresses of a pod that is gone", "of", e.ContainerID, "ifname", e.IfName, "addresses", e.Addresses)
		if a.r.Reclaimed != nil {
			a.r.Reclaimed(e.Attachment)
		}
		released, err := a.l.end(e)
		freed += len(released)
		if err != nil {
			return freed, err
		}
	}
	a.taken = nil
	return freed, nil
}

// try takes addr if it is free.
func (a *allocation) try(addr netip.Addr) (bool, error) {
	if a.tried++; a.tried > probes && a.taken == nil {
		var err error
		if a.taken, err = a.l.names(); err != nil {
			return false, err
		}
	}
	if a.taken[addr] {
		return false, nil
	}
	ok, err := a.l.take(addr, a.r.Attachment())
	if !ok || err != nil {
		return false, err
	}
	a.mine.Addresses = append(a.mine.Addresses, addr)
	return true, a.l.index.wake(addr)
}

// pick returns the request that the set serves, and those that remain: a source of lower precedence that asks for an address of the
// same set is dropped.
func pick(set RangeSet, requests []request) (wanted netip.Addr, rest []request) {
	rank := -1
	for _, q := range requests {
		_, in := set.find(q.addr)
		switch {
		case in && rank == -1:
			wanted, rank = q.addr, q.rank
		case in && q.rank > rank:
		default:
			rest = append(rest, q)
		}
	}
	return wanted, rest
}
