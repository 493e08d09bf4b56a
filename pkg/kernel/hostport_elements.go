// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/nft"
	"golang.org/x/sys/unix"
)

// HostPort forwards a port of the node to a port of a pod.
type HostPort struct {
	Protocol string         `json:"protocol"`         // "tcp", "udp" or "sctp"
	HostIP   netip.Addr     `json:"hostIP,omitzero"`  // invalid: every address of the node of the pod's family
	Port     uint16         `json:"port"`             // on the node
	Last     uint16         `json:"last,omitzero"`    // of a range that leads to the same ports of the pod; 0 for one port
	To       netip.AddrPort `json:"to"`               // in the pod
	SNAT     bool           `json:"snat,omitempty"`   // masquerade what would not come back: hairpin and localhost
	MasqAll  bool           `json:"masqAll,omitzero"` // masquerade every source
}

// String returns "protocol hostIP:port" or "protocol first-last".
func (p HostPort) String() string {
	switch {
	case p.HostIP.IsValid():
		return p.Protocol + " " + netip.AddrPortFrom(p.HostIP, p.Port).String()
	case p.Last != 0:
		return fmt.Sprintf("%s %d-%d", p.Protocol, p.Port, p.Last)
	}
	return fmt.Sprintf("%s %d", p.Protocol, p.Port)
}

// last returns the last port, which is the only one unless there is a range.
func (p HostPort) last() uint16 { return max(p.Port, p.Last) }

