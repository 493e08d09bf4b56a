// SPDX-License-Identifier: Apache-2.0

// Package meter sends TCP or UDP from one network namespace to another and
// measures at the receiver what arrives.
//
// A [Flow] names two places. A place opens sockets inside its namespace; the
// sockets stay there, so the goroutines that use them run anywhere. The clock
// starts with the first byte that the receiver reads: what a shaper lets
// through in its first second is therefore seen whole, however long the
// connection took to come up.
//
// Rates are given twice: as payload, which an application sees, and as an
// estimate of what the link carried (Ethernet, IP and transport headers
// included), which is what a shaper counts.
package meter

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"time"
)

// Interval is the length of one sample at the receiver.
const Interval = 100 * time.Millisecond

// Protocol is the transport of a flow.
type Protocol string

// The transports a flow can use.
const (
	TCP Protocol = "tcp"
	UDP Protocol = "udp"
)

// ErrSilent says that nothing arrived at the receiver.
var ErrSilent = errors.New("nothing arrived")

// A Place runs a function inside a network namespace; the sockets which the
// function opens belong to that namespace for their whole life.
type Place func(func() error) error

// Here is the place of the calling process.
func Here(f func() error) error { return f() }

// A Flow is one measurement.
type Flow struct {
	Protocol Protocol
	From     Place          // where the sender lives
	To       Place          // where the receiver lives
	Listen   netip.AddrPort // the receiver's address; port 0 lets the kernel choose
	Dial     netip.AddrPort // the address to send to, where it is not Listen (a forwarded port)
	Duration time.Duration  // from the first byte received
	Patience time.Duration  // how long to wait for the first byte; 2 s when zero
	Streams  int            // TCP connections; 1 when zero
	Control  string         // TCP: congestion control, such as cubic; what the namespace has when empty
	Rate     float64        // UDP: payload bit/s to offer; as fast as possible when zero
	Size     int            // UDP: payload bytes of a datagram; 1400 when zero
}

// A Rate is in bits per second.
type Rate struct {
	Payload float64 `json:"payload"`
	Wire    float64 `json:"wire"`
}

// A Result is what the receiver saw.
type Result struct {
	Bytes       uint64        `json:"bytes"`             // payload received
	Packets     uint64        `json:"packets,omitempty"` // UDP: datagrams received
	Sent        uint64        `json:"sent"`              // payload handed to the kernel by the sender
	Duration    time.Duration `json:"duration"`
	Lead        time.Duration `json:"lead"`    // from before the first byte was sent until it was received
	Paused      time.Duration `json:"paused"`  // how long the machine did not run the meter
	Samples     []uint64      `json:"samples"` // payload bytes of each Interval
	Arrivals    Arrivals      `json:"arrivals"`
	FirstSecond Rate          `json:"firstSecond"`
	Steady      Rate          `json:"steady"` // everything after the first second
	Mean        Rate          `json:"mean"`
}

// Run measures a flow. It returns when the duration is over, when ctx is done,
// or with ErrSilent when no first byte came; all its sockets and goroutines are
// gone by then.
func Run(ctx context.Context, flow Flow) (Result, error) {
	flow, err := flow.complete()
	if err != nil {
		return Result{}, err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	run := runTCP
	if flow.Protocol == UDP {
		run = runUDP
	}
	result, err := run(ctx, cancel, flow)
	if err != nil {
		return Result{}, fmt.Errorf("%s flow to %s: %w", flow.Protocol, flow.target(flow.Listen), err)
	}
	return result, nil
}

func (f Flow) complete() (Flow, error) {
	switch {
	case f.Protocol != TCP && f.Protocol != UDP:
		return f, fmt.Errorf("protocol %q: want %s or %s", f.Protocol, TCP, UDP)
	case !f.Listen.IsValid():
		return f, errors.New("flow without a listening address")
	case f.Duration <= 0:
		return f, fmt.Errorf("duration %v: want more than zero", f.Duration)
	case f.Size != 0 && (f.Size < headerSize || f.Size > maxDatagram):
		return f, fmt.Errorf("datagram of %d bytes: want %d-%d", f.Size, headerSize, maxDatagram)
	}
	f.From, f.To = orHere(f.From), orHere(f.To)
	f.Patience = orDefault(f.Patience, 2*time.Second)
	f.Streams = orDefault(f.Streams, 1)
	f.Size = orDefault(f.Size, 1400)
	return f, nil
}

// target is where the sender sends, once the receiver's real port is known.
func (f Flow) target(listening netip.AddrPort) netip.AddrPort {
	if f.Dial.IsValid() {
		return f.Dial
	}
	return listening
}

// pauseFactor is how often a pause of the machine can count: it can hit the sender, the kernel's queues and the receiver one after the
// other.
const pauseFactor = 3

// Range returns the rates that the link can have carried when the meter saw rate between two times. On a machine that paused, packets came
// late and were read late, so the range is wide; a limit is broken only where the whole range is beyond it. From the beginning on, nothing
// can have come late of an earlier time, so low is exact however long the pauses are.
func (r Result) Range(rate float64, from, to time.Duration) (low, high float64) {
	window, late, lost := to-from, r.Lead, r.Lead+pauseFactor*r.Paused
	if from > 0 {
		late = lost
	}
	low, high = rate*float64(window)/float64(window+late), math.Inf(1)
	if lost < window {
		high = rate * float64(window) / float64(window-lost)
	}
	return low, high
}

func orHere(p Place) Place {
	if p == nil {
		return Here
	}
	return p
}

func orDefault[T int | time.Duration](v, otherwise T) T {
	if v == 0 {
		return otherwise
	}
	return v
}
