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

	"github.com/podlace/podlace/pkg/fault"
)

const clsact = 0xffff0000 // ffff:, the handle of the ingress and clsact qdiscs

// redirectPriority is the highest number, so that all other filters run first; the kernel chooses at most 49152 for those without one.
const redirectPriority = 65535

// referencePriority is the priority of the filter of the reference bandwidth plugin.
const referencePriority = 1

// EnsureIFB returns the intermediate functional block device (ifb) with this name, or creates it with the MTU of the link. It is up and in
// the device group that the link leads. A frame that is redirected to it passes through its qdisc, and is then processed as usual
// (tc-mirred(8)).
func (n *NS) EnsureIFB(name string, of Link) (Link, error) {
	err := fault.Change("link add "+name+" type ifb", func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MTU, attrs.Flags = name, of.MTU, net.FlagUp
		attrs.NumTxQueues, attrs.NumRxQueues = 1, 1
		if of.LeadsGroup() {
			attrs.Group = of.Traits.Group
		}
		return fault.Ignore(n.h.LinkAdd(&netlink.Ifb{LinkAttrs: attrs}), unix.EEXIST)
	})
	if err != nil {
		return Link{}, err
	}
	link, ok, err := n.Link(name)
	if err == nil && (!ok || link.Kind != "ifb") {
		err = fmt.Errorf("link %s is no ifb", name)
	}
	// An existing ifb may be outside the link's group, with which DelGroup must delete it.
	if err == nil && of.LeadsGroup() && link.Traits.Group != of.Traits.Group {
		err = fault.Change("link set "+name+" group", func() error { return n.h.LinkSetGroup(byIndex(link.Index), int(of.Traits.Group)) })
	}
	if err == nil && !link.Up {
		err = n.SetUp(link)
	}
	return link, err
}

// Redirect redirects all received frames of one link to another. It uses an existing ingress or clsact qdisc, or adds a clsact qdisc,
// because an ingress one would prevent other programs from adding clsact. It adds its filter before it deletes an old one that misses short
// frames (RedirectsLong), so that a running pod's rate limit stays in effect. It is a no-op if a filter already redirects all frames there.
func (n *NS) Redirect(from, to Link) error {
	found := false
	err := fault.Change("qdisc add dev "+from.Name+" clsact", func() error {
		err := n.h.QdiscAdd(&netlink.Clsact{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: from.Index, Handle: clsact, Parent: netlink.HANDLE_CLSACT}})
		if found = errors.Is(err, unix.EEXIST); found {
			return nil
		}
		return missingFeature(err, "clsact qdisc (CONFIG_NET_SCH_INGRESS)")
	})
	if err != nil {
		return err
	}
	if !found {
		return n.addRedirect(from, to)
	}
	have, err := n.Redirected(from, to)
	if err != nil || have == RedirectsAll {
		return err
	}
	if have == RedirectsNone { // a stale filter may have the priority, or drop all frames because its target is gone
		if err := n.delRedirects(from, to, false); err != nil {
			return err
		}
	}
	if err := n.addRedirect(from, to); err != nil || have == RedirectsNone {
		return err
	}
	return n.delRedirects(from, to, true)
}

// addRedirect adds the redirect filter. Its selector has no key, because a u32 key reads 4 bytes after the Ethernet header, and a frame
// with fewer bytes matches none, not even one with mask 0.
func (n *NS) addRedirect(from, to Link) error {
	return fault.Change(fmt.Sprintf("filter add dev %s ingress redirect dev %s", from.Name, to.Name), func() error {
		return missingFeature(n.h.FilterAdd(&netlink.U32{
			FilterAttrs: redirectAttrs(from),
			ClassId:     netlink.MakeHandle(1, 1),
			Sel:         &netlink.TcU32Sel{Flags: netlink.TC_U32_TERMINAL},
			Actions:     []netlink.Action{netlink.NewMirredAction(to.Index)},
		}), "u32 filter or no mirred action (CONFIG_NET_CLS_U32, CONFIG_NET_ACT_MIRRED)")
	})
}

