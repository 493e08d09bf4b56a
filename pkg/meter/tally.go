// SPDX-License-Identifier: Apache-2.0

package meter

import (
	"sync"
	"time"
)

// Bytes around the payload of a packet. A shaper on a veth counts the Ethernet header. TCP carries the timestamp option.
const (
	ethernetHeader = 14
	ipv4Header     = 20
	ipv6Header     = 40
	udpHeader      = 8
	tcpHeader      = 32
)

func ipHeader(is4 bool) int {
	if is4 {
		return ipv4Header
	}
	return ipv6Header
}

// A tally counts arriving bytes by interval. Several receivers may share one.
type tally struct {
	window time.Duration
	opened time.Time     // before the first byte is sent
	begun  chan struct{} // closed once first is set

	mu      sync.Mutex
	first   time.Time
	bytes   []uint64
	packets []uint64
}

func newTally(window time.Duration) *tally {
	n := int((window + Interval - 1) / Interval)
	return &tally{window: window, opened: time.Now(), begun: make(chan struct{}), bytes: make([]uint64, n), packets: make([]uint64, n)}
}

// add counts n bytes read at now and returns the end of the window. It does not count bytes after the end.
func (t *tally) add(now time.Time, n int) (end time.Time, open bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.first.IsZero() {
		t.first = now
		close(t.begun)
	}
	since := now.Sub(t.first)
	end = t.first.Add(t.window)
	if since >= t.window {
		return end, false
	}
	t.bytes[since/Interval] += uint64(n)
	t.packets[since/Interval]++
	return end, true
}

// span sums the samples from from up to, but not including, to. If the window ends inside the last sample, the time ends there.
func (t *tally) span(from, to time.Duration) (bytes, packets uint64, took time.Duration) {
	from, to = min(from, t.window), min(to, t.window)
	for i := range t.bytes {
		if at := time.Duration(i) * Interval; at >= from && at < to {
			bytes += t.bytes[i]
			packets += t.packets[i]
		}
	}
	return bytes, packets, to - from
}

// wireBytes converts payload and reads to bytes on the link.
type wireBytes func(bytes, packets uint64) float64

// perPacket is for UDP, where a read is a packet.
func perPacket(header int) wireBytes {
	return func(bytes, packets uint64) float64 {
		return float64(bytes) + float64(packets)*float64(header)
	}
}

// perSegment is for TCP, where reads do not show packets, but the segment size is known.
func perSegment(mss, header int) wireBytes {
	return func(bytes, _ uint64) float64 {
		return float64(bytes) * float64(mss+header) / float64(mss)
	}
}

func (t *tally) result(wire wireBytes) Result {
	t.mu.Lock()
	defer t.mu.Unlock()
	rate := func(from, to time.Duration) Rate {
		bytes, packets, took := t.span(from, to)
		if took <= 0 {
			return Rate{}
		}
		return Rate{
			Payload: 8 * float64(bytes) / took.Seconds(),
			Wire:    8 * wire(bytes, packets) / took.Seconds(),
		}
	}
	bytes, packets, took := t.span(0, t.window)
	r := Result{Bytes: bytes, Packets: packets, Duration: took, Lead: max(0, t.first.Sub(t.opened)), Samples: t.bytes}
	r.FirstSecond = rate(0, time.Second)
	r.Mean = rate(0, t.window)
	r.Steady = r.Mean
	if t.window > time.Second {
		r.Steady = rate(time.Second, t.window)
	}
	return r
}

// isEmpty reports whether nothing was counted.
func (t *tally) isEmpty() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.first.IsZero()
}
