// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
)

// Bucket is a token bucket (tc-tbf(8)), as Shape installs it and Shaped and Buckets read it back. Packets wait for tokens in one queue, or,
// with a fair queue, in a queue for each flow.
type Bucket struct {
	Rate     uint64    `json:"rate"`  // bits per second
	Burst    uint32    `json:"burst"` // bytes that pass at once after a pause
	Limit    uint32    `json:"limit"` // bytes that may wait in line
	Fair     FairQueue `json:"fair,omitzero"`
	Counters `json:"-"`
}

// Counters are what the kernel has counted since a qdisc was made.
type Counters struct {
	Sent    uint64 // bytes
	Dropped uint32 // packets
	Waiting uint32 // bytes
}

// FairQueue is a queue of flows (tc-fq_codel(8)): those that send little do not wait for those that send much, and of those that wait for
// longer than Target during Interval packets are dropped. The zero value is none.
type FairQueue struct {
	Target   time.Duration `json:"target"`   // the kernel keeps microseconds
	Interval time.Duration `json:"interval"` // the kernel keeps microseconds
	Packets  uint32        `json:"packets"`  // that may wait
}

// String is what tc shows.
func (b Bucket) String() string {
	text := fmt.Sprintf("rate %dbit burst %db limit %db", b.Rate, b.Burst, b.Limit)
	if b.Fair != (FairQueue{}) {
		text += fmt.Sprintf(" %s limit %dp target %s interval %s", fairQueue, b.Fair.Packets, b.Fair.Target, b.Fair.Interval)
	}
	return text
}

const (
	rootHandle  = 0x10000 // 1:
	childHandle = 0x20000 // 2:
	childParent = rootHandle | 1
	fairQueue   = "fq_codel"
)

// Shape limits what a link sends. It replaces a token bucket that is there, in place.
func (n *NS) Shape(link Link, b Bucket) error {
	err := fault.Change(fmt.Sprintf("qdisc replace dev %s root tbf rate %dbit", link.Name, b.Rate), func() error {
		_, err := b.request(n, link).Execute(unix.NETLINK_ROUTE, 0)
		if errors.Is(err, unix.EINVAL) && n.hasOtherRoot(link) { // the kernel does not replace it when it has our handle
			_, _ = qdisc{link: link.Index, handle: rootHandle, parent: netlink.HANDLE_ROOT}.request(n, unix.RTM_DELQDISC,
				0).Execute(unix.NETLINK_ROUTE, 0)
			_, err = b.request(n, link).Execute(unix.NETLINK_ROUTE, 0)
		}
		return lacks(err, "token bucket (CONFIG_NET_SCH_TBF)")
	})
	if err != nil || b.Fair == (FairQueue{}) {
		return err
	}
	return fault.Change("qdisc replace dev "+link.Name+" parent 1:1 "+fairQueue, func() error {
		_, err := b.Fair.request(n, link).Execute(unix.NETLINK_ROUTE, 0)
		return err
	})
}

func (n *NS) hasOtherRoot(link Link) bool {
	q, ok, err := n.qdiscAt(link, netlink.HANDLE_ROOT)
	return err == nil && ok && q.kind != "tbf"
}

// request names the burst in bytes as well. By the time alone the kernel drops each packet that takes longer than 2^32 ns at the rate
// (tbf_change in net/sched/sch_tbf.c): below 2.8 kbit/s that is every full frame.
func (b Bucket) request(n *NS, link Link) *nl.NetlinkRequest {
	req := qdisc{link: link.Index, handle: rootHandle, parent: netlink.HANDLE_ROOT, kind: "tbf"}.request(n, unix.RTM_NEWQDISC,
		unix.NLM_F_CREATE|unix.NLM_F_REPLACE)
	rate := b.Rate / 8
	params := nl.TcTbfQopt{Limit: b.Limit, Buffer: ticks(b.Burst, rate)}
	params.Rate.Rate = uint32(min(rate, math.MaxUint32))
	options := nl.NewRtAttr(nl.TCA_OPTIONS, nil)
	options.AddRtAttr(nl.TCA_TBF_PARMS, params.Serialize())
	if rate > math.MaxUint32 {
		options.AddRtAttr(nl.TCA_TBF_RATE64, nl.Uint64Attr(rate))
	}
	options.AddRtAttr(nl.TCA_TBF_BURST, nl.Uint32Attr(b.Burst))
	req.AddData(options)
	return req
}

func (f FairQueue) request(n *NS, link Link) *nl.NetlinkRequest {
	queue := qdisc{link: link.Index, handle: childHandle, parent: childParent, kind: fairQueue}
	req := queue.request(n, unix.RTM_NEWQDISC, unix.NLM_F_CREATE|unix.NLM_F_REPLACE)
	options := nl.NewRtAttr(nl.TCA_OPTIONS, nil)
	options.AddRtAttr(nl.TCA_FQ_CODEL_TARGET, nl.Uint32Attr(uint32(f.Target.Microseconds())))
	options.AddRtAttr(nl.TCA_FQ_CODEL_INTERVAL, nl.Uint32Attr(uint32(f.Interval.Microseconds())))
	options.AddRtAttr(nl.TCA_FQ_CODEL_LIMIT, nl.Uint32Attr(f.Packets))
	req.AddData(options)
	return req
}

