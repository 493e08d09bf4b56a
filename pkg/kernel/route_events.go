// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"context"
	"encoding/binary"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// RouteEvent reports a possible change of the paths to other nodes, or of the routes of a protocol, since the previous event.
type RouteEvent struct {
	Lost    bool   // the socket overflowed and some events were lost: anything may have changed
	Removed bool   // a route or a nexthop object of the protocol was deleted
	What    string // the last change, for logs: "link eth0", "route 10.2.0.0/24", "nexthop 7", "address fd00::1"
}

// RouteEvents returns a channel of events about changes in the caller's namespace that can affect the routes of a protocol. RouteEvents
// reports deleted routes and nexthop objects of the protocol. RouteEvents reports changes of the MTU or the state (up or down) of links,
// except bridge ports, bond ports and ifbs. RouteEvents reports added and removed global IPv6 addresses. RouteEvents reports changed routes
// of other programs in the main table, but only default routes, routes without a gateway, and replaced routes.
//
// A socket filter drops all other messages about routes. If the receiver is slow, RouteEvents merges several changes into one event.
// RouteEvents closes the channel when ctx ends. When a link goes down, the kernel deletes the routes and nexthop objects of the link
// without messages. RouteEvents then reports only the change of the link.
func RouteEvents(ctx context.Context, protocol int) (<-chan RouteEvent, error) {
	socket, err := subscribeRoutes(protocol)
	if err != nil {
		return nil, fmt.Errorf("listen to routes: %w", err)
	}
	notices, events := make(chan notice), make(chan RouteEvent)
	var running sync.WaitGroup
	parse := func(datagram []byte) []notice { return routeNotices(datagram, protocol) }
	running.Go(func() { sendEvents(ctx, socket, parse, lostNotice(), notices) })
	running.Go(func() { mergeNotices(ctx, notices, events) })
	context.AfterFunc(ctx, func() {
		socket.Close()
		running.Wait()
		close(events)
	})
	return events, nil
}

func subscribeRoutes(protocol int) (*os.File, error) {
	return subscribe(unix.NETLINK_ROUTE, routeFilter(protocol), unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE,
		unix.RTNLGRP_NEXTHOP, unix.RTNLGRP_IPV6_IFADDR)
}

// mergeNotices sends a RouteEvent for each notice that can affect routes. While the receiver is busy, mergeNotices merges the notices into
// one RouteEvent.
func mergeNotices(ctx context.Context, from <-chan notice, to chan<- RouteEvent) {
	known := routeLinks{}
	var pending RouteEvent
	var out chan<- RouteEvent // nil while no event is pending
	for {
		select {
		case <-ctx.Done():
			return
		case out <- pending:
			pending, out = RouteEvent{}, nil
		case n := <-from:
			if !known.isRelevant(n) {
				continue
			}
			pending = RouteEvent{Lost: pending.Lost || n.Lost, Removed: pending.Removed || n.Removed, What: n.What}
			out = to
		}
	}
}

// A notice contains the data of one kernel message about a route, a nexthop object, a link or an address.
type notice struct {
	RouteEvent
	link  int // ifindex, for a message about a link
	state linkState
	fresh bool // the link is new
	gone  bool
}

func lostNotice() notice { return notice{RouteEvent: RouteEvent{Lost: true, What: "lost events"}} }

// linkState is the part of a link's state that affects routes. The zero value of linkState means that routes cannot use the link, for
// example because it is down.
type linkState struct {
	flags uint32
	mtu   uint32
}

type routeLinks map[int]linkState

// isRelevant reports whether a notice can affect routes. A notice about a link is relevant only if the state of the link changed.
// isRelevant stores the state of each link for the next notice. If the socket has lost messages (n.Lost), isRelevant deletes all stored
// states.
func (known routeLinks) isRelevant(n notice) bool {
	if n.Lost {
		clear(known)
	}
	if n.link == 0 {
		return true
	}
	was, ok := known[n.link]
	known[n.link] = n.state
	if n.gone {
		delete(known, n.link)
	}
	if !ok {
		return !n.fresh && !n.gone && n.state == linkState{} || n.state != linkState{}
	}
	return was != n.state
}

// routeNotices returns the notices in a datagram of rtnetlink(7) messages.
func routeNotices(datagram []byte, protocol int) []notice {
	return eachMessage(datagram, lostNotice(), func(kind, flags uint16, body []byte) []notice {
		var n notice
		ok := false
		switch kind {
		case unix.RTM_NEWLINK, unix.RTM_DELLINK:
			n, ok = linkNotice(body, kind == unix.RTM_DELLINK)
		case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
			n, ok = routeNotice(body, kind == unix.RTM_DELROUTE, protocol)
		case unix.RTM_DELNEXTHOP:
			h, found := parseNexthop(body)
			n.Removed, n.What, ok = true, fmt.Sprintf("nexthop %d", h.ID), found && h.Protocol == protocol
		case unix.RTM_NEWADDR, unix.RTM_DELADDR:
			addr, found := netip.AddrFromSlice(attributeOf(body[min(unix.SizeofIfAddrmsg, len(body)):], unix.IFA_ADDRESS))
			n.What, ok = "address "+addr.String(), found
		}
		if !ok {
			return nil
		}
		return []notice{n}
	})
}

