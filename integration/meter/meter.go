// SPDX-License-Identifier: Apache-2.0

// Package meter sends TCP or UDP traffic from one network namespace to another and measures the received rate.
//
// The two ends of a [Flow] each have a [Place], which opens sockets inside a network namespace. The sockets belong to it, so any goroutine
// can use them. The measurement starts with the first byte that the receiver reads, and thus does not include the time to connect.
//
// Of each rate, Payload counts the bytes that an application sees. Wire also counts Ethernet, IP and transport headers, like a traffic
// shaper, and is an estimate.
package meter

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"time"
)

// Interval is the duration of one sample of the receiver.
const Interval = 100 * time.Millisecond

// Protocol is the transport protocol of a flow.
type Protocol string

// The supported protocols.
const (
	TCP Protocol = "tcp"
	UDP Protocol = "udp"
)

// ErrSilent means that no byte arrived at the receiver.
var ErrSilent = errors.New("nothing arrived")

// A Place runs a function inside a network namespace, to which all sockets that it opens belong for good.
type Place func(func() error) error

// Here is the Place of the process's network namespace.
func Here(f func() error) error { return f() }

// A Flow is the configuration of one measurement.
type Flow struct {
	Protocol Protocol
	From     Place          // the sender's place
	To       Place          // the receiver's place
	Listen   netip.AddrPort // the receiver's address; port 0 lets the kernel choose
	Dial     netip.AddrPort // the address to which the sender sends, if it is not Listen (a forwarded port)
	Duration time.Duration  // from the first byte received
	Patience time.Duration  // timeout for the first byte; 2 s if zero
	Streams  int            // TCP connections; 1 if zero
	Control  string         // TCP: congestion control, such as cubic; empty for the namespace's default
	Rate     float64        // UDP: payload bit/s to offer; unlimited if zero
	Size     int            // UDP: payload bytes of a datagram; 1400 if zero
}

// A Rate is in bits per second.
type Rate struct {
	Payload float64 `json:"payload"`
	Wire    float64 `json:"wire"`
}

// A Result is the result of one measurement.
type Result struct {
	Bytes       uint64        `json:"bytes"`             // payload received
	Packets     uint64        `json:"packets,omitempty"` // UDP: datagrams received
	Sent        uint64        `json:"sent"`              // payload that the sender passed to the kernel
	Duration    time.Duration `json:"duration"`
	Lead        time.Duration `json:"lead"`    // from just before the first byte was sent until it was received
	Paused      time.Duration `json:"paused"`  // total time during which the machine did not run the meter
	Samples     []uint64      `json:"samples"` // payload bytes of each Interval
	Arrivals    Arrivals      `json:"arrivals"`
	FirstSecond Rate          `json:"firstSecond"`
	Steady      Rate          `json:"steady"` // the rate after the first second
	Mean        Rate          `json:"mean"`
}

// Run measures a flow until its duration is over or ctx is done. It returns ErrSilent if no byte arrived. On return, its sockets are closed
// and its goroutines have ended.
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

// target returns the address to which the sender sends, given the one on which the receiver listens.
func (f Flow) target(listening netip.AddrPort) netip.AddrPort {
	if f.Dial.IsValid() {
		return f.Dial
	}
	return listening
}

// pauseFactor is how often one pause of the machine can delay the same packet: in the sender, in the kernel's queues and in the receiver.
const pauseFactor = 3

// Range returns the lowest and highest rate that the link may have had between two times with this measured rate. Pauses of the machine
// delay packets and reads, so they widen the range. Traffic exceeds a limit only if the lowest rate does. From 0 on, pauses leave the
// lowest rate as it is, because nothing was sent earlier.
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
