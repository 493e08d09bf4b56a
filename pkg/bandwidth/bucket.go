// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"time"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// A derived burst is what is sent in burstTime: enough for a timer that comes late. At least some full frames pass at once.
//
// A segment of up to 64 KiB that is longer than the burst is cut into frames before it waits (tbf_segment in net/sched/sch_tbf.c). That
// costs CPU, which only slow links can afford, and keeps their queue fine-grained. One that is no longer than the burst waits whole, and a
// queue that cannot hold some of them would drop them for ever.
const (
	burstTime      = 4 * time.Millisecond
	burstFrames    = 4
	defaultLatency = 10 * time.Millisecond
	queueFrames    = 16
	segment        = 64<<10 + overhead
	queueSegments  = 2
	header         = 14         // of Ethernet: so much more than the MTU a queue counts for a frame
	overhead       = header + 4 // and a VLAN tag

	// longest is the time that a burst may take at the rate: the kernel keeps it in 2^32 ticks of 64 ns.
	longest = 274 * time.Second
)

// bucket returns the token bucket of a limit for a link with the MTU; it is nil if the rate is zero. A packet waits no longer than latency,
// or as long as the packets that have to fit into any queue. In a fair queue each flow waits for itself.
func (l Limit) bucket(mtu int, latency time.Duration, fair bool) *kernel.Bucket {
	if l.Rate == 0 {
		return nil
	}
	frame := uint64(mtu + overhead)
	burst := l.Burst / 8
	if burst == 0 {
		burst = l.sentIn(burstTime)
	}
	burst = min(max(burst, burstFrames*frame), l.sentIn(longest), maxBytes)
	queue := max(l.sentIn(latency), queueFrames*frame, queueSegments*min(burst, segment))
	// Beside full frames there is room for small packets: else a queue that greedy flows keep full would never take one.
	counted := uint64(mtu + header)
	queue += max(queue%counted, counted/2) - queue%counted
	bucket := kernel.Bucket{Rate: l.Rate, Burst: uint32(burst), Limit: uint32(min(queue, maxBytes))}
	if fair {
		bucket.Fair = l.fairQueue(frame, latency)
	}
	return &bucket
}

// tellBurst logs a burst that full frames, or the kernel's clock, do not allow.
func tellBurst(r *plugin.Request, direction string, asked Limit, got *kernel.Bucket) {
	if got != nil && asked.Burst > 0 && asked.Burst/8 != uint64(got.Burst) {
		r.Log.Warn("burst is out of bounds and was clamped", "direction", direction, "asked", asked.Burst, "applied", uint64(got.Burst)*8)
	}
}

// Of a fair queue. A queue in which one frame waits for the other is none that lasts: codel must not drop for it. A flow that does not
// slow down, such as UDP without an answer, gets no more than what is sent in the interval.
const (
	fairInterval   = 100 * time.Millisecond // the kernel's own, enough for any way around the world
	fairMinPackets = 64
	fairMaxPackets = 10240 // the kernel's own
)

// fairQueue begins to drop what has to wait for half of the latency: with the default that is the kernel's own 5 ms.
func (l Limit) fairQueue(frame uint64, latency time.Duration) kernel.FairQueue {
	oneAndAHalf := time.Duration(frame*12*1e6/l.Rate) * time.Microsecond // frames of 8 bits a byte
	target := max(latency/2, oneAndAHalf)
	interval := max(fairInterval, 2*target)
	return kernel.FairQueue{Target: target, Interval: interval,
		Packets: uint32(min(max(l.sentIn(interval)/frame, fairMinPackets), fairMaxPackets))}
}

// noFairQueue marks a node whose kernel has none, until the next boot: each time that it is asked it starts modprobe(8) to look for one.
const noFairQueue = "no-fq_codel"

func fairQueues(host *kernel.Node) (bool, error) {
	if _, noted := attachment.NodeNoted(noFairQueue); noted {
		return false, nil
	}
	has, err := host.HasFairQueue()
	if err == nil && !has {
		err = attachment.NoteNode(noFairQueue, "")
	}
	return has, err
}

// sentIn returns the bytes that pass in a time. It cannot wrap: maxRate/8 in longest are less than 2^62 microbytes.
func (l Limit) sentIn(t time.Duration) uint64 { return l.Rate / 8 * uint64(t.Microseconds()) / 1e6 }
