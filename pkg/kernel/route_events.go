// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"syscall"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// RouteEvent reports a possible change of the paths to other nodes, or of the routes of a protocol, since the previous event.
type RouteEvent struct {
	Lost    bool   // the socket overflowed and some events were lost: anything may have changed
	Removed bool   // a route or a nexthop object of the protocol was deleted
	What    string // the last change, for logs: "link eth0", "route 10.2.0.0/24", "nexthop 7", "address fd00::1"
}

// RouteEvents returns a channel of events about changes in the caller's namespace that can affect the routes of a protocol: deleted routes
// and nexthop objects of this protocol; the MTU and state (up or down) of links, except bridge ports, bond ports and ifbs; added and
// removed global IPv6 addresses; and other programs' routes in the main table that are default routes, have no gateway, or were replaced.
//
// The changes of eventPause make one event. The channel is closed when ctx ends. When a link goes down, only this is reported, because the
// kernel deletes its routes and nexthop objects without messages.
func RouteEvents(ctx context.Context, protocol int) (<-chan RouteEvent, error) {
	socket, err := subscribeRoutes()
	if err != nil {
		return nil, fmt.Errorf("listen to routes: %w", err)
	}
	context.AfterFunc(ctx, func() { socket.Close() })
	events, known := make(chan RouteEvent), routeLinks{}
	go func() {
		defer close(events)
		parse := func(datagram []byte) []notice { return routeNotices(datagram, protocol) }
		listen(socket, parse, lostNotice(), func(list []notice) {
			var e RouteEvent
			for _, n := range list {
				if known.isRelevant(n) {
					e = RouteEvent{Lost: e.Lost || n.Lost, Removed: e.Removed || n.Removed, What: n.What}
				}
			}
			if e.What != "" {
				select {
				case events <- e:
				case <-ctx.Done():
				}
			}
			select {
			case <-time.After(eventPause):
			case <-ctx.Done():
			}
		})
	}()
	return events, nil
}

// eventPause is how long RouteEvents collects messages, so that a routing daemon wakes the process ten times a second and not for each of
// its routes. The messages about 100,000 of them cost 0.5 s of CPU.
const eventPause = 100 * time.Millisecond

func subscribeRoutes() (*os.File, error) {
	return subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_LINK, unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_NEXTHOP,
		unix.RTNLGRP_IPV6_IFADDR)
}

// notice is one kernel message about a route, a nexthop object, a link or an address.
type notice struct {
	RouteEvent
	link  int // ifindex, for a message about a link
	state linkState
	fresh bool // the link is new
	gone  bool
}

func lostNotice() notice { return notice{RouteEvent: RouteEvent{Lost: true, What: "lost events"}} }

// linkState is the part of a link's state that affects routes. It is zero if routes cannot use the link, for example while it is down.
type linkState struct {
	flags uint32
	mtu   uint32
}

type routeLinks map[int]linkState

// isRelevant reports whether a notice can affect routes. It stores the state of each link, because a notice about a link is relevant only
// if that changed. If the socket lost messages (n.Lost), it forgets all states.
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
	return eachMessage(datagram, lostNotice(), func(m syscall.NetlinkMessage) (n notice, ok bool) {
		switch kind, body := m.Header.Type, m.Data; kind {
		case unix.RTM_NEWLINK, unix.RTM_DELLINK:
			return linkNotice(body, kind == unix.RTM_DELLINK)
		case unix.RTM_NEWROUTE, unix.RTM_DELROUTE:
			return routeNotice(body, m.Header.Flags, kind == unix.RTM_DELROUTE, protocol)
		case unix.RTM_DELNEXTHOP:
			h, found := parseNexthop(body)
			n.Removed, n.What, ok = true, fmt.Sprintf("nexthop %d", h.ID), found && h.Protocol == protocol
		case unix.RTM_NEWADDR, unix.RTM_DELADDR:
			addr, found := netip.AddrFromSlice(attributeOf(body[min(unix.SizeofIfAddrmsg, len(body)):], unix.IFA_ADDRESS))
			n.What, ok = "address "+addr.String(), found && body[3] < unix.RT_SCOPE_LINK
		}
		return n, ok
	})
}

func linkNotice(body []byte, gone bool) (n notice, ok bool) {
	if len(body) < unix.SizeofIfInfomsg {
		return lostNotice(), true
	}
	header, attributes := nl.DeserializeIfInfomsg(body), body[unix.SizeofIfInfomsg:]
	n.link, n.fresh, n.gone = int(header.Index), header.Change == ^uint32(0), gone
	n.What = "link " + textAt(attributes, unix.IFLA_IFNAME)
	leads := textAt(attributes, unix.IFLA_LINKINFO, nl.IFLA_INFO_KIND) != "ifb" && number32(attributeOf(attributes, unix.IFLA_MASTER)) == 0
	if leads && !gone && header.Flags&unix.IFF_UP != 0 {
		n.state = linkState{header.Flags & (unix.IFF_UP | unix.IFF_RUNNING | unix.IFF_LOWER_UP), number32(attributeOf(attributes, unix.IFLA_MTU))}
	}
	n.fresh = n.fresh || !leads
	return n, header.Family != unix.AF_BRIDGE
}

func routeNotice(body []byte, flags uint16, gone bool, protocol int) (n notice, ok bool) {
	if len(body) < unix.SizeofRtMsg {
		return n, false
	}
	own := int(nl.DeserializeRtMsg(body).Protocol) == protocol
	if own && !gone || !own && !leadsElsewhere(body, flags&unix.NLM_F_REPLACE != 0) {
		return n, false
	}
	r, ok := parseRoute(body)
	n.Removed, n.What = own, "route "+r.Dst.String()
	// Link-local routes never lead to pods on other nodes, and the kernel adds one for each link.
	return n, ok && (own || !r.Dst.Addr().IsLinkLocalUnicast() && !r.Dst.Addr().IsMulticast())
}

// leadsElsewhere reports whether another program's route may change the path to a node: a route of the main table that is the default, has
// no gateway, or replaced another one.
func leadsElsewhere(route []byte, replaced bool) bool {
	if header := nl.DeserializeRtMsg(route); header.Table != unix.RT_TABLE_MAIN || replaced || header.Dst_len == 0 {
		return header.Table == unix.RT_TABLE_MAIN
	}
	for kind := range attributesIn(route[unix.SizeofRtMsg:]) {
		switch kind {
		case unix.RTA_GATEWAY, unix.RTA_VIA, unix.RTA_MULTIPATH, rtaNHID:
			return false
		}
	}
	return true
}
