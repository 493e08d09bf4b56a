// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"math"
	"net"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// Shaper is a token bucket (tc-tbf(8)).
type Shaper struct {
	Rate  uint64 `json:"rate"`  // bits per second
	Burst uint32 `json:"burst"` // bytes that pass at once after a pause
	Limit uint32 `json:"limit"` // bytes that may wait
}

const (
	rootHandle = 0x10000    // 1:
	clsact     = 0xffff0000 // ffff:, the handle of the ingress and clsact qdiscs
)

// redirectPriority is the last there is: filters of others come before the redirect. Those that name none get 49152 or less.
const redirectPriority = 65535

func (s Shaper) tbf(index int) *netlink.Tbf {
	rate := s.Rate / 8
	// The kernel keeps the burst as the time that it takes at the rate, in ticks, in 32 bits.
	ticks := float64(netlink.TickInUsec()) * 1e6 * float64(s.Burst) / float64(rate)
	return &netlink.Tbf{
		QdiscAttrs: netlink.QdiscAttrs{LinkIndex: index, Handle: rootHandle, Parent: netlink.HANDLE_ROOT},
		Rate:       rate,
		Limit:      s.Limit,
		Buffer:     uint32(min(math.Ceil(ticks), math.MaxUint32)),
	}
}

// Shape limits what a link sends. It replaces a token bucket that is there.
func (n *NS) Shape(link Link, s Shaper) error {
	return change(fmt.Sprintf("qdisc replace dev %s root tbf rate %dbit", link.Name, s.Rate), func() error {
		t := s.tbf(link.Index)
		_, err := n.shapeRequest(t, s.Burst).Execute(unix.NETLINK_ROUTE, 0)
		if errors.Is(err, unix.EINVAL) && n.hasOtherRoot(link) { // the kernel does not replace it when it has our handle
			_ = n.h.QdiscDel(t)
			_, err = n.shapeRequest(t, s.Burst).Execute(unix.NETLINK_ROUTE, 0)
		}
		return err
	})
}

func (n *NS) hasOtherRoot(link Link) bool {
	_, shaped, err := n.Shaped(link)
	return err == nil && !shaped
}

// shapeRequest names the burst in bytes as well. By the time alone the kernel drops each packet that takes longer than 2^32 ns at the rate
// (tbf_change in net/sched/sch_tbf.c): below 2.8 kbit/s that is every full frame.
func (n *NS) shapeRequest(t *netlink.Tbf, burst uint32) *nl.NetlinkRequest {
	req := n.request(unix.RTM_NEWQDISC, unix.NLM_F_CREATE|unix.NLM_F_REPLACE)
	req.AddData(&nl.TcMsg{Family: nl.FAMILY_ALL, Ifindex: int32(t.LinkIndex), Handle: t.Handle, Parent: t.Parent})
	req.AddData(nl.NewRtAttr(nl.TCA_KIND, nl.ZeroTerminated("tbf")))
	params := nl.TcTbfQopt{Limit: t.Limit, Buffer: t.Buffer}
	params.Rate.Rate = uint32(min(t.Rate, math.MaxUint32))
	options := nl.NewRtAttr(nl.TCA_OPTIONS, nil)
	options.AddRtAttr(nl.TCA_TBF_PARMS, params.Serialize())
	if t.Rate > math.MaxUint32 {
		options.AddRtAttr(nl.TCA_TBF_RATE64, nl.Uint64Attr(t.Rate))
	}
	options.AddRtAttr(nl.TCA_TBF_BURST, nl.Uint32Attr(burst))
	req.AddData(options)
	return req
}

// Shaped returns the token bucket of a link; ok is false when its root qdisc is something else. The burst is as exact as ticks are.
func (n *NS) Shaped(link Link) (s Shaper, ok bool, err error) {
	list, err := n.qdiscs(link)
	for _, q := range list {
		if t, isTBF := rootTBF(q); isTBF {
			return shaperOf(t), true, nil
		}
	}
	return Shaper{}, false, err
}

func rootTBF(q netlink.Qdisc) (t *netlink.Tbf, ok bool) {
	t, ok = q.(*netlink.Tbf)
	return t, ok && t.Parent == netlink.HANDLE_ROOT
}

func shaperOf(t *netlink.Tbf) Shaper {
	burst := float64(t.Buffer) / (float64(netlink.TickInUsec()) * 1e6) * float64(t.Rate)
	return Shaper{Rate: t.Rate * 8, Burst: uint32(min(burst, math.MaxUint32)), Limit: t.Limit}
}

// Bucket is a token bucket with what the kernel has counted since it was made.
type Bucket struct {
	Shaper
	Sent    uint64 // bytes
	Dropped uint32 // packets
	Waiting uint32 // bytes
}

// Buckets returns the token buckets of all links, by ifindex: one request, however many there are.
func (n *NS) Buckets() (map[int]Bucket, error) {
	list, err := n.listQdiscs("qdisc show", nil)
	found := map[int]Bucket{}
	for _, q := range list {
		if t, ok := rootTBF(q); ok {
			b := Bucket{Shaper: shaperOf(t)}
			if t.Statistics != nil {
				b.Sent, b.Dropped, b.Waiting = t.Statistics.Basic.Bytes, t.Statistics.Queue.Drops, t.Statistics.Queue.Backlog
			}
			found[t.LinkIndex] = b
		}
	}
	return found, err
}

func (n *NS) qdiscs(link Link) ([]netlink.Qdisc, error) {
	return n.listQdiscs("qdisc show dev "+link.Name, byIndex(link.Index))
}

