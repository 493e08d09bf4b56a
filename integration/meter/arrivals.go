// SPDX-License-Identifier: Apache-2.0

package meter

import (
	"context"
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// An Arrival is how many bytes, with headers, had arrived at a time since the first byte.
type Arrival struct {
	At   time.Duration `json:"at"`
	Wire float64       `json:"wire"`
}

// Arrivals has one Arrival for about the end of each [Interval]. For TCP, it counts the bytes that the kernel has received, including
// duplicates and segments after a lost one. What an application reads would mislead, because it gets many bytes at once after a lost
// segment, as if the traffic exceeded a rate limit.
type Arrivals []Arrival

// Rate returns the mean rate in bit/s between two times.
func (a Arrivals) Rate(from, to time.Duration) float64 {
	if len(a) == 0 {
		return 0
	}
	to = min(to, a[len(a)-1].At)
	if from >= to {
		return 0
	}
	return 8 * (a.bytesAt(to) - a.bytesAt(from)) / (to - from).Seconds()
}

// bytesAt returns how many bytes had arrived by a time, interpolated between arrivals.
func (a Arrivals) bytesAt(at time.Duration) float64 {
	var last Arrival
	for _, next := range a {
		if next.At >= at {
			return last.Wire + (next.Wire-last.Wire)*float64(at-last.At)/float64(next.At-last.At)
		}
		last = next
	}
	return last.Wire
}

// Peak returns the highest rate in bit/s between two consecutive arrivals.
func (a Arrivals) Peak() (peak float64) {
	var last Arrival
	for _, next := range a {
		peak = max(peak, 8*(next.Wire-last.Wire)/(next.At-last.At).Seconds())
		last = next
	}
	return peak
}

// segmentCount is how many TCP segments the kernel had received at a time.
type segmentCount struct {
	at       time.Duration
	received uint64
}

// sampleSegments waits for the first segment or the end of ctx, and then reads the kernel's counter at the end of each Interval until the
// window ends.
func sampleSegments(ctx context.Context, conns []*net.TCPConn, counts *tally) (seen []segmentCount) {
	select {
	case <-ctx.Done():
		return nil
	case <-counts.begun:
	}
	for next := Interval; ; {
		select {
		case <-ctx.Done():
			return seen
		case <-time.After(time.Until(counts.first.Add(next))):
		}
		s := segmentCount{received: segmentsOf(conns), at: time.Since(counts.first)}
		// A value that was read after the window is dropped.
		if s.at > counts.window {
			return seen
		}
		seen = append(seen, s)
		next = s.at + Interval
	}
}

// segmentsOf returns the number of received segments with data. The kernel counts each segment of a large packet (GSO).
func segmentsOf(conns []*net.TCPConn) (received uint64) {
	for _, conn := range conns {
		raw, err := conn.SyscallConn()
		if err != nil {
			continue
		}
		_ = raw.Control(func(fd uintptr) {
			if info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
				received += uint64(info.Data_segs_in)
			}
		})
	}
	return received
}

// arrivalList converts the byte counts of a tally to Arrivals.
func (t *tally) arrivalList(wire wireBytes) (seen Arrivals) {
	var sum float64
	for i := range t.bytes {
		sum += wire(t.bytes[i], t.packets[i])
		seen = append(seen, Arrival{At: min(time.Duration(i+1)*Interval, t.window), Wire: sum})
	}
	return seen
}
