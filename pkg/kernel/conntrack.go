// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
	"github.com/podlace/podlace/pkg/nft"
)

// Attributes of ctnetlink that the imported packages lack (include/uapi/linux/netfilter/nfnetlink_conntrack.h,
// net/netfilter/nf_internals.h).
const (
	ctaFilter          = 25
	ctaFilterOrigFlags = 1
	filterProtocol     = 1 << 3
	filterDstPort      = 1 << 5
	ctGetStats         = 5
	ctaGlobalEntries   = 1
)

// From manyFlows entries on, walkUDP requests two filtered dumps instead of a full one. With 3,500 entries both take the same time: the
// full dump transfers them all (3 µs each), and the filtered one walks the table a second time (11 ms).
const manyFlows = 3500

// UDPFlow is a UDP entry of the connection tracking table.
type UDPFlow struct {
	To, Answer netip.AddrPort // destination of the first packet, and source of the replies
	tuple      []byte         // addresses and ports of the first packet, in the kernel's encoding
	message    []byte         // the kernel's message about the entry
}

// maxAnswers limits how often DelUDP looks for entries that late replies created during the deletion.
const maxAnswers = 5

// DelUDP deletes the stale UDP entries among those whose first packet went to one of the ports, for IPv4, IPv6 or both, and those that
// replies in flight create meanwhile. isStale also gets entries for other ports. DelUDP reads the kernel's table, which all namespaces
// share, once for any number of ports (see walkUDP), and holds only a few entries at a time.
func (t Conntrack) DelUDP(ports []uint16, families []bool, isStale func(UDPFlow) (bool, error)) error {
	var stale []UDPFlow
	err := t.walkUDP(ports, families, func(f UDPFlow) error {
		is, err := isStale(f)
		if !is || err != nil {
			return err
		}
		f, _ = parseFlow(bytes.Clone(f.message))
		if stale = append(stale, f); len(stale) < mostRequests {
			return nil
		}
		err, stale = t.del(stale), nil
		return err
	})
	return errors.Join(err, t.del(stale))
}

// del deletes entries, and those that replies in flight create meanwhile. It is a no-op for an empty list.
func (t Conntrack) del(stale []UDPFlow) error {
	if len(stale) == 0 {
		return nil
	}
	return fault.Change(fmt.Sprintf("conntrack delete %d stale udp entries", len(stale)), func() error {
		for range maxAnswers {
			var requests []*nl.NetlinkRequest
			for _, f := range stale { // by tuple, zone and ID
				req := request(nl.IPCTNL_MSG_CT_DELETE, 0, f.message[0])
				req.AddRawData(entryOf(f.message))
				requests = append(requests, req)
			}
			err := t.change.exchange(requests, func(int, []byte) error { return nil })
			if err != nil {
				return err
			}
			if stale, err = t.reversedEntries(stale); len(stale) == 0 {
				return err
			}
		}
		return nil
	})
}

// reversedEntries returns the entries that the kernel created in place of deleted ones, with reversed directions, because a server's reply
// was in flight. The kernel would treat the client's next packet as a reply.
func (t Conntrack) reversedEntries(deleted []UDPFlow) (found []UDPFlow, err error) {
	var requests []*nl.NetlinkRequest
	for _, f := range deleted {
		req := request(nl.IPCTNL_MSG_CT_GET, 0, f.message[0], nl.NewRtAttr(unix.NLA_F_NESTED|nl.CTA_TUPLE_ORIG, f.tuple))
		if zone := attributeAt(entryOf(f.message), nl.CTA_ZONE); zone != nil {
			req.AddData(nl.NewRtAttr(nl.CTA_ZONE, zone))
		}
		requests = append(requests, req)
	}
	err = t.change.exchange(requests, func(of int, message []byte) error {
		f := deleted[of]
		f.message = bytes.Clone(message)
		if tuple := attributeAt(entryOf(message), nl.CTA_TUPLE_ORIG); tuple != nil && !bytes.Equal(tuple, f.tuple) {
			found = append(found, f)
		}
		return nil
	})
	return found, err
}

// LocalAddresses returns all addresses that are assigned in the namespace.
func (n *NS) LocalAddresses() (map[netip.Addr]bool, error) {
	list, err := n.listAddresses(nil)
	if err != nil {
		return nil, fmt.Errorf("addr show: %w", err)
	}
	local := map[netip.Addr]bool{}
	for _, a := range list {
		if addr, ok := netip.AddrFromSlice(a.IP); ok {
			local[addr.Unmap()] = true
		}
	}
	return local, nil
}

// entryOf returns the attributes of a ctnetlink message about an entry.
func entryOf(message []byte) []byte {
	if len(message) < nl.SizeofNfgenmsg {
		return nil
	}
	return message[nl.SizeofNfgenmsg:]
}

