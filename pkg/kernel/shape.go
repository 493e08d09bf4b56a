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

// Bucket is a token bucket (tc-tbf(8)), which Shape installs, and Shaped and Buckets read. Packets wait for tokens in one queue, or in one
// per flow if Fair is set.
type Bucket struct {
	Rate     uint64    `json:"rate"`  // bits per second
	Burst    uint32    `json:"burst"` // bytes that may be sent at once after an idle period
	Limit    uint32    `json:"limit"` // maximum bytes in the queue
	Fair     FairQueue `json:"fair,omitzero"`
	Counters `json:"-"`
}

// Counters are a qdisc's counters since it was added.
type Counters struct {
	Sent    uint64 // bytes
	Dropped uint32 // packets
	Waiting uint32 // bytes
}

// FairQueue is a fair queue (tc-fq_codel(8)), in which flows do not delay one another. It drops packets if all those of an Interval waited
// longer than Target. The zero value means none.
type FairQueue struct {
	Target   time.Duration `json:"target"`   // in microseconds of precision
	Interval time.Duration `json:"interval"` // in microseconds of precision
	Packets  uint32        `json:"packets"`  // maximum packets in the queue
}

// String formats the bucket like tc(8).
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

// Shape limits the rate at which a link sends. It changes an existing token bucket in place.
func (n *NS) Shape(link Link, b Bucket) error {
	err := fault.Change(fmt.Sprintf("qdisc replace dev %s root tbf rate %dbit", link.Name, b.Rate), func() error {
		tbf := qdisc{link: link.Index, handle: rootHandle, parent: netlink.HANDLE_ROOT, kind: "tbf"}
		err := tbf.replace(n, b.tbfOptions()...)
		if errors.Is(err, unix.EINVAL) && n.OtherRoot(link) != "" { // the kernel cannot replace another kind of qdisc that has our handle
			_ = qdisc{link: link.Index, handle: rootHandle, parent: netlink.HANDLE_ROOT}.del(n)
			err = tbf.replace(n, b.tbfOptions()...)
		}
		return missingFeature(err, "token bucket (CONFIG_NET_SCH_TBF)")
	})
	if err != nil || b.Fair == (FairQueue{}) {
		return err
	}
	return fault.Change("qdisc replace dev "+link.Name+" parent 1:1 "+fairQueue, func() error {
		return qdisc{link: link.Index, handle: childHandle, parent: childParent, kind: fairQueue}.replace(n,
			attribute32(nl.TCA_FQ_CODEL_TARGET, uint32(b.Fair.Target.Microseconds())),
			attribute32(nl.TCA_FQ_CODEL_INTERVAL, uint32(b.Fair.Interval.Microseconds())),
			attribute32(nl.TCA_FQ_CODEL_LIMIT, b.Fair.Packets))
	})
}

// OtherRoot returns the kind of a link's root qdisc if another program added it, or "". The kernel's default has no handle.
func (n *NS) OtherRoot(link Link) string {
	if q, ok, err := n.qdiscAt(link, netlink.HANDLE_ROOT); err == nil && ok && q.kind != "tbf" && q.handle != 0 {
		return q.kind
	}
	return ""
}

// tbfOptions returns the settings of a token bucket. The burst is among them as a time and in bytes (TCA_TBF_BURST, which package netlink
// lacks). From the time alone (tbf_change in net/sched/sch_tbf.c), the kernel would drop every packet whose transmission takes longer than
// 2^32 ns: below 2.8 kbit/s, every frame of full size.
func (b Bucket) tbfOptions() []*nl.RtAttr {
	rate := b.Rate / 8
	params := nl.TcTbfQopt{Limit: b.Limit, Buffer: burstTicks(b.Burst, rate)}
	params.Rate.Rate = uint32(min(rate, math.MaxUint32))
	options := []*nl.RtAttr{nl.NewRtAttr(nl.TCA_TBF_PARMS, params.Serialize()), attribute32(nl.TCA_TBF_BURST, b.Burst)}
	if rate > math.MaxUint32 {
		options = append(options, nl.NewRtAttr(nl.TCA_TBF_RATE64, nl.Uint64Attr(rate)))
	}
	return options
}

// burstTicks returns the ticks that burst bytes take at rate bytes per second, at most 2^32-1, because the kernel's field has 32 bits.
func burstTicks(burst uint32, rate uint64) uint32 {
	return uint32(min(math.Ceil(netlink.TickInUsec()*1e6*float64(burst)/float64(rate)), math.MaxUint32))
}

// asBucket converts a qdisc to a token bucket. ok is false unless it is a tbf root qdisc.
func (q qdisc) asBucket() (b Bucket, ok bool) {
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

// asFairQueue converts a qdisc to a fair queue. ok is false unless it is the fq_codel child of a token bucket.
func (q qdisc) asFairQueue() (f FairQueue, ok bool) {
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

// Shaped returns the token bucket of a link. ok is false if its root qdisc has another kind. The kernel rounds the burst to ticks, and the
// times of a fair queue to 1.024 µs.
func (n *NS) Shaped(link Link) (b Bucket, ok bool, err error) {
	root, ok, err := n.qdiscAt(link, netlink.HANDLE_ROOT)
	if err != nil || !ok {
		return Bucket{}, false, err
	}
	if _, ok = root.asBucket(); !ok {
		return Bucket{}, false, nil
	}
	child, _, err := n.qdiscAt(link, childParent)
	b, ok = bucketsIn([]qdisc{root, child})[link.Index]
	return b, ok && err == nil, err
}

// Buckets returns the token buckets of all links by ifindex, in one request.
func (n *NS) Buckets() (map[int]Bucket, error) {
	list, err := n.qdiscs()
	return bucketsIn(list), err
}

func bucketsIn(list []qdisc) map[int]Bucket {
	found := map[int]Bucket{}
	for _, q := range list {
		if b, ok := q.asBucket(); ok {
			found[q.link] = b
		}
	}
	for _, q := range list {
		f, ok := q.asFairQueue()
		if b, there := found[q.link]; ok && there { // other qdiscs have fair queues too
			b.Fair, b.Dropped = f, max(b.Dropped, q.Dropped) // the token bucket counts only some of its queue's drops; the queue counts all
			found[q.link] = b
		}
	}
	return found
}

// Unshape removes the token bucket of a link. It is a no-op if there is none.
func (n *NS) Unshape(link Link) error {
	return fault.Change("qdisc del dev "+link.Name+" root tbf", func() error {
		return qdisc{link: link.Index, parent: netlink.HANDLE_ROOT, kind: "tbf"}.del(n)
	})
}

// loopbackIndex is the ifindex of the loopback device in every namespace (LOOPBACK_IFINDEX in the kernel).
const loopbackIndex = 1

// HasFairQueue reports whether the kernel supports fq_codel, built in or as a module, by the error of a request that always fails. A kernel
// without it looks for the module each time (modprobe(8)).
func (n *NS) HasFairQueue() (bool, error) {
	_, err := qdisc{link: loopbackIndex, parent: netlink.HANDLE_ROOT, kind: fairQueue}.send(n, unix.RTM_NEWQDISC,
		unix.NLM_F_CREATE|unix.NLM_F_REPLACE|unix.NLM_F_EXCL, nested(nl.TCA_OPTIONS, attribute32(nl.TCA_FQ_CODEL_FLOWS, 0)))
	switch {
	case errors.Is(err, unix.EINVAL):
		return true, nil
	case errors.Is(err, unix.ENOENT):
		return false, nil
	}
	return false, wrapped("qdisc "+fairQueue, err)
}