func linkNotice(body []byte, gone bool) (n notice, ok bool) {
	if len(body) < unix.SizeofIfInfomsg {
		return lostNotice(), true
	}
	header, attributes := nl.DeserializeIfInfomsg(body), body[unix.SizeofIfInfomsg:]
	n.link, n.fresh, n.gone = int(header.Index), header.Change == ^uint32(0), gone
	n.What = "link " + strings.TrimRight(string(attributeOf(attributes, unix.IFLA_IFNAME)), "\x00")
	kind := strings.TrimRight(string(attributeAt(attributes, unix.IFLA_LINKINFO, nl.IFLA_INFO_KIND)), "\x00")
	leads := kind != "ifb" && number32(attributeOf(attributes, unix.IFLA_MASTER)) == 0
	if leads && !gone && header.Flags&unix.IFF_UP != 0 {
		n.state = linkState{header.Flags & (unix.IFF_UP | unix.IFF_RUNNING | unix.IFF_LOWER_UP), number32(attributeOf(attributes, unix.IFLA_MTU))}
	}
	n.fresh = n.fresh || !leads
	return n, header.Family != unix.AF_BRIDGE
}

func routeNotice(body []byte, gone bool, protocol int) (n notice, ok bool) {
	r, ok := parseRoute(body)
	n.What = "route " + r.Dst.String()
	if r.Protocol == protocol {
		n.Removed = true
		return n, ok && gone
	}
	// Link-local routes are irrelevant, because they never lead to pods on other nodes, and the kernel adds one for each link.
	return n, ok && !r.Dst.Addr().IsLinkLocalUnicast() && !r.Dst.Addr().IsMulticast()
}

// These constants are the offsets of the message fields that routeFilter reads, in bytes.
const (
	atType       = 4
	atFlags      = 6
	atNHProtocol = unix.SizeofNlMsghdr + 2
	atDstLen     = unix.SizeofNlMsghdr + 1
	atTable      = unix.SizeofNlMsghdr + 4
	atProtocol   = unix.SizeofNlMsghdr + 5
	atScope      = unix.SizeofNlMsghdr + 3
	atAttributes = unix.SizeofNlMsghdr + unix.SizeofRtMsg
)

// routeFilter returns a socket filter that the kernel runs for each datagram. The socket filter drops messages about irrelevant routes of
// other programs, so that this process does not have to read them. routeFilter reads only the first message of a datagram. The first
// message is enough, because the kernel sends only one message per datagram.
func routeFilter(protocol int) []unix.SockFilter {
	p := newProgram()
	p.loadBytes(atType, 2)
	for _, t := range []struct {
		kind uint16
		to   string
	}{{unix.RTM_NEWLINK, "accept"}, {unix.RTM_DELLINK, "accept"}, {unix.RTM_NEWADDR, "address"}, {unix.RTM_DELADDR, "address"},
		{unix.RTM_DELNEXTHOP, "nexthop"}, {unix.RTM_NEWROUTE, "new route"}, {unix.RTM_DELROUTE, "deleted route"}} {
		p.jumpIf(unix.BPF_JEQ, inNetworkOrder(t.kind), t.to)
	}
	p.jump("drop")

	p.label("address")
	p.loadBytes(atScope, 1)
	p.jumpIf(unix.BPF_JGE, unix.RT_SCOPE_LINK, "drop")
	p.jump("accept")

	p.label("nexthop")
	p.loadBytes(atNHProtocol, 1)
	p.jumpIf(unix.BPF_JEQ, uint32(protocol), "accept")
	p.jump("drop")

	p.label("deleted route")
	p.loadBytes(atProtocol, 1)
	p.jumpIf(unix.BPF_JEQ, uint32(protocol), "accept")
	p.jump("route")

	p.label("new route")
	p.loadBytes(atProtocol, 1)
	p.jumpIf(unix.BPF_JEQ, uint32(protocol), "drop")
	p.loadBytes(atTable, 1)
	p.jumpIf(unix.BPF_JEQ, unix.RT_TABLE_MAIN, "replaced route")
	p.jump("drop")
	p.label("replaced route")
	p.loadBytes(atFlags, 2)
	p.jumpIf(unix.BPF_JSET, inNetworkOrder(unix.NLM_F_REPLACE), "accept")

	p.label("route")
	p.loadBytes(atTable, 1)
	p.jumpIf(unix.BPF_JEQ, unix.RT_TABLE_MAIN, "main route")
	p.jump("drop")
	p.label("main route")
	p.loadBytes(atDstLen, 1)
	p.jumpIf(unix.BPF_JEQ, 0, "accept")
	for _, a := range []uint32{unix.RTA_GATEWAY, unix.RTA_VIA, unix.RTA_MULTIPATH, rtaNHID} {
		p.loadAttribute(a, atAttributes)
		p.jumpIf(unix.BPF_JGT, 0, "drop")
	}
	p.label("accept")
	p.returnBytes(largestEvent)
	p.label("drop")
	p.returnBytes(0)
	return p.assemble()
}

// inNetworkOrder returns the value that a BPF load instruction sees for a number in a netlink message. Netlink uses host byte order, and
// BPF loads in network byte order.
func inNetworkOrder(n uint16) uint32 {
	return uint32(binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, n)))
}
