// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"encoding/binary"
	"iter"
	"math/bits"
	"net/netip"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// Range is the part of a subnet, including Start and End, from which addresses are assigned.
type Range struct {
	Subnet     netip.Prefix
	Start, End netip.Addr
	Gateway    netip.Addr // never assigned; invalid if there is none
}

// RangeSet is an address pool of one family. Each attachment gets one address from each set.
type RangeSet []Range

type rawRange struct {
	Subnet     string `json:"subnet"`
	RangeStart string `json:"rangeStart"`
	RangeEnd   string `json:"rangeEnd"`
	Gateway    string `json:"gateway"`

	Key string `json:"-"` // of the range in the object "ipam"
}

func parseRange(raw rawRange) (Range, error) {
	subnet, err := netip.ParsePrefix(raw.Subnet)
	if err != nil {
		return Range{}, plugin.KeyErrorf("subnet", "ipam subnet %q: want an address and prefix length such as 10.58.0.0/16", raw.Subnet)
	}
	if subnet != subnet.Masked() {
		return Range{}, plugin.KeyErrorf("subnet", "ipam subnet %s: has host bits set, want %s", subnet, subnet.Masked())
	}
	if subnet.Addr().Is4In6() {
		return Range{}, plugin.KeyErrorf("subnet", "ipam subnet %s: is an IPv4-mapped address", subnet)
	}
	r := Range{Subnet: subnet, Start: subnet.Addr(), End: lastUsable(subnet)}
	if !pointToPoint(subnet) {
		r.Start, r.Gateway = subnet.Addr().Next(), subnet.Addr().Next()
	}
	for _, f := range []struct {
		key, value string
		into       *netip.Addr
	}{{"rangeStart", raw.RangeStart, &r.Start}, {"rangeEnd", raw.RangeEnd, &r.End}, {"gateway", raw.Gateway, &r.Gateway}} {
		if err := parseIn(subnet, f.key, f.value, f.into); err != nil {
			return Range{}, err
		}
	}
	if r.End.Less(r.Start) {
		return Range{}, plugin.KeyErrorf("rangeStart", "ipam rangeStart %s is after rangeEnd %s", r.Start, r.End)
	}
	return r, r.forPods()
}

// forPods fails if pods cannot use the addresses of the subnet, or if no host can have the address of the gateway.
func (r Range) forPods() error {
	if r.Subnet.Bits() == 0 || r.Subnet.Addr().IsLoopback() || r.Subnet.Addr().IsMulticast() {
		return plugin.KeyErrorf("subnet", "ipam subnet %s: has no addresses for pods", r.Subnet)
	}
	if r.Gateway.IsValid() {
		if err := kernel.ValidGateway(r.Subnet, r.Gateway); err != nil {
			return plugin.KeyErrorf("gateway", "ipam gateway %s: %w", r.Gateway, err)
		}
	}
	return nil
}

func parseIn(subnet netip.Prefix, key, value string, into *netip.Addr) error {
	if value == "" {
		return nil
	}
	addr, err := netip.ParseAddr(value)
	if err != nil || addr.Zone() != "" {
		return plugin.KeyErrorf(key, "ipam %s %q: want an IP address", key, value)
	}
	addr = addr.Unmap()
	if addr.Is4() != subnet.Addr().Is4() {
		return plugin.KeyErrorf(key, "ipam %s %s: want an address of the family of subnet %s", key, addr, subnet)
	}
	if !subnet.Contains(addr) && key != "gateway" {
		return plugin.KeyErrorf(key, "ipam %s %s: not in subnet %s", key, addr, subnet)
	}
	*into = addr
	return nil
}

// pointToPoint reports whether a subnet has at most two addresses, all of which pods can use, because none is a network or broadcast
// address (RFC 3021 for IPv4, RFC 6164 for IPv6).
func pointToPoint(p netip.Prefix) bool { return p.Addr().BitLen()-p.Bits() < 2 }

