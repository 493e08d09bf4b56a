// SPDX-License-Identifier: Apache-2.0

package meter

import (
	"sync"
	"time"
)

// Header lengths in bytes, with the Ethernet header, which a traffic shaper on a veth also counts, and TCP's timestamp option.
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

// tally counts the received bytes of each Interval. Several receivers may use it concurrently.
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

// addBytes counts bytes read at a time, and returns the end of the measurement window. After it, addBytes ignores them and returns false.
func (t *tally) addBytes(now time.Time, n int) (end time.Time, open bool) {
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

// sumBetween returns the bytes and packets of the samples that begin between two times. took is the time between them without the part
// after the measurement window.
func (t *tally) sumBetween(from, to time.Duration) (bytes, packets uint64, took time.Duration) {
	from, to = min(from, t.window), min(to, t.window)
	for i := range t.bytes {
		if at := time.Duration(i) * Interval; at >= from && at < to {
			bytes += t.bytes[i]
			packets += t.packets[i]
		}
	}
	return bytes, packets, to - from
}

// wireBytes converts payload bytes and packets to bytes on the link.
type wireBytes func(bytes, packets uint64) float64

// perPacket adds one header per packet, for UDP, where a read returns one packet.
func perPacket(header int) wireBytes {
	return func(bytes, packets uint64) float64 {
		return float64(bytes) + float64(packets)*float64(header)
	}
}

// perSegment adds one header per segment of mss bytes, for TCP, where reads do not show packets.
func perSegment(mss, header int) wireBytes {
	return func(bytes, _ uint64) float64 {
		return float64(bytes) * float64(mss+header) / float64(mss)
	}
}

func (t *tally) result(wire wireBytes) Result {
	t.mu.Lock()
	defer t.mu.Unlock()
	rate := func(from, to time.Duration) Rate {
		bytes, packets, took := t.sumBetween(from, to)
		if took <= 0 {
			return Rate{}
		}
		return Rate{
			Payload: 8 * float64(bytes) / took.Seconds(),
			Wire:    8 * wire(bytes, packets) / took.Seconds(),
		}
	}
	bytes, packets, took := t.sumBetween(0, t.window)
	r := Result{Bytes: bytes, Packets: packets, Duration: took, Lead: max(0, t.first.Sub(t.opened)), Samples: t.bytes}
	r.FirstSecond = rate(0, time.Second)
	r.Mean = rate(0, t.window)
	r.Steady = r.Mean
	if t.window > time.Second {
		r.Steady = rate(time.Second, t.window)
	}
	return r
}

func (t *tally) isEmpty() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.first.IsZero()
}
