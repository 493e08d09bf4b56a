// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Removal says that state was removed on which pods may depend.
type Removal struct {
	What string // the object, for logs: "table podlace_guard", "link cni0"
	By   string // the program, as in /proc/PID/comm, which only nf_tables reports
}

// String returns the object, and the program if it is known.
func (r Removal) String() string { return strings.TrimSuffix(r.What+" by "+r.By, " by ") }

// removalPause is how long Removals collects messages after each delivery, so that a flood wakes the process 20 times a second.
const removalPause = 50 * time.Millisecond

// Removals returns a channel of removals in the caller's namespace: nftables objects of the tables and chains that concern the caller,
// unless one of its own programs removes them; bridges and ifbs that were deleted, bridges that are down, and veths that are up without a
// bridge; addresses; routes that the kernel had added; qdiscs and filters; and forwarding of the whole node. The channel is closed when ctx
// ends.
func Removals(ctx context.Context, concern func(table, chain string) bool, own func(program string) bool) (<-chan Removal, error) {
	rules, err := subscribe(unix.NETLINK_NETFILTER, unix.NFNLGRP_NFTABLES)
	if err != nil {
		return nil, fmt.Errorf("listen to nftables: %w", err)
	}
	routes, err := subscribe(unix.NETLINK_ROUTE, unix.RTNLGRP_LINK, unix.RTNLGRP_TC, unix.RTNLGRP_IPV4_IFADDR, unix.RTNLGRP_IPV6_IFADDR,
		unix.RTNLGRP_IPV4_ROUTE, unix.RTNLGRP_IPV6_ROUTE, unix.RTNLGRP_IPV4_NETCONF, unix.RTNLGRP_IPV6_NETCONF)
	if err != nil {
		rules.Close()
		return nil, fmt.Errorf("listen to links, addresses and routes: %w", err)
	}
	removals := make(chan Removal)
	deliver := func(list []Removal) {
		if len(list) > 0 {
			select {
			case removals <- list[0]:
			case <-ctx.Done():
			}
		}
		select {
		case <-time.After(removalPause):
		case <-ctx.Done():
		}
	}
	var running sync.WaitGroup
	for socket, parse := range map[*os.File]func([]byte) []Removal{rules: ruleRemovals(concern, own), routes: routeRemovals} {
		running.Go(func() { listen(socket, parse, lostRemoval(), deliver) })
	}
	context.AfterFunc(ctx, func() {
		rules.Close()
		routes.Close()
		running.Wait()
		close(removals)
	})
	return removals, nil
}

func lostRemoval() Removal { return Removal{What: "lost events"} }

// ruleRemovals returns a parser for the datagrams of nf_tables. A transaction may take several of them, and its last message names the
// program. The kernel puts several messages into a datagram, so a socket filter that sees only the first type cannot select deletions.
func ruleRemovals(concern func(table, chain string) bool, own func(program string) bool) func([]byte) []Removal {
	var removed string // by the transaction
	return func(datagram []byte) []Removal {
		return eachMessage(datagram, lostRemoval(), func(m syscall.NetlinkMessage) (r Removal, ok bool) {
			attributes := m.Data[min(nl.SizeofNfgenmsg, len(m.Data)):]
			switch m.Header.Type & 0xff {
			case unix.NFT_MSG_DELTABLE, unix.NFT_MSG_DELSET, unix.NFT_MSG_DELSETELEM:
				removed = orConcern(removed, textAt(attributes, unix.NFTA_TABLE_NAME), "", concern)
			case unix.NFT_MSG_DELCHAIN:
				removed = orConcern(removed, textAt(attributes, unix.NFTA_CHAIN_TABLE), textAt(attributes, unix.NFTA_CHAIN_NAME), concern)
			case unix.NFT_MSG_DELRULE:
				removed = orConcern(removed, textAt(attributes, unix.NFTA_RULE_TABLE), textAt(attributes, unix.NFTA_RULE_CHAIN), concern)
			case unix.NFT_MSG_NEWGEN:
				r = Removal{What: removed, By: textAt(attributes, unix.NFTA_GEN_PROC_NAME)}
				ok, removed = removed != "" && !own(r.By), ""
			}
			return r, ok
		})
	}
}

func orConcern(removed, table, chain string, concern func(table, chain string) bool) string {
	if removed == "" && concern(table, chain) {
		return "rules in table " + table
	}
	return removed
}

// routeRemovals returns the removals in a datagram of rtnetlink(7) messages.
func routeRemovals(datagram []byte) []Removal {
	return eachMessage(datagram, lostRemoval(), func(m syscall.NetlinkMessage) (r Removal, ok bool) {
		switch body := m.Data; m.Header.Type {
		case unix.RTM_NEWLINK, unix.RTM_DELLINK:
			return linkRemoval(body, m.Header.Type == unix.RTM_DELLINK)
		case unix.RTM_DELADDR:
			return Removal{What: "an address"}, len(body) >= unix.SizeofIfAddrmsg && body[3] < unix.RT_SCOPE_LINK
		case unix.RTM_DELROUTE:
			return Removal{What: "a route"}, isSubnetRoute(body)
		case unix.RTM_DELQDISC: // without a handle, it is the kernel's default queue, which another one replaced
			return Removal{What: "a qdisc"}, len(body) >= nl.SizeofTcMsg && nl.DeserializeTcMsg(body).Handle != 0
		case unix.RTM_DELTFILTER:
			return Removal{What: "a filter"}, true
		case unix.RTM_NEWNETCONF:
			return Removal{What: "forwarding"}, stopsForwarding(body)
		}
		return r, false
	})
}

// isSubnetRoute reports whether the kernel had added a route of the main table for an address. Routes of other programs, such as a routing
// daemon, have another protocol, and each link has one for its link-local address.
func isSubnetRoute(body []byte) bool {
	if len(body) < unix.SizeofRtMsg {
		return false
	}
	header := nl.DeserializeRtMsg(body)
	dst, _ := netip.AddrFromSlice(attributeOf(body[unix.SizeofRtMsg:], unix.RTA_DST))
	return header.Protocol == unix.RTPROT_KERNEL && header.Table == unix.RT_TABLE_MAIN && !dst.IsLinkLocalUnicast()
}

// linkRemoval ignores deleted veths, with which a pod ends.
func linkRemoval(body []byte, gone bool) (r Removal, ok bool) {
	if len(body) < unix.SizeofIfInfomsg {
		return lostRemoval(), true
	}
	header, attributes := nl.DeserializeIfInfomsg(body), body[unix.SizeofIfInfomsg:]
	up := header.Flags&unix.IFF_UP != 0
	switch textAt(attributes, unix.IFLA_LINKINFO, nl.IFLA_INFO_KIND) {
	case "bridge":
		ok = gone || !up
	case "ifb":
		ok = gone
	case "veth":
		ok = !gone && up && number32(attributeOf(attributes, unix.IFLA_MASTER)) == 0
	}
	return Removal{What: "link " + textAt(attributes, unix.IFLA_IFNAME)}, ok && header.Family != unix.AF_BRIDGE
}

// stopsForwarding reports whether a netconf message says that the node no longer forwards packets of a family.
func stopsForwarding(body []byte) bool {
	attributes := body[min(4, len(body)):] // after struct netconfmsg
	forwarding := attributeOf(attributes, netconfForwarding)
	return int32(number32(attributeOf(attributes, netconfIfindex))) == allLinks && len(forwarding) == 4 && number32(forwarding) == 0
}