// lastUsable returns the last address of a prefix that a pod can have; in IPv4, the very last one is the broadcast address.
func lastUsable(p netip.Prefix) netip.Addr {
	bytes := p.Addr().AsSlice()
	for bit := p.Bits(); bit < len(bytes)*8; bit++ {
		bytes[bit/8] |= 1 << (7 - bit%8)
	}
	addr, _ := netip.AddrFromSlice(bytes)
	if p.Addr().Is4() && !pointToPoint(p) {
		return addr.Prev()
	}
	return addr
}

// Contains reports whether addr is in the range.
func (r Range) Contains(addr netip.Addr) bool {
	return addr.BitLen() == r.Start.BitLen() && !addr.Less(r.Start) && !r.End.Less(addr)
}

func (r Range) overlaps(o Range) bool { return r.Contains(o.Start) || o.Contains(r.Start) }

// String formats the range as "start-end".
func (r Range) String() string { return r.Start.String() + "-" + r.End.String() }

// String formats all ranges of the set, separated by commas.
func (s RangeSet) String() string {
	parts := make([]string, len(s))
	for i, r := range s {
		parts[i] = r.String()
	}
	return strings.Join(parts, ",")
}

// find returns the range that contains addr.
func (s RangeSet) find(addr netip.Addr) (Range, bool) {
	for _, r := range s {
		if r.Contains(addr) {
			return r, true
		}
	}
	return Range{}, false
}

// is4 reports whether the set contains IPv4 addresses.
func (s RangeSet) is4() bool { return s[0].Start.Is4() }

func checkSets(sets []RangeSet) error {
	var before []Range
	for i, set := range sets {
		if len(set) == 0 {
			return plugin.Errorf(plugin.CodeConfig, "ipam ranges[%d]: is empty", i)
		}
		for _, r := range set {
			if r.Start.Is4() != set.is4() {
				return plugin.Errorf(plugin.CodeConfig, "ipam ranges[%d]: mixes IPv4 and IPv6", i)
			}
			if k := slices.IndexFunc(before, r.overlaps); k >= 0 {
				return plugin.Errorf(plugin.CodeConfig, "ipam ranges %s and %s overlap", before[k], r)
			}
			before = append(before, r)
		}
	}
	return nil
}

// startingAfter yields each address of the set but the gateways: from the one after begin to the last, and then from the first to begin. If
// begin is not in the set, it starts with the first.
func (s RangeSet) startingAfter(begin netip.Addr) iter.Seq[netip.Addr] {
	return func(yield func(netip.Addr) bool) {
		at, first, stop := 0, s[0].Start, netip.Addr{}
		for i, r := range s {
			if r.Contains(begin) {
				at, first, stop = i, begin.Next(), begin // first is invalid after the last address of the family
			}
		}
		for turn := 0; turn <= len(s); turn++ {
			r := s[(at+turn)%len(s)]
			from, to := r.Start, r.End
			switch turn {
			case 0:
				from = first
			case len(s):
				to = stop
			}
			for addr := from; addr.IsValid() && r.Contains(addr) && !to.Less(addr); addr = addr.Next() {
				if addr != r.Gateway && !yield(addr) {
					return
				}
			}
		}
	}
}

// count returns how many addresses can be assigned from the set, rounded above 2^53.
func (s RangeSet) count() (total float64) {
	for _, r := range s {
		start, end := r.Start.As16(), r.End.As16()
		low, borrow := bits.Sub64(binary.BigEndian.Uint64(end[8:]), binary.BigEndian.Uint64(start[8:]), 0)
		high, _ := bits.Sub64(binary.BigEndian.Uint64(end[:8]), binary.BigEndian.Uint64(start[:8]), borrow)
		total += float64(high)*(1<<64) + float64(low) + 1
		if r.Contains(r.Gateway) {
			total--
		}
	}
	return total
}

// usage counts the leased addresses of the set.
func (s RangeSet) usage(leased []netip.Addr) Usage {
	u := Usage{Set: s, IPv4: s.is4(), Size: s.count()}
	for _, addr := range leased {
		if r, in := s.find(addr); in && addr != r.Gateway {
			u.Leased++
		}
	}
	return u
}
