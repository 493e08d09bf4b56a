// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"strconv"

	"golang.org/x/sys/unix"
)

// Attributes of connection tracking entries. An entry has two tuples of addresses and a part for the protocol.
const (
	ctGet                                     = 1
	ctaTupleOrig, ctaTupleReply               = 1, 2
	ctaStatus, ctaMark, ctaZone               = 3, 8, 18
	ctaTupleIP, ctaTupleProto                 = 1, 2
	ctaV4Src, ctaV4Dst, ctaV6Src, ctaV6Dst    = 1, 2, 3, 4
	ctaProtoNum, ctaProtoSport, ctaProtoDport = 1, 2, 3
	natBits                                   = 1<<4 | 1<<5 // IPS_SRC_NAT, IPS_DST_NAT
)

// collectConntrack collects what affects packets, and not the age of an entry.
func (c *collector) collectConntrack(s *socket) error {
	messages, err := s.dump("connection tracking", unix.NFNL_SUBSYS_CTNETLINK<<8|ctGet, make([]byte, sizeofNfGenMsg))
	if err != nil {
		return err
	}
	for _, m := range messages {
		list, _ := parseAttrs(m[sizeofNfGenMsg:])
		name := "conntrack " + tuple(nestedAttrs(list, ctaTupleOrig)) + " reply " + tuple(nestedAttrs(list, ctaTupleReply))
		if status := findAttr(list, ctaStatus); len(status) == 4 && binary.BigEndian.Uint32(status)&natBits != 0 {
			name += " nat"
		}
		if mark := findAttr(list, ctaMark); mark != nil {
			name += " mark " + bigNumber(c, mark)
		}
		if zone := findAttr(list, ctaZone); len(zone) == 2 {
			name += fmt.Sprintf(" zone %d", binary.BigEndian.Uint16(zone))
		}
		c.add(name)
	}
	return nil
}

func tuple(list []attr) string {
	addrs, proto := nestedAttrs(list, ctaTupleIP), nestedAttrs(list, ctaTupleProto)
	src, dst := findAttr(addrs, ctaV4Src), findAttr(addrs, ctaV4Dst)
	if src == nil {
		src, dst = findAttr(addrs, ctaV6Src), findAttr(addrs, ctaV6Dst)
	}
	num := findAttr(proto, ctaProtoNum)
	if len(num) != 1 {
		return "unknown"
	}
	return fmt.Sprintf("protocol %d %s to %s", num[0], endpoint(src, findAttr(proto, ctaProtoSport)), endpoint(dst, findAttr(proto,
		ctaProtoDport)))
}

func endpoint(addr, port []byte) string {
	a, _ := netip.AddrFromSlice(addr)
	if len(port) != 2 {
		return a.String()
	}
	return net.JoinHostPort(a.String(), strconv.Itoa(int(binary.BigEndian.Uint16(port))))
}
