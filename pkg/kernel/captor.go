// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"fmt"
	"slices"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Side is where filters of a link see frames.
type Side uint32

// The two sides of a link: frames that it receives, and frames that the node sends through it.
const (
	Receiving Side = netlink.HANDLE_MIN_INGRESS
	Sending   Side = netlink.HANDLE_MIN_EGRESS
)

// String returns the side as tc(8) takes it.
func (s Side) String() string {
	if s == Receiving {
		return "ingress"
	}
	return "egress"
}

// Captor is a filter that every frame, or every frame of IPv4 or IPv6, matches: no filter behind it sees these frames.
type Captor struct {
	Filter string // as tc(8) shows it
	Drops  bool   // the frames are lost
	To     int    // ifindex of the link that gets the frames, 0 for none
}

// Captor returns the first such filter on one side of a link. It does not know the verdicts of eBPF programs, which it passes over.
func (n *NS) Captor(link Link, side Side) (c Captor, ok bool, err error) {
	if side == Sending { // an ingress qdisc has no such side, and answers as for the other one
		if q, ok, err := n.qdiscAt(link, netlink.HANDLE_INGRESS); err != nil || !ok || q.kind != "clsact" {
			return c, false, err
		}
	}
	list, err := n.filters(link, uint32(side))
	c, ok = captorOf(list, 0, maxGoto)
	return c, ok, err
}

// actTrap is TC_ACT_TRAP in include/uapi/linux/pkt_cls.h, which package netlink lacks.
const actTrap netlink.TcAct = 8

// maxGoto bounds how many chains are followed, which can lead to each other.
const maxGoto = 8

func captorOf(list []netlink.Filter, chain uint32, depth int) (Captor, bool) {
	for _, f := range list {
		a := f.Attrs()
		if a.Chain != nil && *a.Chain != chain || a.Chain == nil && chain != 0 || !matchesAll(f) {
			continue
		}
		verdict, next := verdictOf(f)
		if verdict == netlink.TC_ACT_UNSPEC { // the next filter decides
			continue
		}
		c := Captor{Filter: fmt.Sprintf("%s, chain %d, pref %d", f.Type(), chain, a.Priority)}
		switch {
		case next != 0 && depth > 0: // no way back: what the chain lets pass has passed
			inner, ok := captorOf(list, next, depth-1)
			if ok {
				inner.Filter = c.Filter
				return inner, true
			}
		case verdict == netlink.TC_ACT_SHOT, verdict == netlink.TC_ACT_QUEUED, verdict == actTrap:
			c.Drops = true
		case verdict == netlink.TC_ACT_STOLEN:
			c.To = max(0, capturedBy(f))
			c.Drops = c.To == 0
		}
		return c, true
	}
	return Captor{}, false
}

// matchesAll reports whether every frame of a protocol that pods speak matches a filter.
func matchesAll(f netlink.Filter) bool {
	if !slices.Contains([]uint16{unix.ETH_P_ALL, unix.ETH_P_IP, unix.ETH_P_IPV6}, f.Attrs().Protocol) {
		return false
	}
	switch f := f.(type) {
	case *netlink.MatchAll:
		return true
	case *netlink.U32:
		return f.Sel != nil && f.Sel.Flags&netlink.TC_U32_TERMINAL != 0 && f.Link == 0 &&
			!slices.ContainsFunc(f.Sel.Keys, func(key netlink.TcU32Key) bool { return key.Mask != 0 })
	}
	return false
}

func actionsOf(f netlink.Filter) []netlink.Action {
	switch f := f.(type) {
	case *netlink.MatchAll:
		return f.Actions
	case *netlink.U32:
		return f.Actions
	}
	return nil
}

// verdictOf returns what the actions of a filter decide in the end, and the chain to which they go. Without an action a frame passes.
func verdictOf(f netlink.Filter) (verdict netlink.TcAct, next uint32) {
	for _, a := range actionsOf(f) {
		verdict = a.Attrs().Action
		switch a := a.(type) {
		case *netlink.PoliceAction:
			verdict = netlink.TcAct(a.NotExceedAction)
		case *netlink.GenericAction:
			if verdict > netlink.TC_ACT_JUMP {
				next = uint32(a.Chain)
			}
		}
		if verdict != netlink.TC_ACT_PIPE {
			break
		}
	}
	return verdict, next
}

// capturedBy returns the ifindex of the link to which a filter redirects: 0 if the link is gone, -1 if the filter redirects to none.
func capturedBy(f netlink.Filter) int {
	for _, a := range actionsOf(f) {
		if m, ok := a.(*netlink.MirredAction); ok &&
			(m.MirredAction == netlink.TCA_EGRESS_REDIR || m.MirredAction == netlink.TCA_INGRESS_REDIR) {
			return m.Ifindex
		}
	}
	return -1
}
