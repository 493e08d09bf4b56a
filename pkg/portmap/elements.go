// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"encoding/binary"
	"encoding/hex"
	"net/netip"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/nft"
	"github.com/podlace/podlace/pkg/ports"
)

// elementsOf returns the set elements that forward a port to the pod, with owner as their comment.
func elementsOf(p ports.Port, owner string) []nft.Element {
	family := nft.FamilyOf(p.Is4()).Digit
	fields := func(address ...byte) func(port uint16) []byte {
		return func(port uint16) []byte { return nft.Key(address, []byte{p.Number()}, nft.BigEndian(port)) }
	}
	e := nft.Element{Set: "ports" + family, Key: fields()(p.Port), Comment: owner,
		Value: nft.Key(p.To.Addr().AsSlice(), nft.BigEndian(p.To.Port()))}
	suffix := ""
	switch {
	case p.HostIP.IsValid():
		e.Set, e.Key = "hostip_ports"+family, fields(p.HostIP.AsSlice()...)(p.Port)
	case p.Last != 0:
		suffix = "_ranges"
		e.Set, e.Last, e.Value = "ranges"+family, fields()(p.Last), p.To.Addr().AsSlice()
	}
	out := []nft.Element{e}
	// Matching the client's original destination port selects connections to the hostPort, not those to the same pod through a Service.
	back := fields(p.To.Addr().AsSlice()...)
	for _, set := range []struct {
		name string
		in   bool
	}{{"snat", p.SNAT}, {"masqall", p.MasqAll}} {
		if !set.in {
			continue
		}
		e := nft.Element{Set: set.name + suffix + family, Key: back(p.Port), Comment: owner}
		if p.Last != 0 {
			e.Last = back(p.Last)
		}
		out = append(out, e)
	}
	return out
}

// takenElement returns the set element that reserves a port which the iptables backend forwards.
func takenElement(p ports.Port, owner string) nft.Element {
	return nft.Element{Set: "taken" + nft.FamilyOf(p.Is4()).Digit, Comment: owner,
		Key: nft.Key(p.Address().AsSlice(), []byte{p.Number()}, nft.BigEndian(p.Port))}
}

// ownedPorts holds the ports of one attachment.
type ownedPorts struct {
	// Owner is the attachment's hash, a space and a readable name. Only the attachment with this hash may change or delete the elements.
	Owner string
	// Bridge is the bridge of the pod, or "" if its link on the node is not a bridge port.
	Bridge string
	// ByIPTables is true if the iptables backend forwards the ports.
	ByIPTables bool
	// Localhost is the link whose route_localnet was enabled for these ports, or "". It is disabled when the ports are removed.
	Localhost string
	// Netns is the path of the pod's network namespace, or "" if unknown. If nothing exists at the path, the pod is gone and its ports can be
	// removed.
	Netns string
	Ports []ports.Port
	// Shared contains the ports that another attachment of the same container forwards.
	Shared []ports.Port
	// HasHeirs is true if another attachment may request these ports.
	HasHeirs bool
}

func (h ownedPorts) comment() string {
	if h.HasHeirs {
		return withHeirs(h.Owner)
	}
	return h.Owner[:min(len(h.Owner), nft.MaxComment-1)]
}

// heirsMark ends the comment of an element whose port another attachment may request. It saves DEL from reading the records of all pods.
const heirsMark = " shared"

// withHeirs returns an owner comment with heirsMark.
func withHeirs(owner string) string {
	owner = strings.TrimSuffix(owner, heirsMark)
	return owner[:min(len(owner), nft.MaxComment-1-len(heirsMark))] + heirsMark
}

// ownerElement returns the set element that represents an attachment. Its comment ends with the path of the pod's network namespace, if
// known.
func ownerElement(comment string) nft.Element {
	sum, _ := hex.DecodeString(ownerHash(comment))
	return nft.Element{Set: "owners", Key: append(sum, make([]byte, 8)...)[:8], Comment: comment}
}

func (h ownedPorts) elements() []nft.Element {
	who := ownerHash(h.Owner)
	if with := who + " " + h.Netns; h.Netns != "" && len(with) < nft.MaxComment {
		who = with
	}
	out := []nft.Element{ownerElement(who)}
	shared := map[ports.Port]bool{}
	for _, p := range h.Shared {
		shared[p] = true
	}
	for _, p := range h.Ports {
		of := []nft.Element{takenElement(p, h.comment())}
		if !h.ByIPTables {
			of = elementsOf(p, h.comment())
		}
		if shared[p] {
			of = of[1:] // another attachment forwards the first port
		}
		out = append(out, of...)
	}
	return uniqueElements(out)
}

// uniqueElements removes elements whose key an earlier one has.
func uniqueElements(elements []nft.Element) []nft.Element {
	seen := map[string]bool{}
	return slices.DeleteFunc(elements, func(e nft.Element) bool {
		id := e.Set + string(e.Key)
		again := seen[id]
		seen[id] = true
		return again
	})
}

// isForward reports whether the element is in a set in which each port has exactly one owner.
func isForward(e nft.Element) bool {
	name := strings.TrimRight(e.Set, "46")
	return name == "ports" || name == "hostip_ports" || name == "ranges" || name == "taken"
}

// portOf parses the node port of a forwarding element: its key is address, protocol and first port; its value is the target address.
// Without a value, the name of the set determines the family.
func portOf(e nft.Element) ports.Port {
	to, size := netip.IPv6Unspecified(), 16
	if strings.HasSuffix(e.Set, "4") {
		to, size = netip.IPv4Unspecified(), 4
	}
	if len(e.Value) >= size {
		to, _ = netip.AddrFromSlice(e.Value[:size])
	}
	p := ports.Port{To: netip.AddrPortFrom(to, 0)}
	end := len(e.Key)
	if end < 8 {
		return p
	}
	p.Port = binary.BigEndian.Uint16(e.Key[end-4:])
	for _, protocol := range []string{"tcp", "udp", "sctp"} {
		if (ports.Port{Protocol: protocol}).Number() == e.Key[end-8] {
			p.Protocol = protocol
		}
	}
	if addr, ok := netip.AddrFromSlice(e.Key[:end-8]); ok && !addr.IsUnspecified() {
		p.HostIP = addr
	}
	if len(e.Last) == end && strings.HasPrefix(e.Set, "ranges") {
		p.Last = binary.BigEndian.Uint16(e.Last[end-4:])
	}
	return p
}

// portOwner describes an attachment with hostPorts, as nf_tables knows it.
type portOwner struct {
	Hash  string // of the attachment's key
	Netns string // as in ownedPorts.Netns
}

// ownerOf parses the set element that represents an attachment.
func ownerOf(e nft.Element) portOwner {
	hash, netns, _ := strings.Cut(e.Comment, " ")
	if !strings.HasPrefix(netns, "/") {
		netns = ""
	}
	return portOwner{hash, netns}
}

// ownerHash returns the attachment's hash at the start of an owner comment.
func ownerHash(comment string) string {
	hash, _, _ := strings.Cut(comment, " ")
	return hash
}

// ownerName returns the readable name in an owner comment.
func ownerName(owner string) string {
	if _, name, ok := strings.Cut(owner, " "); ok {
		return strings.TrimSuffix(name, heirsMark)
	}
	return owner
}
