// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"time"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// A derived burst is the amount sent in burstTime, which covers a late timer. At least some full frames pass at once.
//
// A segment of up to 64 KiB that is longer than the burst is split into frames before it waits (tbf_segment in net/sched/sch_tbf.c). That
// costs CPU, which only slow links can afford, and keeps their queues fine-grained. A segment no longer than the burst waits unsplit. A
// queue with no room for a few of them would drop them forever.
const (
	burstTime      = 4 * time.Millisecond
	burstFrames    = 4
	defaultLatency = 10 * time.Millisecond
	queueFrames    = 16
	segment        = 64<<10 + overhead
	queueSegments  = 2
	header         = 14         // of Ethernet: a queue counts a frame as MTU plus header
	overhead       = header + 4 // and a VLAN tag

	// longest is the maximum time of a burst at the rate: the kernel stores it in 2^32 ticks of 64 ns.
	longest = 274 * time.Second
)

// bucket returns the token bucket of a limit for a link with the MTU, or nil if the rate is zero. A packet waits at most for latency, or
// for the minimum queue length if that takes longer. In a fair queue each flow waits only for its own packets.
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
	// Leave room for small packets beside full frames. Otherwise a queue that greedy flows keep full would never accept a small packet.
	counted := uint64(mtu + header)
	queue += max(queue%counted, counted/2) - queue%counted
	bucket := kernel.Bucket{Rate: l.Rate, Burst: uint32(burst), Limit: uint32(min(queue, maxBytes))}
	if fair {
		bucket.Fair = l.fairQueue(frame, latency)
	}
	return &bucket
}

// logBurst logs a burst that was changed for full frames or for the kernel's clock.
func logBurst(r *plugin.Request, direction string, asked Limit, got *kernel.Bucket) {
	if got != nil && asked.Burst > 0 && asked.Burst/8 != uint64(got.Burst) {
		r.Log.Warn("burst is out of bounds and was clamped", "direction", direction, "asked", asked.Burst, "applied", uint64(got.Burst)*8)
	}
}

// Parameters of a fair queue. CoDel must not drop packets of a queue in which one frame waits for another, since such a queue does not
// persist. A flow that does not slow down, such as unanswered UDP, gets at most the amount sent in the interval.
const (
	fairInterval   = 100 * time.Millisecond // the kernel's default, enough for any round trip on Earth
	fairMinPackets = 64
	fairMaxPackets = 10240 // the kernel's default
)

// fairQueue begins to drop packets that wait for half of the latency. With the default latency that is the kernel's default of 5 ms.
func (l Limit) fairQueue(frame uint64, latency time.Duration) kernel.FairQueue {
	oneAndAHalf := time.Duration(frame*12*1e6/l.Rate) * time.Microsecond // 1.5 frames of 8 bits per byte
	target := max(latency/2, oneAndAHalf)
	interval := max(fairInterval, 2*target)
	return kernel.FairQueue{Target: target, Interval: interval,
		Packets: uint32(min(max(l.sentIn(interval)/frame, fairMinPackets), fairMaxPackets))}
}

// noFairQueue is the note that the node's kernel has no fair queues, until the next boot. Without it each query would start modprobe(8).
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

// sentIn returns the bytes sent in a time. It cannot overflow: maxRate/8 over longest is less than 2^62 microbytes.
func (l Limit) sentIn(t time.Duration) uint64 { return l.Rate / 8 * uint64(t.Microseconds()) / 1e6 }