// parseFlow parses a ctnetlink message. ok is false unless it is about a UDP entry.
func parseFlow(message []byte) (f UDPFlow, ok bool) {
	attributes := entryOf(message)
	if attributes == nil {
		return UDPFlow{}, false
	}
	source, destination := uint16(nl.CTA_IP_V4_SRC), uint16(nl.CTA_IP_V4_DST)
	if message[0] == unix.AF_INET6 {
		source, destination = nl.CTA_IP_V6_SRC, nl.CTA_IP_V6_DST
	}
	end := func(tuple []byte, addr, port uint16) netip.AddrPort {
		a, _ := netip.AddrFromSlice(attributeAt(tuple, nl.CTA_TUPLE_IP, addr))
		p := attributeAt(tuple, nl.CTA_TUPLE_PROTO, port)
		if len(p) != 2 {
			return netip.AddrPort{}
		}
		return netip.AddrPortFrom(a, binary.BigEndian.Uint16(p))
	}
	original := attributeAt(attributes, nl.CTA_TUPLE_ORIG)
	protocol := attributeAt(original, nl.CTA_TUPLE_PROTO, nl.CTA_PROTO_NUM)
	reply := attributeAt(attributes, nl.CTA_TUPLE_REPLY)
	f = UDPFlow{end(original, destination, nl.CTA_PROTO_DST_PORT), end(reply, source, nl.CTA_PROTO_SRC_PORT), original, message}
	return f, len(protocol) == 1 && protocol[0] == unix.IPPROTO_UDP && f.To.IsValid() && f.Answer.IsValid()
}

// walkUDP calls f for each UDP entry of the connection tracking table until f fails. An entry is valid until f returns. The kernel can
// filter a dump by protocol only for one address family, so a small table is read in one unfiltered dump of both. For a large one, a
// filtered dump per family is faster: 65 ms instead of 350 ms for 100,000 entries.
func (t Conntrack) walkUDP(ports []uint16, families []bool, f func(UDPFlow) error) error {
	if len(families) > 1 && t.countConnections() < manyFlows {
		return t.dump(unix.AF_UNSPEC, nil, f)
	}
	for _, is4 := range families {
		family := familyOf(is4)
		err := t.dump(family, udpFilter(ports), f)
		if errors.Is(err, unix.EOPNOTSUPP) || errors.Is(err, unix.EINVAL) {
			err = t.dump(family, nil, f)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// countConnections returns the number of tracked connections, or 0 if the kernel does not report it.
func (t Conntrack) countConnections() (count uint32) {
	_ = t.walk.exchange([]*nl.NetlinkRequest{request(ctGetStats, 0, unix.AF_UNSPEC)}, func(_ int, message []byte) error {
		if n := attributeAt(entryOf(message), ctaGlobalEntries); len(n) == 4 {
			count = binary.BigEndian.Uint32(n)
		}
		return nil
	})
	return count
}

// udpFilter returns attributes that limit a dump to UDP entries, and to a destination port if there is only one. Kernels before 5.8 ignore
// them.
func udpFilter(ports []uint16) []*nl.RtAttr {
	tuple := nl.NewRtAttr(unix.NLA_F_NESTED|nl.CTA_TUPLE_ORIG, nil)
	protocol := tuple.AddRtAttr(unix.NLA_F_NESTED|nl.CTA_TUPLE_PROTO, nil)
	protocol.AddRtAttr(nl.CTA_PROTO_NUM, []byte{unix.IPPROTO_UDP})
	flags := uint32(filterProtocol)
	if len(ports) == 1 {
		flags |= filterDstPort
		protocol.AddRtAttr(nl.CTA_PROTO_DST_PORT, nft.BigEndian(ports[0]))
	}
	filter := nl.NewRtAttr(unix.NLA_F_NESTED|ctaFilter, nil)
	filter.AddRtAttr(ctaFilterOrigFlags, binary.NativeEndian.AppendUint32(nil, flags))
	return []*nl.RtAttr{tuple, filter}
}

func (t Conntrack) dump(family uint8, filter []*nl.RtAttr, f func(UDPFlow) error) error {
	req := request(nl.IPCTNL_MSG_CT_GET, unix.NLM_F_DUMP, family, filter...)
	err := t.walk.exchange([]*nl.NetlinkRequest{req}, func(_ int, message []byte) error {
		if entry, ok := parseFlow(message); ok {
			return f(entry)
		}
		return nil
	})
	slog.Debug("read", "op", "conntrack walk", "family", family, "filtered", filter != nil, "error", err)
	if err != nil {
		return fmt.Errorf("conntrack walk: %w", err)
	}
	return nil
}