// Singles takes ranges apart.
func Singles(ports []HostPort) (out []HostPort) {
	for _, p := range ports {
		for port := int(p.Port); port <= int(p.last()); port++ {
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

var protocols = map[string]byte{"tcp": unix.IPPROTO_TCP, "udp": unix.IPPROTO_UDP, "sctp": unix.IPPROTO_SCTP}

// elements returns the elements that forward the port; owner is their comment.
func (p HostPort) elements(owner string) []nft.Element {
	family := nft.Digit(p.To.Addr().Is4())
	fields := func(address ...byte) func(port uint16) []byte {
		return func(port uint16) []byte { return nft.Key(address, p.protocol(), nft.BigEndian(port)) }
	}
	e := nft.Element{Set: "ports" + family, Key: fields()(p.Port), Value: nft.Key(p.To.Addr().AsSlice(), nft.BigEndian(p.To.Port())), Comment: owner}
	suffix := ""
	switch {
	case p.HostIP.IsValid():
		e.Set, e.Key = "hostip_ports"+family, fields(p.HostIP.AsSlice()...)(p.Port)
	case p.Last != 0:
		suffix = "_ranges"
		e.Set, e.Last, e.Value = "ranges"+family, fields()(p.Last), p.To.Addr().AsSlice()
	}
	out := []nft.Element{e}
	// The connection is told from a Service's to the same pod by the port that the client used.
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

// taken is the nft.Element that tells other pods of a port that the iptables backend forwards.
func (p HostPort) taken(owner string) nft.Element {
	of := p.HostIP
	if !of.IsValid() {
		of = netip.AddrFrom4([4]byte{})
		if p.To.Addr().Is6() {
			of = netip.IPv6Unspecified()
		}
	}
	return nft.Element{Set: "taken" + nft.Digit(p.To.Addr().Is4()), Key: nft.Key(of.AsSlice(), p.protocol(), nft.BigEndian(p.Port)), Comment: owner}
}

func (p HostPort) protocol() []byte { return []byte{protocols[p.Protocol]} }

// HostPorts are the ports of one attachment.
type HostPorts struct {
	// Owner is the attachment's hash and, after a space, what an admin knows it by. Who has the same hash may change and delete them.
	Owner string
	// Bridge is the bridge behind which the pod is, "" when it is alone behind its link.
	Bridge string
	// Taken: another backend forwards them.
	Taken bool
	// Localhost is the link that was opened for 127.0.0.1 and is closed with these ports, "" for none.
	Localhost string
	// Netns is the path of the pod's network namespace: once it is gone, so is the owner. "" is none that one could know of.
	Netns string
	Ports []HostPort
	// Shared are those of the ports that another attachment of the same container forwards.
	Shared []HostPort
}

func (h HostPorts) comment() string { return h.Owner[:min(len(h.Owner), nft.MaxComment-1)] }

// ownerElement stands for the attachment with a hash. Its comment ends with the pod's network namespace, if that is known.
func ownerElement(comment string) nft.Element {
	sum, _ := hex.DecodeString(OwnerHash(comment))
	return nft.Element{Set: "owners", Key: append(sum, make([]byte, 8)...)[:8], Comment: comment}
}

func (h HostPorts) elements() []nft.Element {
	who := OwnerHash(h.Owner)
	if with := who + " " + h.Netns; h.Netns != "" && len(with) < nft.MaxComment {
		who = with
	}
	out := []nft.Element{ownerElement(who)}
	shared := map[HostPort]bool{}
	for _, p := range h.Shared {
		shared[p] = true
	}
	for _, p := range h.Ports {
		of := []nft.Element{p.taken(h.comment())}
		if !h.Taken {
			of = p.elements(h.comment())
		}
		if shared[p] {
			of = of[1:] // the first one forwards
		}
		out = append(out, of...)
	}
	return once(out)
}

// once leaves out elements whose key is in the set already.
func once(elements []nft.Element) []nft.Element {
	seen := map[string]bool{}
	return slices.DeleteFunc(elements, func(e nft.Element) bool {
		id := e.Set + string(e.Key)
		again := seen[id]
		seen[id] = true
		return again
	})
}

// Overlaps tells whether two clash: key of a hostPort are family, protocol, hostIP and port.
func (p HostPort) Overlaps(o HostPort) bool {
	return p.To.Addr().Is4() == o.To.Addr().Is4() && p.Protocol == o.Protocol && p.HostIP == o.HostIP && p.Port <= o.last() && o.Port <= p.last()
}

// forwards tells whether the nft.Element is of a set in which each port has one owner.
func isForward(e nft.Element) bool {
	name := strings.TrimRight(e.Set, "46")
	return name == "ports" || name == "hostip_ports" || name == "ranges" || name == "taken"
}

// port reads the port of the node from the key of an nft.Element that forwards: address, protocol, first port. Of where it leads the address is
// told, or at least its family.
func portOf(e nft.Element) HostPort {
	to, size := netip.IPv6Unspecified(), int(ipv6.length)
	if strings.HasSuffix(e.Set, ipv4.digit) {
		to, size = netip.IPv4Unspecified(), int(ipv4.length)
	}
	if len(e.Value) >= size {
		to, _ = netip.AddrFromSlice(e.Value[:size])
	}
	p := HostPort{To: netip.AddrPortFrom(to, 0)}
	end := len(e.Key)
	if end < 8 {
		return p
	}
	p.Port = binary.BigEndian.Uint16(e.Key[end-4:])
	for name, number := range protocols {
		if e.Key[end-8] == number {
			p.Protocol = name
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

// HostPortOwner is an attachment that has hostPorts, as nf_tables knows it.
type HostPortOwner struct {
	Hash  string // of the attachment's key
	Netns string // see HostPorts.Netns
}

// owner reads an nft.Element that stands for an attachment.
func ownerOf(e nft.Element) HostPortOwner {
	hash, netns, _ := strings.Cut(e.Comment, " ")
	if !strings.HasPrefix(netns, "/") {
		netns = ""
	}
	return HostPortOwner{hash, netns}
}

// OwnerHash returns the hash that an owner begins with.
func OwnerHash(comment string) string {
	hash, _, _ := strings.Cut(comment, " ")
	return hash
}

// OwnerName returns what an admin knows an owner by.
func OwnerName(owner string) string {
	if _, name, ok := strings.Cut(owner, " "); ok {
		return name
	}
	return owner
}
