// SPDX-License-Identifier: Apache-2.0

package meter

import (
	"context"
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// An Arrival is the number of link bytes that had arrived at a time after the first byte.
type Arrival struct {
	At   time.Duration `json:"at"`
	Wire float64       `json:"wire"`
}

// Arrivals hold the arrivals at the end of each [Interval], at approximate times. For TCP they are the bytes that the kernel received, also
// duplicates and bytes that wait for a gap to be filled. An application reads those later and in bursts, which would look like an exceeded
// limit.
type Arrivals []Arrival

// Rate returns the mean in bit/s between two times.
func (a Arrivals) Rate(from, to time.Duration) float64 {
	if len(a) == 0 {
		return 0
	}
	to = min(to, a[len(a)-1].At)
	if from >= to {
		return 0
	}
	return 8 * (a.by(to) - a.by(from)) / (to - from).Seconds()
}

// by returns the bytes at a time, interpolated between two arrivals.
func (a Arrivals) by(at time.Duration) float64 {
	var last Arrival
	for _, next := range a {
		if next.At >= at {
			return last.Wire + (next.Wire-last.Wire)*float64(at-last.At)/float64(next.At-last.At)
		}
		last = next
	}
	return last.Wire
}

// Peak returns the largest rate between two arrivals.
func (a Arrivals) Peak() (peak float64) {
	var last Arrival
	for _, next := range a {
		peak = max(peak, 8*(next.Wire-last.Wire)/(next.At-last.At).Seconds())
		last = next
	}
	return peak
}

// segments is the number of segments at a time.
type segments struct {
	at       time.Duration
	received uint64
}

// sampleSegments reads the kernel's count of received segments at each interval of the window. It ends with ctx if no segment arrives.
func sampleSegments(ctx context.Context, conns []*net.TCPConn, counts *tally) (seen []segments) {
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
		s := segments{received: segmentsOf(conns), at: time.Since(counts.first)}
		// After the window the count is not used.
		if s.at > counts.window {
			return seen
		}
		seen = append(seen, s)
		next = s.at + Interval
	}
}

// segmentsOf counts the segments with data. A large segment that was received as one, because no real link split it, counts as the segments
// that it would have been.
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

// arrivals returns the arrivals from the tally's own counts.
func (t *tally) arrivals(wire wireBytes) (seen Arrivals) {
	var sum float64
	for i := range t.bytes {
		sum += wire(t.bytes[i], t.packets[i])
		seen = append(seen, Arrival{At: min(time.Duration(i+1)*Interval, t.window), Wire: sum})
	}
	return seen
}
