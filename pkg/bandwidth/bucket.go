// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"time"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// If no burst is configured, the burst is the number of bytes that the rate allows in the time burstTime. With this burst, a late timer
// does not lower the rate. The burst is at least as large as burstFrames full frames.
//
// A segment is a packet of up to 64 KiB. If a segment is longer than the burst, the kernel splits it into frames before queueing
// (tbf_segment in net/sched/sch_tbf.c). Splitting keeps queued packets small. However, splitting costs CPU time, so it is acceptable only
// on slow links. The kernel queues a segment unsplit if the segment fits into the burst. The queue must have room for a few whole segments,
// because a shorter queue would drop every segment.
const (
	burstTime      = 4 * time.Millisecond
	burstFrames    = 4
	defaultLatency = 10 * time.Millisecond
	queueFrames    = 16
	segment        = 64<<10 + overhead
	queueSegments  = 2
	header         = 14         // bytes of the Ethernet header: a queue counts a frame as MTU plus header
	overhead       = header + 4 // and a VLAN tag

	// maxBurstTime is the maximum time in which the rate may send a whole burst. The kernel stores this time as a 32-bit number of ticks of
	// 64 ns.
	maxBurstTime = 274 * time.Second
)

// bucket() returns the token bucket that enforces a limit on a link with the given MTU. bucket() returns nil if the rate is zero. The
// argument `latency` is the maximum time that a packet waits in the queue. A packet may wait longer if the rate is so low that even the
// shortest allowed queue takes more time. With a fair queue, the packets of a flow wait only for packets of the same flow.
func (l Limit) bucket(mtu int, latency time.Duration, fair bool) *kernel.Bucket {
	if l.Rate == 0 {
		return nil
	}
	frame := uint64(mtu + overhead)
	burst := l.Burst / 8
	if burst == 0 {
		burst = l.sentIn(burstTime)
	}
	burst = min(max(burst, burstFrames*frame), l.sentIn(maxBurstTime), maxBytes)
	queue := max(l.sentIn(latency), queueFrames*frame, queueSegments*min(burst, segment))
	// A queue that is full of whole frames must still have room for half a frame, so that small packets fit into the queue. Without this
	// room, flows of whole frames would keep the queue full, and no small packet would ever enter the queue.
	counted := uint64(mtu + header)
	queue += max(queue%counted, counted/2) - queue%counted
	bucket := kernel.Bucket{Rate: l.Rate, Burst: uint32(burst), Limit: uint32(min(queue, maxBytes))}
	if fair {
		bucket.Fair = l.fairQueue(frame, latency)
	}
	return &bucket
}

// logBurst logs that the plugin changed a requested burst that was too small or too large. A burst must contain a minimum number of full
// frames. In addition, the kernel's clock must be able to represent the time in which the rate sends the burst.
func logBurst(r *plugin.Request, direction string, asked Limit, got *kernel.Bucket) {
	if got != nil && asked.Burst > 0 && asked.Burst/8 != uint64(got.Burst) {
		r.Log.Warn("burst, in bits, is out of bounds and was clamped", "direction", direction, "asked", asked.Burst, "applied", uint64(got.Burst)*8)
	}
}

// The constants fairInterval, fairMinPackets and fairMaxPackets are parameters of a fair queue, which is an fq_codel qdisc. CoDel must not
// drop a packet that waits for only one earlier frame, since one waiting frame is not a persistent queue. Therefore CoDel's target is at
// least the time in which 1.5 frames are sent. A flow without congestion control, such as unanswered UDP, can queue at most the bytes that
// the rate sends in one interval.
const (
	fairInterval   = 100 * time.Millisecond // the kernel's default, enough for any round trip on Earth
	fairMinPackets = 64
	fairMaxPackets = 10240 // the kernel's default
)

// fairQueue returns the parameters of a fair queue. CoDel begins to drop packets after they have waited for half of the latency. With the
// default latency, this time (CoDel's target) is 5 ms, which is also the kernel's default.
func (l Limit) fairQueue(frame uint64, latency time.Duration) kernel.FairQueue {
	oneAndAHalf := time.Duration(frame*12*1e6/l.Rate) * time.Microsecond // 1.5 frames of 8 bits per byte
	target := max(latency/2, oneAndAHalf)
	interval := max(fairInterval, 2*target)
	return kernel.FairQueue{Target: target, Interval: interval,
		Packets: uint32(min(max(l.sentIn(interval)/frame, fairMinPackets), fairMaxPackets))}
}

// sentIn returns the number of bytes that the limit's rate allows in the given time. The multiplication cannot overflow, because maxRate
// times maxBurstTime is less than 2^62.
func (l Limit) sentIn(t time.Duration) uint64 { return l.Rate / 8 * uint64(t.Microseconds()) / 1e6 }
