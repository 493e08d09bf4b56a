// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"net"
	"slices"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

const clsact = 0xffff0000 // ffff:, the handle of the ingress and clsact qdiscs

// redirectPriority is the last there is: filters of others come before the redirect. Those that name none get 49152 or less.
const redirectPriority = 65535

// referencePriority is that of the reference's redirect.
const referencePriority = 1

// EnsureIFB makes the intermediate device name for a link, up and with its MTU, or returns the one that is there. What is redirected to
// it passes its qdisc and goes on where it came from (tc-mirred(8)). It joins the group of a link that leads one.
func (n *NS) EnsureIFB(name string, of Link) (Link, error) {
	err := change("link add "+name+" type ifb", func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MTU, attrs.Flags = name, of.MTU, net.FlagUp
		attrs.NumTxQueues, attrs.NumRxQueues = 1, 1
		if of.LeadsGroup() {
			attrs.Group = of.Traits.Group
		}
		return ignore(n.h.LinkAdd(&netlink.Ifb{LinkAttrs: attrs}), unix.EEXIST)
	})
	if err != nil {
		return Link{}, err
	}
	link, ok, err := n.Link(name)
	if err == nil && (!ok || link.Kind != "ifb") {
		err = fmt.Errorf("link %s is no ifb", name)
	}
	if err == nil && of.LeadsGroup() && link.Traits.Group != of.Traits.Group { // it was left over: it would stay when the group goes
		err = change("link set "+name+" group", func() error { return n.h.LinkSetGroup(byIndex(link.Index), int(of.Traits.Group)) })
	}
	if err == nil && !link.Up {
		err = n.SetUp(link)
	}
	return link, err
}

// Redirect sends all that a link receives through another, with the ingress or clsact qdisc that it may have already. It makes a clsact
// qdisc: others that come later want one, and none can be made beside an ingress qdisc.
func (n *NS) Redirect(from, to Link) error {
	err := change("qdisc add dev "+from.Name+" clsact", func() error {
		err := n.h.QdiscAdd(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: from.Index, Handle: clsact, Parent: netlink.HANDLE_CLSACT}})
		if errors.Is(err, unix.EEXIST) {
			// So may a redirect of ours be, or the reference's to a device that is gone, which drops all that comes.
			err = n.delRedirects(from, to)
		}
		return lacks(err, "clsact qdisc (CONFIG_NET_SCH_INGRESS)")
	})
	if err != nil {
		return err
	}
	return change(fmt.Sprintf("filter add dev %s ingress redirect dev %s", from.Name, to.Name), func() error {
		return lacks(n.h.FilterAdd(&netlink.U32{
			FilterAttrs: redirectAttrs(from),
			ClassId:     netlink.MakeHandle(1, 1),
			Actions:     []netlink.Action{netlink.NewMirredAction(to.Index)},
		}), "u32 filter or no mirred action (CONFIG_NET_CLS_U32, CONFIG_NET_ACT_MIRRED)")
	})
}

// HasClassifiers tells whether a link has an ingress or clsact qdisc.
func (n *NS) HasClassifiers(link Link) (bool, error) {
	_, ok, err := n.qdiscAt(link, netlink.HANDLE_INGRESS)
	return ok, err
}

func redirectAttrs(link Link) netlink.FilterAttrs {
	return netlink.FilterAttrs{LinkIndex: link.Index, Parent: netlink.HANDLE_MIN_INGRESS, Priority: redirectPriority, Protocol: unix.ETH_P_ALL}
}

// Redirected tells whether all that a link receives is sent through another by a u32 filter, of whatever priority: the reference's have
// another.
func (n *NS) Redirected(from, to Link) (bool, error) {
	list, err := n.filters(from, netlink.HANDLE_MIN_INGRESS)
	return slices.ContainsFunc(list, func(f netlink.Filter) bool { return leadsTo(f, to.Index) && matchesAll(f) }), err
}

func matchesAll(f netlink.Filter) bool {
	u32, ok := f.(*netlink.U32)
	return ok && u32.Protocol == unix.ETH_P_ALL && u32.Sel != nil &&
		!slices.ContainsFunc(u32.Sel.Keys, func(key nl.TcU32Key) bool { return key.Mask != 0 })
}

