// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"fmt"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Side says which frames of a link a filter handles.
type Side uint32

// Receiving is for frames that the link receives, Sending for those that the node sends through it.
const (
	Receiving Side = netlink.HANDLE_MIN_INGRESS
	Sending   Side = netlink.HANDLE_MIN_EGRESS
)

// String returns the side's name in tc(8).
func (s Side) String() string {
	if s == Receiving {
		return "ingress"
	}
	return "egress"
}

// Captor is a filter that matches every frame, every IPv4 frame, or every IPv6 frame, so that none reaches the filters after it.
type Captor struct {
	Filter string // as tc(8) shows it
	Drops  bool   // the filter drops the frames
	To     int    // ifindex of the link to which it redirects the frames, 0 for none
}

// Captor returns a link's first captor for received or for sent frames. It skips eBPF filters, because only their programs know what they
// do with a frame.
func (n *NS) Captor(link Link, side Side) (c Captor, ok bool, err error) {
	if side == Sending { // an ingress qdisc has no sending side, and answers for the receiving side
		if q, ok, err := n.qdiscAt(link, netlink.HANDLE_INGRESS); err != nil || !ok || q.kind != "clsact" {
			return c, false, err
		}
	}
	list, err := n.listFilters(link, uint32(side))
	c, ok = firstCaptor(list, 0, maxGoto)
	return c, ok, err
}

// ProgramAhead returns the first BPF filter that sees a link's received frames before they are redirected, as tc(8) shows it, or "". Only
// its program knows which frames reach the redirect.
func (n *NS) ProgramAhead(link Link) (filter string, err error) {
	list, err := n.listFilters(link, uint32(Receiving))
	for _, f := range list {
		if bpf, ok := f.(*netlink.BpfFilter); ok {
			return strings.TrimSpace(fmt.Sprintf("bpf, pref %d %s", bpf.Priority, bpf.Name)), err
		}
		if redirectsTo(f) > 0 {
			break
		}
	}
	return "", err
}

// actTrap is TC_ACT_TRAP of include/uapi/linux/pkt_cls.h, which package netlink lacks.
const actTrap netlink.TcAct = 8

// maxGoto is the number of goto actions that firstCaptor follows, because chains can form a loop.
const maxGoto = 8

func firstCaptor(list []netlink.Filter, chain uint32, depth int) (Captor, bool) {
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
		case next != 0 && depth > 0: // the chain lets the frame pass: there is no return to the first chain
			inner, ok := firstCaptor(list, next, depth-1)
			if ok {
				inner.Filter = c.Filter
				return inner, true
			}
		case verdict == netlink.TC_ACT_SHOT, verdict == netlink.TC_ACT_QUEUED, verdict == actTrap:
			c.Drops = true
		case verdict == netlink.TC_ACT_STOLEN:
			c.To = max(0, redirectTarget(f, netlink.TCA_EGRESS_REDIR, netlink.TCA_INGRESS_REDIR))
			c.Drops = c.To == 0
		}
		return c, true
	}
	return Captor{}, false
}

// matchesAll reports whether a filter matches every frame, every IPv4 frame, or every IPv6 frame.
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

// verdictOf returns the final verdict of a filter's actions, and the chain to which a goto action jumps. Without actions, a filter accepts.
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

// redirectTarget returns the ifindex of the link to which a filter redirects frames with one of the given actions: 0 if the link was
// deleted, -1 if the filter does not redirect.
func redirectTarget(f netlink.Filter, actions ...netlink.MirredAct) int {
	for _, a := range actionsOf(f) {
		if m, ok := a.(*netlink.MirredAction); ok && slices.Contains(actions, m.MirredAction) {
			return m.Ifindex
		}
	}
	return -1
}