// HasClassifiers reports whether a link has an ingress or clsact qdisc.
func (n *NS) HasClassifiers(link Link) (bool, error) {
	_, ok, err := n.qdiscAt(link, netlink.HANDLE_INGRESS)
	return ok, err
}

func redirectAttrs(link Link) netlink.FilterAttrs {
	return netlink.FilterAttrs{LinkIndex: link.Index, Parent: netlink.HANDLE_MIN_INGRESS, Priority: redirectPriority, Protocol: unix.ETH_P_ALL}
}

// Redirection says which of the received frames a link redirects to another link.
type Redirection int

// Values of Redirection, from no frames to all. The filter of the reference bandwidth plugin has RedirectsLong.
const (
	RedirectsNone Redirection = iota // no frames, or only some protocols or contents
	RedirectsLong                    // frames with at least 4 bytes after the Ethernet header and VLAN tag
	RedirectsAll
)

// Redirected reports which frames the u32 filters of one link, of any priority, redirect to another link. The reference bandwidth plugin's
// has another priority than redirectPriority.
func (n *NS) Redirected(from, to Link) (Redirection, error) {
	list, err := n.listFilters(from, netlink.HANDLE_MIN_INGRESS)
	return redirectSource{from, list}.redirectionTo(to.Index), err
}

// redirectionOf returns which frames a redirect filter matches.
func redirectionOf(f netlink.Filter) Redirection {
	u32, ok := f.(*netlink.U32)
	switch {
	case !ok || u32.Protocol != unix.ETH_P_ALL || u32.Sel == nil ||
		slices.ContainsFunc(u32.Sel.Keys, func(key nl.TcU32Key) bool { return key.Mask != 0 }):
		return RedirectsNone
	case len(u32.Sel.Keys) > 0:
		return RedirectsLong
	}
	return RedirectsAll
}

// listFilters returns a link's filters for received or sent frames: none if the link was deleted or has no qdisc for filters.
func (n *NS) listFilters(link Link, parent uint32) (list []netlink.Filter, err error) {
	list, err = dump(func() ([]netlink.Filter, error) { return n.h.FilterList(byIndex(link.Index), parent) })
	err = fault.Ignore(err, unix.EINVAL, unix.ENOENT, unix.ENODEV)
	return list, wrapped("filter show dev "+link.Name, err)
}

// redirectsTo returns the ifindex of the target of a u32 filter: 0 if the target was deleted, -1 if the filter does not redirect.
func redirectsTo(f netlink.Filter) int {
	if _, ok := f.(*netlink.U32); !ok {
		return -1
	}
	return redirectTarget(f, netlink.TCA_EGRESS_REDIR)
}

// RedirectedFrom returns a link that redirects its received frames to the given one. ok is false if there is none. It reads every link with
// an ingress or clsact qdisc.
func (n *NS) RedirectedFrom(to Link) (from Link, ok bool, err error) {
	list, err := n.redirectSources()
	for _, r := range list {
		if slices.ContainsFunc(r.filters, func(f netlink.Filter) bool { return redirectsTo(f) == to.Index }) {
			return r.link, true, nil
		}
	}
	return Link{}, false, err
}

// RedirectPair is two links: From redirects its received frames to To.
type RedirectPair struct{ From, To Link }

// RedirectedLong returns the pairs whose redirect filter misses short frames (RedirectsLong).
func (n *NS) RedirectedLong() (pairs []RedirectPair, err error) {
	list, err := n.redirectSources()
	for _, r := range list {
		for _, f := range r.filters {
			index := redirectsTo(f)
			if index <= 0 || r.redirectionTo(index) != RedirectsLong {
				continue
			}
			to, ok, e := n.LinkByIndex(index)
			if err = errors.Join(err, e); ok {
				pairs = append(pairs, RedirectPair{From: r.link, To: to})
			}
		}
	}
	return pairs, err
}