// ticks is the time that a burst takes at a rate in bytes per second: so the kernel keeps it, in 32 bits.
func ticks(burst uint32, rate uint64) uint32 {
	return uint32(min(math.Ceil(netlink.TickInUsec()*1e6*float64(burst)/float64(rate)), math.MaxUint32))
}

// bucket returns the token bucket that a qdisc is; ok is false if it is of another kind, or not at the root.
func (q qdisc) bucket() (b Bucket, ok bool) {
	if q.kind != "tbf" || q.parent != netlink.HANDLE_ROOT {
		return Bucket{}, false
	}
	attrs, err := nl.ParseRouteAttr(q.options)
	var params nl.TcTbfQopt
	var rate uint64
	for _, a := range attrs {
		switch {
		case a.Attr.Type == nl.TCA_TBF_PARMS && len(a.Value) >= nl.SizeofTcTbfQopt:
			params = *nl.DeserializeTcTbfQopt(a.Value)
		case a.Attr.Type == nl.TCA_TBF_RATE64 && len(a.Value) >= 8:
			rate = binary.NativeEndian.Uint64(a.Value)
		}
	}
	rate = max(rate, uint64(params.Rate.Rate))
	burst := float64(params.Buffer) / (netlink.TickInUsec() * 1e6) * float64(rate)
	return Bucket{Rate: rate * 8, Burst: uint32(min(burst, math.MaxUint32)), Limit: params.Limit, Counters: q.Counters}, err == nil
}

// fair returns the fair queue that a qdisc is; ok is false when it is something else, or no token bucket's.
func (q qdisc) fair() (f FairQueue, ok bool) {
	if q.kind != fairQueue || q.parent != childParent {
		return FairQueue{}, false
	}
	attrs, err := nl.ParseRouteAttr(q.options)
	for _, a := range attrs {
		if len(a.Value) < 4 {
			continue
		}
		switch v := binary.NativeEndian.Uint32(a.Value); a.Attr.Type {
		case nl.TCA_FQ_CODEL_TARGET:
			f.Target = time.Duration(v) * time.Microsecond
		case nl.TCA_FQ_CODEL_INTERVAL:
			f.Interval = time.Duration(v) * time.Microsecond
		case nl.TCA_FQ_CODEL_LIMIT:
			f.Packets = v
		}
	}
	return f, err == nil
}

// Shaped returns the token bucket of a link; ok is false when its root qdisc is something else. The burst is as exact as ticks are, the
// times of a fair queue as units of 1.024 microseconds.
func (n *NS) Shaped(link Link) (b Bucket, ok bool, err error) {
	root, ok, err := n.qdiscAt(link, netlink.HANDLE_ROOT)
	if err != nil || !ok {
		return Bucket{}, false, err
	}
	if _, ok = root.bucket(); !ok {
		return Bucket{}, false, nil
	}
	child, _, err := n.qdiscAt(link, childParent)
	b, ok = bucketsIn([]qdisc{root, child})[link.Index]
	return b, ok && err == nil, err
}

// Buckets returns the token buckets of all links, by ifindex: one request, however many there are.
func (n *NS) Buckets() (map[int]Bucket, error) {
	list, err := n.qdiscs()
	return bucketsIn(list), err
}

func bucketsIn(list []qdisc) map[int]Bucket {
	found := map[int]Bucket{}
	for _, q := range list {
		if b, ok := q.bucket(); ok {
			found[q.link] = b
		}
	}
	for _, q := range list {
		f, ok := q.fair()
		if b, there := found[q.link]; ok && there { // other qdiscs have such queues as well
			b.Fair, b.Dropped = f, max(b.Dropped, q.Dropped) // the token bucket counts some of what its queue drops, the queue all
			found[q.link] = b
		}
	}
	return found
}

// Unshape removes the token bucket of a link; a link without one is no error.
func (n *NS) Unshape(link Link) error {
	return fault.Change("qdisc del dev "+link.Name+" root tbf", func() error {
		_, err := qdisc{link: link.Index, parent: netlink.HANDLE_ROOT, kind: "tbf"}.request(n, unix.RTM_DELQDISC, 0).Execute(unix.NETLINK_ROUTE,
			0)
		return fault.Ignore(err, unix.ENOENT, unix.EINVAL, unix.ENODEV)
	})
}

// loopbackIndex is that of the loopback device in every namespace (LOOPBACK_IFINDEX in the kernel).
const loopbackIndex = 1

// HasFairQueue reports whether the kernel has fair queues, or could load them. It asks for one that cannot be made.
func (n *NS) HasFairQueue() (bool, error) {
	req := qdisc{link: loopbackIndex, parent: netlink.HANDLE_ROOT, kind: fairQueue}.request(n, unix.RTM_NEWQDISC,
		unix.NLM_F_CREATE|unix.NLM_F_REPLACE|unix.NLM_F_EXCL)
	options := nl.NewRtAttr(nl.TCA_OPTIONS, nil)
	options.AddRtAttr(nl.TCA_FQ_CODEL_FLOWS, nl.Uint32Attr(0))
	req.AddData(options)
	_, err := req.Execute(unix.NETLINK_ROUTE, 0)
	switch {
	case errors.Is(err, unix.EINVAL):
		return true, nil
	case errors.Is(err, unix.ENOENT):
		return false, nil
	}
	return false, wrapped("qdisc "+fairQueue, err)
}
