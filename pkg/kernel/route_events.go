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

// RouteEvent reports that paths to other nodes, or the routes of a protocol, may have changed since the previous event.
type RouteEvent struct {
	Lost    bool   // the socket overflowed and some events were lost: anything may have changed
	Removed bool   // a route or a nexthop object of the protocol was deleted
	What    string // the last change, for logs: "link eth0", "route 10.2.0.0/24", "nexthop 7", "address fd00::1"
}

// RouteEvents sends changes in the caller's namespace that affect the routes of a protocol:
// - a route or nexthop object of the protocol was deleted;
// - a link went up or down, or its MTU changed (except for bridge ports, bond ports and ifbs);
// - a global IPv6 address was added or removed;
// - another program's route in the main table was added, removed or replaced, if it has no gateway or is a default route.
//
// A socket filter drops other routes of other programs. Events that the receiver has not yet taken are merged into one. The kernel deletes
// the routes and nexthop objects of a link that goes down without a message. When ctx ends, the channel is closed.
func RouteEvents(ctx context.Context, protocol int) (<-chan RouteEvent, error) {
	socket, err := subscribeRoutes(protocol)
	if err != nil {
		return nil, fmt.Errorf("listen to routes: %w", err)
	}
	notices, events := make(chan notice), make(chan RouteEvent)
	var running sync.WaitGroup
	parse := func(datagram []byte) []notice { return routeNotices(datagram, protocol) }
	running.Go(func() { sendEvents(ctx, socket, parse, lostNotice(), notices) })
	running.Go(func() { merge(ctx, notices, events) })
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

// merge forwards relevant notices. It merges notices that the receiver has not yet taken into one event.
func merge(ctx context.Context, from <-chan notice, to chan<- RouteEvent) {
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
			if !known.concerns(n) {
				continue
			}
			pending = RouteEvent{Lost: pending.Lost || n.Lost, Removed: pending.Removed || n.Removed, What: n.What}
			out = to
		}
	}
}

// notice is one message of the kernel.
type notice struct {
	RouteEvent
	link  int // ifindex, for a message about a link
	state linkState
	fresh bool // the link is new
	gone  bool
}

func lostNotice() notice { return notice{RouteEvent: RouteEvent{Lost: true, What: "lost events"}} }

// linkState is the state of a link on which routes depend. It is zero for a link that is down or that no route uses.
type linkState struct {
	flags uint32
	mtu   uint32
}

type routeLinks map[int]linkState

// concerns reports whether a notice is about routes, or about a changed link that routes may use. It stores the states of links, and clears
// them when notices are lost.
func (known routeLinks) concerns(n notice) bool {
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

// routeNotices parses messages of rtnetlink(7).
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
			addr, found := netip.AddrFromSlice(attribute(body[min(unix.SizeofIfAddrmsg, len(body)):], unix.IFA_ADDRESS))
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
	n.What = "link " + strings.TrimRight(string(attribute(attributes, unix.IFLA_IFNAME)), "\x00")
	kind := strings.TrimRight(string(nested(attributes, unix.IFLA_LINKINFO, nl.IFLA_INFO_KIND)), "\x00")
	leads := kind != "ifb" && number32(attribute(attributes, unix.IFLA_MASTER)) == 0
	if leads && !gone && header.Flags&unix.IFF_UP != 0 {
		n.state = linkState{header.Flags & (unix.IFF_UP | unix.IFF_RUNNING | unix.IFF_LOWER_UP), number32(attribute(attributes, unix.IFLA_MTU))}
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
	// The kernel adds a link-local route for each link.
	return n, ok && !r.Dst.Addr().IsLinkLocalUnicast() && !r.Dst.Addr().IsMulticast()
}

// Offsets of the fields that the filter reads, after the 16-byte header.
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

// routeFilter returns a filter that the kernel runs for each message, so that irrelevant routes of other programs cost next to nothing. It
// sees only the first message of a datagram; the kernel sends each message in its own datagram.
func routeFilter(protocol int) []unix.SockFilter {
	p := newProgram()
	p.load(atType, 2)
	for _, t := range []struct {
		kind uint16
		to   string
	}{{unix.RTM_NEWLINK, "accept"}, {unix.RTM_DELLINK, "accept"}, {unix.RTM_NEWADDR, "address"}, {unix.RTM_DELADDR, "address"},
		{unix.RTM_DELNEXTHOP, "nexthop"}, {unix.RTM_NEWROUTE, "new route"}, {unix.RTM_DELROUTE, "deleted route"}} {
		p.jumpIf(unix.BPF_JEQ, inNetworkOrder(t.kind), t.to)
	}
	p.jump("drop")

	p.label("address")
	p.load(atScope, 1)
	p.jumpIf(unix.BPF_JGE, unix.RT_SCOPE_LINK, "drop")
	p.jump("accept")

	p.label("nexthop")
	p.load(atNHProtocol, 1)
	p.jumpIf(unix.BPF_JEQ, uint32(protocol), "accept")
	p.jump("drop")

	p.label("deleted route")
	p.load(atProtocol, 1)
	p.jumpIf(unix.BPF_JEQ, uint32(protocol), "accept")
	p.jump("route")

	p.label("new route")
	p.load(atProtocol, 1)
	p.jumpIf(unix.BPF_JEQ, uint32(protocol), "drop")
	p.load(atTable, 1)
	p.jumpIf(unix.BPF_JEQ, unix.RT_TABLE_MAIN, "replaced route")
	p.jump("drop")
	p.label("replaced route")
	p.load(atFlags, 2)
	p.jumpIf(unix.BPF_JSET, inNetworkOrder(unix.NLM_F_REPLACE), "accept")

	p.label("route")
	p.load(atTable, 1)
	p.jumpIf(unix.BPF_JEQ, unix.RT_TABLE_MAIN, "main route")
	p.jump("drop")
	p.label("main route")
	p.load(atDstLen, 1)
	p.jumpIf(unix.BPF_JEQ, 0, "accept")
	for _, a := range []uint32{unix.RTA_GATEWAY, unix.RTA_VIA, unix.RTA_MULTIPATH, rtaNHID} {
		p.attribute(a, atAttributes)
		p.jumpIf(unix.BPF_JGT, 0, "drop")
	}
	p.label("accept")
	p.end(largestEvent)
	p.label("drop")
	p.end(0)
	return p.assemble()
}

// inNetworkOrder converts a number that the kernel writes in host byte order to the value that BPF loads, which reads in network byte
// order.
func inNetworkOrder(n uint16) uint32 {
	return uint32(binary.BigEndian.Uint16(binary.NativeEndian.AppendUint16(nil, n)))
}