// listQdiscs lists those of a link, or of all when it is nil.
func (n *NS) listQdiscs(op string, of netlink.Link) (list []netlink.Qdisc, err error) {
	err = retry(func() (err error) {
		list, err = n.h.QdiscList(of)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("%s: %w", op, err)
	}
	return list, nil
}

// Unshape removes the token bucket of a link; a link without one is no error.
func (n *NS) Unshape(link Link) error {
	return change("qdisc del dev "+link.Name+" root", func() error {
		return ignore(n.h.QdiscDel((Shaper{Rate: 8}).tbf(link.Index)), unix.ENOENT, unix.EINVAL, unix.ENODEV)
	})
}

// EnsureIFB makes the intermediate device name for a link, up and with its MTU, or returns the one that is there. What is redirected to
// it passes its qdisc and goes on where it came from (tc-mirred(8)). It joins the group of a link that leads one.
func (n *NS) EnsureIFB(name string, of Link) (Link, error) {
	err := change("link add "+name+" type ifb", func() error {
		attrs := netlink.NewLinkAttrs()
		attrs.Name, attrs.MTU, attrs.Flags = name, of.MTU, net.FlagUp
		attrs.NumTxQueues, attrs.NumRxQueues = 1, 1
		if of.LeadsGroup() {
			attrs.Group = of.group
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
	if err == nil && !link.Up {
		err = n.SetUp(link)
	}
	return link, err
}

// Redirect sends all that a link receives through another, with the ingress qdisc that it may have already.
func (n *NS) Redirect(from, to Link) error {
	err := change("qdisc add dev "+from.Name+" ingress", func() error {
		err := n.h.QdiscAdd(ingress(from))
		if errors.Is(err, unix.EEXIST) {
			// So may a redirect of ours be.
			err = ignore(n.h.FilterDel(&netlink.U32{FilterAttrs: redirectAttrs(from)}), unix.ENOENT, unix.EINVAL)
		}
		return err
	})
	if err != nil {
		return err
	}
	return change(fmt.Sprintf("filter add dev %s ingress redirect dev %s", from.Name, to.Name), func() error {
		return n.h.FilterAdd(&netlink.U32{
			FilterAttrs: redirectAttrs(from),
			ClassId:     netlink.MakeHandle(1, 1),
			Actions:     []netlink.Action{netlink.NewMirredAction(to.Index)},
		})
	})
}

func ingress(link Link) netlink.Qdisc {
	return &netlink.Ingress{QdiscAttrs: netlink.QdiscAttrs{LinkIndex: link.Index, Handle: clsact, Parent: netlink.HANDLE_INGRESS}}
}

func redirectAttrs(link Link) netlink.FilterAttrs {
	return netlink.FilterAttrs{LinkIndex: link.Index, Parent: netlink.HANDLE_MIN_INGRESS, Priority: redirectPriority, Protocol: unix.ETH_P_ALL}
}

// Redirected tells whether what a link receives is sent through another, by whatever filter.
func (n *NS) Redirected(from, to Link) (bool, error) {
	var list []netlink.Filter
	err := retry(func() (err error) {
		list, err = n.h.FilterList(byIndex(from.Index), netlink.HANDLE_MIN_INGRESS)
		return err
	})
	if err != nil {
		return false, fmt.Errorf("filter show dev %s ingress: %w", from.Name, err)
	}
	for _, f := range list {
		u32, ok := f.(*netlink.U32)
		if !ok {
			continue
		}
		for _, a := range u32.Actions {
			if m, ok := a.(*netlink.MirredAction); ok && m.Ifindex == to.Index {
				return true, nil
			}
		}
	}
	return false, nil
}

// RedirectedFrom returns a link that sends what it receives through another; ok is false when none does. It looks at every link that
// has an ingress or clsact qdisc.
func (n *NS) RedirectedFrom(to Link) (from Link, ok bool, err error) {
	list, err := n.listQdiscs("qdisc show", nil)
	for _, q := range list {
		if kind := q.Type(); kind != "ingress" && kind != "clsact" {
			continue
		}
		link, there, e := n.LinkByIndex(q.Attrs().LinkIndex)
		if e == nil && there {
			there, e = n.Redirected(link, to)
		}
		if e == nil && there {
			return link, true, nil
		}
		err = errors.Join(err, e)
	}
	return Link{}, false, err
}

// DelRedirect removes the redirect of a link, and the ingress qdisc unless filters of others use it. Nothing to remove is no
// error.
func (n *NS) DelRedirect(from Link) error {
	err := change("filter del dev "+from.Name+" ingress", func() error {
		return ignore(n.h.FilterDel(&netlink.U32{FilterAttrs: redirectAttrs(from)}), unix.ENOENT, unix.EINVAL, unix.ENODEV)
	})
	if err != nil {
		return err
	}
	if shared, err := n.hasFilters(from); err != nil || shared {
		return err
	}
	return change("qdisc del dev "+from.Name+" ingress", func() error {
		return ignore(n.h.QdiscDel(ingress(from)), unix.ENOENT, unix.EINVAL, unix.ENODEV)
	})
}

func (n *NS) hasFilters(link Link) (bool, error) {
	list, err := n.qdiscs(link)
	if err != nil {
		return false, err
	}
	for _, q := range list {
		if q.Type() == "clsact" {
			return true, nil // somebody else's: ours is "ingress"
		}
	}
	filters, err := n.h.FilterList(byIndex(link.Index), netlink.HANDLE_MIN_INGRESS)
	if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) || errors.Is(err, unix.ENODEV) {
		return false, nil
	}
	return len(filters) > 0, err
}