// filters returns those of one side of a link: none where it has no qdisc for them, or is gone.
func (n *NS) filters(link Link, parent uint32) (list []netlink.Filter, err error) {
	err = retry(func() (err error) {
		list, err = n.h.FilterList(byIndex(link.Index), parent)
		return ignore(err, unix.EINVAL, unix.ENOENT, unix.ENODEV)
	})
	return list, wrapped("filter show dev "+link.Name, err)
}

// leadsTo tells whether a filter redirects packets to the link with an ifindex. That of a link that is gone is 0.
func leadsTo(f netlink.Filter, index int) bool {
	u32, ok := f.(*netlink.U32)
	return ok && slices.ContainsFunc(u32.Actions, func(a netlink.Action) bool {
		m, ok := a.(*netlink.MirredAction)
		return ok && m.MirredAction == netlink.TCA_EGRESS_REDIR && m.Ifindex == index
	})
}

// RedirectedFrom returns a link that sends what it receives through another; ok is false when none does. It looks at every link that
// has an ingress or clsact qdisc.
func (n *NS) RedirectedFrom(to Link) (from Link, ok bool, err error) {
	list, err := n.qdiscs()
	for _, q := range list {
		if q.kind != "ingress" && q.kind != "clsact" {
			continue
		}
		link, there, e := n.LinkByIndex(q.link)
		if e == nil && there {
			var list []netlink.Filter
			list, e = n.filters(link, netlink.HANDLE_MIN_INGRESS)
			there = slices.ContainsFunc(list, func(f netlink.Filter) bool { return leadsTo(f, to.Index) })
		}
		if e == nil && there {
			return link, true, nil
		}
		err = errors.Join(err, e)
	}
	return Link{}, false, err
}

// DelRedirect removes what sends all that a link receives through another, also when the reference made it, and the qdisc unless filters of
// others use it. A clsact qdisc goes only when it is owned: whoever made it may add filters to it later. Nothing to remove is no error.
func (n *NS) DelRedirect(from, to Link, owned bool) error {
	err := change("filter del dev "+from.Name+" ingress", func() error { return n.delRedirects(from, to) })
	if err != nil {
		return err
	}
	q, ok, err := n.qdiscAt(from, netlink.HANDLE_INGRESS)
	if err != nil || !ok || q.kind == "clsact" && !owned {
		return err
	}
	if used, err := n.hasFilters(from); err != nil || used {
		return err
	}
	return change("qdisc del dev "+from.Name+" "+q.kind, func() error {
		_, err := qdisc{link: from.Index, handle: clsact, parent: netlink.HANDLE_INGRESS, kind: q.kind}.request(n, unix.RTM_DELQDISC, 0).Execute(unix.NETLINK_ROUTE, 0)
		return ignore(err, unix.ENOENT, unix.EINVAL, unix.ENODEV)
	})
}

// delRedirects deletes the filter of ours, what leads to a link, and what the reference made for one that is gone.
func (n *NS) delRedirects(from, to Link) error {
	list, err := n.filters(from, netlink.HANDLE_MIN_INGRESS)
	if err != nil {
		return err
	}
	own := func(f netlink.Filter) bool {
		priority := f.Attrs().Priority
		return priority == redirectPriority || to.Index != 0 && leadsTo(f, to.Index) || priority == referencePriority && leadsTo(f, 0)
	}
	for _, f := range list {
		if !own(f) {
			continue
		}
		attrs := *f.Attrs()
		attrs.LinkIndex, attrs.Parent = from.Index, netlink.HANDLE_MIN_INGRESS
		if !slices.ContainsFunc(list, func(o netlink.Filter) bool { return !own(o) && o.Attrs().Priority == attrs.Priority }) {
			attrs.Handle = 0 // all of the priority, with what the kernel keeps for it
		}
		if err := ignore(n.h.FilterDel(&netlink.U32{FilterAttrs: attrs}), unix.ENOENT, unix.EINVAL, unix.ENODEV); err != nil {
			return err
		}
	}
	return nil
}

// hasFilters looks at both sides of a clsact qdisc; an ingress qdisc answers the same twice.
func (n *NS) hasFilters(link Link) (bool, error) {
	for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
		if filters, err := n.filters(link, parent); err != nil || len(filters) > 0 {
			return true, err
		}
	}
	return false, nil
}
