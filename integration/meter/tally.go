// SPDX-License-Identifier: Apache-2.0

package meter

import (
	"sync"
	"time"
)

// These constants are header lengths in bytes. The header lengths include the Ethernet header, because a traffic shaper on a veth also
// counts it. The TCP header includes the timestamp option.
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

// The type tally counts the received bytes of each Interval. Several receivers may use the same tally concurrently.
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

// addBytes counts bytes that were read at the given time, and returns the end of the measurement window. After the end of the window,
// addBytes ignores the bytes and returns false.
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

// sumBetween returns the total bytes and packets of the samples that begin between two times. The result "took" is the time between "from"
// and "to", without the part after the end of the measurement window.
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

// The type wireBytes is a function that converts the number of payload bytes and packets to the number of bytes on the link.
type wireBytes func(bytes, packets uint64) float64

// perPacket returns a function that adds one header per packet. Use perPacket for UDP, because each UDP read returns one packet.
func perPacket(header int) wireBytes {
	return func(bytes, packets uint64) float64 {
		return float64(bytes) + float64(packets)*float64(header)
	}
}

// perSegment returns a function that adds one header per segment of mss bytes. Use perSegment for TCP, because TCP reads do not show the
// number of packets.
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

// isEmpty reports whether the receivers have counted no bytes.
func (t *tally) isEmpty() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.first.IsZero()
}
