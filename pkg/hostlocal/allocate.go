// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// maxProbes is the number of addresses that the plugin tries one by one. If none of these addresses is free, the plugin reads the list of
// files in the lease folder once.
const maxProbes = 16

// The type allocation holds the data of one running ADD.
type allocation struct {
	r     *plugin.Request
	l     *leases
	mine  entry
	taken map[netip.Addr]bool // nil until the folder has been listed
	tried int
}

// allocateAll takes one address from each range set. If one set has no free address, allocateAll releases all addresses again.
func (a *allocation) allocateAll(cfg Config) (ips []*types100.IPConfig, err error) {
	var undo plugin.Undo
	defer undo.OnError(&err)
	undo.Push(func() error { return a.l.endEntry(a.mine) })
	requests := cfg.requests
	for i, set := range cfg.Sets {
		var ip *types100.IPConfig
		if ip, requests, err = a.allocateOne(i, set, requests); err != nil {
			return nil, err
		}
		ips = append(ips, ip)
	}
	if len(requests) > 0 {
		return nil, plugin.Errorf(plugin.CodeConfig, "failed to allocate all requested IPs: %s", reasons(cfg.Sets, requests))
	}
	if err := a.l.withRebuild(func() error { return a.l.index.put(a.mine) }); err != nil {
		return nil, err
	}
	return ips, a.l.index.markCurrent()
}

func reasons(sets []RangeSet, requests []request) string {
	list := make([]string, len(requests))
	for i, q := range requests {
		list[i] = fmt.Sprintf("%s is %s", q.addr, whyUnusable(sets, q.addr))
	}
	return strings.Join(list, ", ")
}

// allocateOne takes an address from the set. If the pod requests an address of this set, allocateOne takes the requested address.
// Otherwise, allocateOne takes the next free address after the last assigned address. allocateOne also returns the requests that it did not
// use, because they may be for other sets.
func (a *allocation) allocateOne(i int, set RangeSet, requests []request) (*types100.IPConfig, []request, error) {
	wanted, rest := pickRequest(set, requests)
	var got netip.Addr
	var err error
	if wanted.IsValid() {
		got, err = a.takeRequested(set, wanted)
	} else {
		got, err = a.nextFree(i, set)
	}
	if err != nil {
		return nil, nil, err
	}
	a.l.setLast(i, got)
	in, _ := set.find(got)
	return &types100.IPConfig{Address: *kernel.IPNet(netip.PrefixFrom(got, in.Subnet.Bits())), Gateway: in.Gateway.AsSlice()}, rest, nil
}

// takeRequested takes the requested address. If the address is leased to a dead pod, takeRequested first ends this lease.
func (a *allocation) takeRequested(set RangeSet, addr netip.Addr) (netip.Addr, error) {
	if in, _ := set.find(addr); addr == in.Gateway {
		return addr, plugin.Errorf(plugin.CodeAddressTaken, "requested address %s is the gateway of %s", addr, in.Subnet)
	}
	ok, err := a.tryTake(addr)
	if ok || err != nil {
		return addr, err
	}
	owner, known, err := a.l.owner(addr)
	if err != nil {
		return addr, err
	}
	if known && a.l.index.isDead(owner) {
		if err := a.collect(owner); err != nil {
			return addr, err
		}
		if ok, err := a.tryTake(addr); ok || err != nil {
			return addr, err
		}
	}
	return addr, plugin.Errorf(plugin.CodeAddressTaken, "requested IP address %s is not available in range set %s: it is leased to %s", addr,
		set, owner)
}

// nextFree takes the next free address of the set. If no address is free, nextFree ends the leases of dead pods and tries again.
func (a *allocation) nextFree(i int, set RangeSet) (netip.Addr, error) {
	got, ok, err := a.takeFree(i, set, a.l.index.restingAddresses())
	if ok || err != nil {
		return got, err
	}
	collected, err := a.collectDead(set)
	if err != nil {
		return got, err
	}
	if collected > 0 {
		if got, ok, err = a.takeFree(i, set, nil); ok || err != nil {
			return got, err
		}
	}
	return got, a.exhausted(set)
}

// takeFree takes a free address of the set. The argument "resting" contains recently released addresses, sorted by the time of their
// release. takeFree takes a recently released address only if no other address is free, and then prefers the address that was released
// first.
func (a *allocation) takeFree(i int, set RangeSet, resting []netip.Addr) (got netip.Addr, ok bool, err error) {
	for addr := range set.startingAfter(a.l.last(i)) {
		if slices.Contains(resting, addr) {
			continue
		}
		if ok, err = a.tryTake(addr); ok || err != nil {
			return addr, ok, err
		}
	}
	for _, addr := range resting {
		if r, in := set.find(addr); in && addr != r.Gateway {
			if ok, err = a.tryTake(addr); ok || err != nil {
				return addr, ok, err
			}
		}
	}
	return got, false, nil
}

func (a *allocation) exhausted(set RangeSet) error {
	taken, err := a.l.leasedNames()
	if err != nil {
		return err
	}
	usage, _ := set.usage(taken)
	return plugin.WithHint(plugin.Errorf(plugin.CodeExhausted, "no IP addresses available in range set: %s", set), "%s in %s", usage,
		a.l.dir.Path())
}

// collectDead ends the leases of all dead pods with an address in the set, and returns the number of dead pods.
func (a *allocation) collectDead(set RangeSet) (int, error) {
	entries, err := a.l.allEntries()
	if err != nil {
		return 0, err
	}
	freed := 0
	for _, e := range entries {
		if !e.within(set) || !a.l.index.isDead(e) {
			continue
		}
		if err := a.collect(e); err != nil {
			return freed, err
		}
		freed++
	}
	return freed, nil
}

func (a *allocation) collect(e entry) error {
	a.r.Log.Warn("collecting the addresses of a pod that is gone", "of", e.ContainerID, "ifname", e.IfName, "pod", e.Pod, "addresses",
		e.Addresses)
	if a.r.Reclaimed != nil {
		a.r.Reclaimed(e.Attachment)
	}
	a.taken = nil
	return a.l.endEntry(e)
}

// tryTake takes addr and returns true, or returns false if addr is not free.
func (a *allocation) tryTake(addr netip.Addr) (bool, error) {
	if a.tried++; a.tried > maxProbes && a.taken == nil {
		var err error
		if a.taken, err = a.l.leasedNames(); err != nil {
			return false, err
		}
	}
	if a.taken[addr] {
		return false, nil
	}
	ok, err := a.l.createLease(addr, a.r.Attachment())
	if !ok || err != nil {
		return false, err
	}
	var written int64 // 0 stands for an unknown time; the index then does not recognise the lease
	if at, err := a.l.dir.Written(addr.String()); err == nil {
		written = at.UnixNano()
	}
	a.mine.addLease(addr, written)
	a.l.index.removeResting(addr)
	return true, nil
}

// pickRequest returns the address that the pod requests from the set, and the requests for other sets. pickRequest drops requests for the
// same set from sources of lower precedence.
func pickRequest(set RangeSet, requests []request) (wanted netip.Addr, rest []request) {
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
