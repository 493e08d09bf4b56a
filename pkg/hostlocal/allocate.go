// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/ipam"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// maxMisses is the number of taken addresses that ADD meets before it lists the lease folder once.
const maxMisses = 16

// allocation is one running ADD.
type allocation struct {
	r      *plugin.Request
	l      *leases
	host   *kernel.Node
	beside []string       // the other networks on the request's bridge
	mine   []netip.Addr   // taken by this ADD
	given  []netip.Prefix // as mine, with the prefix length of their subnet
	taken  []netip.Addr   // of all leases, in their order; nil until the folder has been listed
	misses int
}

// allocateAll takes one address from each range set. After an error, the caller calls giveBack.
func (a *allocation) allocateAll(cfg Config) (ips []*types100.IPConfig, err error) {
	if a.host, err = attachment.Host(a.r); err != nil {
		return nil, err
	}
	if a.beside, err = networksBeside(a.r); err != nil {
		return nil, err
	}
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
	return ips, nil
}

// giveBack releases what a failed ADD has taken.
func (a *allocation) giveBack() error {
	var errs []error
	for _, addr := range a.mine {
		errs = append(errs, a.l.dir.Remove(addr.String()))
	}
	return errors.Join(errs...)
}

// reasons says why the pod cannot have addresses that it requests.
func reasons(sets []RangeSet, requests []request) string {
	var list []string
	for _, q := range requests {
		why := fmt.Sprintf("%s is in no range of %s", q.addr, sets)
		for _, set := range sets {
			if _, in := set.find(q.addr); in {
				why = fmt.Sprintf("%s is a second address of range set %s", q.addr, set)
			}
		}
		list = append(list, why)
	}
	return strings.Join(list, ", ")
}

// allocateOne takes the address of the set that the pod requests, or else the next free one after the last assigned. It also returns the
// unused requests, which may be for other sets.
func (a *allocation) allocateOne(i int, set RangeSet, requests []request) (*types100.IPConfig, []request, error) {
	wanted, rest := pickRequest(set, requests)
	var got netip.Addr
	var err error
	if wanted.IsValid() {
		got, err = wanted, a.takeRequested(set, wanted)
	} else {
		got, err = a.nextFree(i, set)
	}
	if err != nil {
		return nil, nil, err
	}
	a.l.setLast(i, got)
	in, _ := set.find(got)
	p := netip.PrefixFrom(got, in.Subnet.Bits())
	a.given = append(a.given, p)
	return &types100.IPConfig{Address: *kernel.IPNet(p), Gateway: in.Gateway.AsSlice()}, rest, nil
}

func (a *allocation) takeRequested(set RangeSet, addr netip.Addr) error {
	if in, _ := set.find(addr); addr == in.Gateway {
		return plugin.Errorf(plugin.CodeAddressTaken, "requested address %s is the gateway of %s", addr, in.Subnet)
	}
	ok, err := a.take(addr)
	if ok || err != nil {
		return err
	}
	is, leased := a.l.read(addr)
	reason := "the node has it or a route to it"
	if network := a.leasedBeside(addr); network != "" {
		reason = "network " + network + ", which has the same bridge, has leased it"
	}
	if leased {
		if _, ok, err := a.reclaim(set, []lease{is}); ok || err != nil {
			return err
		}
		reason = "it is leased to " + a.l.describe(is.of)
	}
	return plugin.Errorf(plugin.CodeAddressTaken, "requested IP address %s is not available in range set %s: %s", addr, set, reason)
}

// nextFree takes the next free address of the set after the last assigned one.
func (a *allocation) nextFree(i int, set RangeSet) (netip.Addr, error) {
	for addr := range set.startingAfter(a.l.last(i)) {
		if a.misses == maxMisses {
			if err := a.list(); err != nil {
				return addr, err
			}
		}
		if _, taken := slices.BinarySearchFunc(a.taken, addr, netip.Addr.Compare); taken || a.leasedBeside(addr) != "" {
			continue
		}
		if ok, err := a.take(addr); ok || err != nil {
			return addr, err
		}
		a.misses++
	}
	all, err := a.l.all()
	if err != nil {
		return netip.Addr{}, err
	}
	if got, ok, err := a.reclaim(set, all); ok || err != nil {
		return got, err
	}
	return netip.Addr{}, a.exhausted(set)
}

// list lists the lease folder, once per ADD.
func (a *allocation) list() (err error) {
	if a.taken == nil {
		a.taken, err = a.l.names()
	}
	return err
}

func (a *allocation) exhausted(set RangeSet) error {
	if err := a.list(); err != nil {
		return err
	}
	shared := ""
	if len(a.beside) > 0 {
		shared = fmt.Sprintf("; networks %s on this bridge share the range", strings.Join(a.beside, ", "))
	}
	return plugin.WithHint(plugin.Errorf(plugin.CodeExhausted, "no IP addresses available in range set: %s", set),
		"%s in %s%s; 'podlace gc --yes' frees those of dead pods; otherwise enlarge the range", set.usage(a.taken), a.l.dir.Path(), shared)
}

// take takes addr and reports whether it was free.
func (a *allocation) take(addr netip.Addr) (bool, error) {
	if _, reserved := a.l.reserved[addr]; reserved {
		return false, nil
	}
	ok, err := a.l.createLease(addr, a.r.Attachment())
	if !ok || err != nil {
		return false, err
	}
	if a.leasedBeside(addr) != "" {
		return false, a.l.dir.Remove(addr.String())
	}
	if a.isForeign(addr) {
		a.r.Log.Warn("the node has this address or a route to it alone, so it is not assigned", "address", addr)
		return false, a.l.dir.Remove(addr.String())
	}
	a.mine = append(a.mine, addr)
	return true, nil
}

// isForeign reports whether the node has the address itself, or a route to it alone. If no pod of this boot has a lease of it, it is used
// by something else.
func (a *allocation) isForeign(addr netip.Addr) bool {
	m, err := a.host.MatchRoute(addr)
	return err == nil && m.Dst.IsSingleIP()
}

// networksBeside returns the other networks on the request's bridge, by the notes of bridge. Their pods may have addresses of its range,
// whose leases are found if they have the same dataDir.
func networksBeside(r *plugin.Request) (beside []string, err error) {
	note := ipam.BridgeNote(ipam.BridgeIn(r.Config))
	if _, noted := attachment.ReadNote(r.Network, note); !noted {
		return nil, nil
	}
	networks, err := attachment.Networks()
	return slices.DeleteFunc(networks, func(network string) bool {
		_, noted := attachment.ReadNote(network, note)
		return network == r.Network || !noted
	}), err
}

// leasedBeside returns the network on the same bridge that has leased an address, or "". After the caller has created its own lease, of two
// simultaneous ADDs at least one sees the other's.
func (a *allocation) leasedBeside(addr netip.Addr) string {
	for _, network := range a.beside {
		if _, err := os.Lstat(filepath.Join(filepath.Dir(a.l.dir.Path()), network, addr.String())); err == nil {
			return network
		}
	}
	return ""
}

// pickRequest returns the address that the pod requests from the set, and the requests for other sets. It drops those for the same set from
// sources of lower precedence.
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
