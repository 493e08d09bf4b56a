// SPDX-License-Identifier: Apache-2.0

package meter

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"sync"
	"time"
)

// PingInterval is the time between two datagrams of [Ping].
const PingInterval = 10 * time.Millisecond

const (
	pingHeader = headerSize + 4 + 8 // the mark, a number, and when it was sent
	pingSize   = 64
	unanswered = -1
)

// RoundTrips are what a [Ping] saw. A datagram without an answer counts in the percentiles as long as it was waited for.
type RoundTrips struct {
	Samples       []time.Duration // of those that were answered, in the order of sending
	Sent, Lost    int
	P50, P95, P99 time.Duration
}

// Ping sends a small datagram each [PingInterval] for the duration of a flow, and has each echoed where the flow goes to. An answer that
// comes later than the flow's patience is none. Protocol, Streams and Rate are not used. That no answer comes at all is no error.
func Ping(ctx context.Context, flow Flow) (RoundTrips, error) {
	flow.Protocol, flow.Size = UDP, max(orDefault(flow.Size, pingSize), pingHeader)
	flow, err := flow.complete()
	if err != nil {
		return RoundTrips{}, err
	}
	echoing, err := listenUDP(flow)
	if err != nil {
		return RoundTrips{}, fmt.Errorf("ping %s: %w", flow.Listen, err)
	}
	defer echoing.Close()
	target := flow.target(addrPort(echoing.LocalAddr()))
	asking, err := dialUDP(flow, target)
	if err != nil {
		return RoundTrips{}, fmt.Errorf("ping %s: %w", target, err)
	}
	defer asking.Close()

	p := pings{mark: rand.Uint64(), start: time.Now(), patience: flow.Patience, size: flow.Size}
	p.samples = slices.Repeat([]time.Duration{unanswered}, max(1, int(flow.Duration/PingInterval)))
	stop := context.AfterFunc(ctx, func() { closeAll([]*net.UDPConn{asking, echoing}) })
	defer stop()
	var others sync.WaitGroup
	others.Go(func() { p.echo(echoing) })
	others.Go(func() { p.ask(ctx, asking) })
	p.receive(asking)
	closeAll([]*net.UDPConn{asking, echoing})
	others.Wait()
	if err := context.Cause(ctx); err != nil {
		return RoundTrips{}, fmt.Errorf("ping %s: %w", target, err)
	}
	return roundTrips(p.samples, flow.Patience), nil
}

// PingBeside pings while a flow sends, from a time after that was begun. The flow lasts as long as the ping, whatever its own duration.
func PingBeside(ctx context.Context, ping, flow Flow, after time.Duration) (RoundTrips, error) {
	flow.Duration = after + ping.Duration + time.Minute
	ctx, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error, 1)
	go func() {
		_, err := Run(ctx, flow)
		ended <- err
	}()
	select {
	case err := <-ended:
		return RoundTrips{}, fmt.Errorf("the flow beside it ended: %w", err)
	case <-time.After(after):
	}
	seen, err := Ping(ctx, ping)
	stop()
	if other := <-ended; !errors.Is(other, context.Canceled) {
		err = errors.Join(err, fmt.Errorf("the flow beside it ended: %w", other))
	}
	return seen, err
}

// pings is one Ping. Samples belong to who receives; the time of sending travels in the datagram.
type pings struct {
	mark     uint64
	start    time.Time
	patience time.Duration
	size     int
	samples  []time.Duration
}

// ask sends at fixed times, however late one of them was. A datagram that cannot be sent is lost.
func (p *pings) ask(ctx context.Context, conn *net.UDPConn) {
	packet := make([]byte, p.size)
	binary.BigEndian.PutUint64(packet, p.mark)
	for i := range p.samples {
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Until(p.start.Add(time.Duration(i) * PingInterval))):
		}
		binary.BigEndian.PutUint32(packet[headerSize:], uint32(i))
		binary.BigEndian.PutUint64(packet[headerSize+4:], uint64(time.Since(p.start)))
		_, _ = conn.Write(packet)
	}
}

func (p *pings) mine(packet []byte) bool {
	return len(packet) >= pingHeader && binary.BigEndian.Uint64(packet) == p.mark
}

// echo answers until the socket is closed.
func (p *pings) echo(conn *net.UDPConn) {
	buffer := make([]byte, maxDatagram)
	for {
		n, from, err := conn.ReadFromUDPAddrPort(buffer)
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err == nil && p.mine(buffer[:n]):
			_, _ = conn.WriteToUDPAddrPort(buffer[:n], from)
		}
	}
}

// receive takes answers until there is one to each datagram, or none is waited for any more. What the network refuses meanwhile, such as a
// port where nobody listens yet, ends nothing.
func (p *pings) receive(conn *net.UDPConn) {
	buffer := make([]byte, maxDatagram)
	_ = conn.SetReadDeadline(p.start.Add(time.Duration(len(p.samples))*PingInterval + p.patience))
	for missing := len(p.samples); missing > 0; {
		n, err := conn.Read(buffer)
		if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil || !p.mine(buffer[:n]) {
			continue
		}
		i := binary.BigEndian.Uint32(buffer[headerSize:])
		took := time.Since(p.start) - time.Duration(binary.BigEndian.Uint64(buffer[headerSize+4:]))
		if int(i) < len(p.samples) && p.samples[i] == unanswered && took <= p.patience {
			p.samples[i] = took
			missing--
		}
	}
}

func roundTrips(samples []time.Duration, patience time.Duration) RoundTrips {
	r := RoundTrips{Sent: len(samples)}
	for _, s := range samples {
		if s != unanswered {
			r.Samples = append(r.Samples, s)
		}
	}
	r.Lost = r.Sent - len(r.Samples)
	sorted := append(slices.Sorted(slices.Values(r.Samples)), slices.Repeat([]time.Duration{patience}, r.Lost)...)
	// Nearest rank.
	at := func(percent int) time.Duration { return sorted[(len(sorted)*percent+99)/100-1] }
	r.P50, r.P95, r.P99 = at(50), at(95), at(99)
	return r
}