// redirectSource is a link with its filters for received frames.
type redirectSource struct {
	link    Link
	filters []netlink.Filter
}

func (r redirectSource) redirectionTo(index int) Redirection {
	most := RedirectsNone
	for _, f := range r.filters {
		if redirectsTo(f) == index {
			most = max(most, redirectionOf(f))
		}
	}
	return most
}

// redirectSources returns the links with an ingress or clsact qdisc and their filters, and an error about those that are unreadable.
func (n *NS) redirectSources() (found []redirectSource, err error) {
	list, err := n.qdiscs()
	for _, q := range list {
		if q.kind != "ingress" && q.kind != "clsact" {
			continue
		}
		link, ok, e := n.LinkByIndex(q.link)
		if e == nil && ok {
			var filters []netlink.Filter
			if filters, e = n.listFilters(link, netlink.HANDLE_MIN_INGRESS); e == nil {
				found = append(found, redirectSource{link, filters})
			}
		}
		err = errors.Join(err, e)
	}
	return found, err
}

// DelRedirect removes the redirect from one link to another, also one of the reference bandwidth plugin, and an ingress qdisc without other
// filters. It removes a clsact qdisc only if owned is set, because another program may have added it for its own filters. It is a no-op if
// the redirect is missing.
func (n *NS) DelRedirect(from, to Link, owned bool) error {
	if err := n.delRedirects(from, to, false); err != nil {
		return err
	}
	q, ok, err := n.qdiscAt(from, netlink.HANDLE_INGRESS)
	if err != nil || !ok || q.kind == "clsact" && !owned {
		return err
	}
	if used, err := n.hasFilters(from); err != nil || used {
		return err
	}
	return fault.Change("qdisc del dev "+from.Name+" "+q.kind, func() error {
		return qdisc{link: from.Index, handle: clsact, parent: netlink.HANDLE_INGRESS, kind: q.kind}.del(n)
	})
}

// delRedirects deletes the filter of Redirect, each other one that redirects to the link, and that of the reference bandwidth plugin if its
// target was deleted. With spareAll, it keeps filters that redirect all frames to the link.
func (n *NS) delRedirects(from, to Link, spareAll bool) error {
	return fault.Change("filter del dev "+from.Name+" ingress", func() error {
		list, err := n.listFilters(from, netlink.HANDLE_MIN_INGRESS)
		if err != nil {
			return err
		}
		stays := slices.DeleteFunc(slices.Clone(list), func(f netlink.Filter) bool { return isStale(f, to, spareAll) })
		for _, f := range list {
			if !isStale(f, to, spareAll) {
				continue
			}
			attrs := *f.Attrs()
			attrs.LinkIndex, attrs.Parent = from.Index, netlink.HANDLE_MIN_INGRESS
			if !slices.ContainsFunc(stays, func(o netlink.Filter) bool { return o.Attrs().Priority == attrs.Priority }) {
				attrs.Handle = 0 // deletes all filters of the priority, with the kernel's state for it
			}
			if err := fault.Ignore(n.h.FilterDel(&netlink.U32{FilterAttrs: attrs}), unix.ENOENT, unix.EINVAL, unix.ENODEV); err != nil {
				return err
			}
		}
		return nil
	})
}

func isStale(f netlink.Filter, to Link, spareAll bool) bool {
	priority, target := f.Attrs().Priority, redirectsTo(f)
	if spareAll && target == to.Index && redirectionOf(f) == RedirectsAll {
		return false
	}
	return priority == redirectPriority || to.Index != 0 && target == to.Index || priority == referencePriority && target == 0
}

// hasFilters reports whether the clsact or ingress qdisc of a link has filters. An ingress qdisc returns the same ones for both sides.
func (n *NS) hasFilters(link Link) (bool, error) {
	for _, parent := range []uint32{netlink.HANDLE_MIN_INGRESS, netlink.HANDLE_MIN_EGRESS} {
		if filters, err := n.listFilters(link, parent); err != nil || len(filters) > 0 {
			return true, err
		}
	}
	return false, nil
}
