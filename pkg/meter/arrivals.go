// SPDX-License-Identifier: Apache-2.0

package meter

import (
	"context"
	"net"
	"time"

	"golang.org/x/sys/unix"
)

// An Arrival is what had come in over the link by a time after the first byte, in bytes of the link.
type Arrival struct {
	At   time.Duration `json:"at"`
	Wire float64       `json:"wire"`
}

// Arrivals are what came in by the end of each [Interval], at about these times. Of TCP that is what the kernel received, also what came
// twice, or waits for a gap to be filled: applications read that late and at once, and would see a limit exceeded that was not.
type Arrivals []Arrival

// Rate is the mean in bit/s between two times.
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

// by gives the bytes by a time, which lies between two arrivals.
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

// Peak is the largest rate between two arrivals.
func (a Arrivals) Peak() (peak float64) {
	var last Arrival
	for _, next := range a {
		peak = max(peak, 8*(next.Wire-last.Wire)/(next.At-last.At).Seconds())
		last = next
	}
	return peak
}

// segments are how many had come by a time.
type segments struct {
	at       time.Duration
	received uint64
}

// watch asks the kernel, each interval of the window, for the segments that it received. It ends with ctx when nothing comes.
func watch(ctx context.Context, conns []*net.TCPConn, counts *tally) (seen []segments) {
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
		// When the window is over nobody reads any more.
		if s.at > counts.window {
			return seen
		}
		seen = append(seen, s)
		next = s.at + Interval
	}
}

// segmentsOf counts those with data in them. What was received as one, without having been cut into segments on a real link, counts as the
// segments that it would have been.
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

// arrivals gives what was counted itself.
func (t *tally) arrivals(wire wireBytes) (seen Arrivals) {
	var sum float64
	for i := range t.bytes {
		sum += wire(t.bytes[i], t.packets[i])
		seen = append(seen, Arrival{At: min(time.Duration(i+1)*Interval, t.window), Wire: sum})
	}
	return seen
}
