// SPDX-License-Identifier: Apache-2.0

// Package ports defines a port of the node that leads to a pod, for the parser of the configuration, the code for the kernel's rules, and
// others. It does no I/O.
package ports

import (
	"cmp"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Port describes how a port of the node is forwarded to a port of a pod.
type Port struct {
	Protocol string         `json:"protocol"`         // "tcp", "udp" or "sctp"
	HostIP   netip.Addr     `json:"hostIP,omitzero"`  // invalid: all node addresses of the pod's family
	Port     uint16         `json:"port"`             // on the node
	Last     uint16         `json:"last,omitzero"`    // last port of a range with the same port numbers in the pod; 0 for a single port
	To       netip.AddrPort `json:"to"`               // in the pod
	SNAT     bool           `json:"snat,omitempty"`   // masquerade connections whose replies would bypass the node: hairpin and localhost
	MasqAll  bool           `json:"masqAll,omitzero"` // masquerade every source
}

// String returns "protocol hostIP:port" or "protocol first-last".
func (p Port) String() string {
	switch {
	case p.HostIP.IsValid():
		return p.Protocol + " " + netip.AddrPortFrom(p.HostIP, p.Port).String()
	case p.Last != 0:
		return fmt.Sprintf("%s %d-%d", p.Protocol, p.Port, p.Last)
	}
	return fmt.Sprintf("%s %d", p.Protocol, p.Port)
}

// Names joins the texts of several ports. One that exists in both address families appears only once.
func Names(list []Port) string {
	var names []string
	for _, p := range list {
		if name := p.String(); !slices.Contains(names, name) {
			names = append(names, name)
		}
	}
	return strings.Join(names, ", ")
}

// Number returns the IANA number of the protocol.
func (p Port) Number() byte {
	switch p.Protocol {
	case "tcp":
		return 6
	case "udp":
		return 17
	case "sctp":
		return 132
	}
	return 0
}

// Address returns HostIP, or the unspecified address of the family.
func (p Port) Address() netip.Addr {
	switch {
	case p.HostIP.IsValid():
		return p.HostIP
	case p.Is4():
		return netip.IPv4Unspecified()
	}
	return netip.IPv6Unspecified()
}

// End returns the last port number of the range, or Port if it is none.
func (p Port) End() uint16 { return max(p.Port, p.Last) }

// Is4 reports whether the port is for IPv4.
func (p Port) Is4() bool { return p.To.Addr().Is4() }

// Overlaps reports whether two ports conflict: they have the same family, protocol and hostIP, and a port number in common.
func (p Port) Overlaps(o Port) bool {
	return p.Is4() == o.Is4() && p.Protocol == o.Protocol && p.HostIP == o.HostIP && p.Port <= o.End() && o.Port <= p.End()
}

// OfFamily returns the ports of one address family.
func OfFamily(list []Port, is4 bool) (own []Port) {
	for _, p := range list {
		if p.Is4() == is4 {
			own = append(own, p)
		}
	}
	return own
}

// Singles splits ranges into single ports.
func Singles(list []Port) (out []Port) {
	for _, p := range list {
		for port := int(p.Port); port <= int(p.End()); port++ {
			one := p
			one.Port, one.Last = uint16(port), 0
			if p.Last != 0 {
				one.To = netip.AddrPortFrom(p.To.Addr(), uint16(port))
			}
			out = append(out, one)
		}
	}
	return out
}

// MinRange is the minimum number of consecutive ports, with the same numbers in the pod as on the node, that become a range.
const MinRange = 16

// Ranges replaces consecutive ports with ranges.
func Ranges(list []Port) []Port {
	kind := func(p Port) Port { // the common properties of a range's ports
		p.Port, p.To = 0, netip.AddrPortFrom(p.To.Addr(), 0)
		return p
	}
	sorted := slices.Clone(list)
	sorted = slices.DeleteFunc(sorted, func(p Port) bool { return p.HostIP.IsValid() || p.Port != p.To.Port() })
	slices.SortStableFunc(sorted, func(a, b Port) int {
		return cmp.Or(strings.Compare(a.Protocol, b.Protocol), a.To.Addr().Compare(b.To.Addr()), cmp.Compare(a.Port, b.Port))
	})
	var joined []Port
	inside := map[Port]bool{}
	for len(sorted) > 0 {
		n := 1
		for n < len(sorted) && kind(sorted[n]) == kind(sorted[0]) && int(sorted[n].Port) == int(sorted[0].Port)+n {
			n++
		}
		if n >= MinRange {
			first := sorted[0]
			first.Last = sorted[n-1].Port
			joined = append(joined, first)
			for _, p := range sorted[:n] {
				inside[p] = true
			}
		}
		sorted = sorted[n:]
	}
	return append(slices.DeleteFunc(list, func(p Port) bool { return inside[p] }), joined...)
}
