// SPDX-License-Identifier: Apache-2.0

package meter

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"time"
)

// PingInterval is the time between two echo requests of [Ping].
const PingInterval = 10 * time.Millisecond

const (
	icmpHeader = 8
	pingHeader = icmpHeader + headerSize + 4 + 8 // mark, number, time of sending
	pingSize   = icmpHeader + 64
	unanswered = -1

	echo4, reply4 = 8, 0
	echo6, reply6 = 128, 129
)

// RoundTrips is the result of a [Ping]. In percentiles, a request without a reply counts as if it took the timeout.
type RoundTrips struct {
	Samples       []time.Duration // of answered requests, in the order of sending
	Sent, Lost    int
	P50, P95, P99 time.Duration
}

// Ping sends an ICMP echo request every [PingInterval] from the sender's namespace to the receiver's address. It uses only From, Listen
// (without the port), Duration and Patience of the flow, and needs CAP_NET_RAW in the sender's namespace. A reply after more than Patience
// counts as lost. Losing all is no error.
func Ping(ctx context.Context, flow Flow) (RoundTrips, error) {
	flow.Protocol = UDP // unused, but a flow needs one
	flow, err := flow.complete()
	if err != nil {
		return RoundTrips{}, err
	}
	target := flow.Listen.Addr()
	conn, err := dialICMP(flow.From, target)
	if err != nil {
		return RoundTrips{}, fmt.Errorf("ping %s: %w", target, err)
	}
	defer conn.Close()

	p := pings{is4: target.Is4(), mark: rand.Uint64(), start: time.Now(), patience: flow.Patience}
	p.samples = slices.Repeat([]time.Duration{unanswered}, max(1, int(flow.Duration/PingInterval)))
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	var asking sync.WaitGroup
	asking.Go(func() { p.sendRequests(ctx, conn) })
	p.receiveReplies(conn)
	conn.Close()
	asking.Wait()
	if err := context.Cause(ctx); err != nil {
		return RoundTrips{}, fmt.Errorf("ping %s: %w", target, err)
	}
	return roundTrips(p.samples, flow.Patience), nil
}

func dialICMP(from Place, target netip.Addr) (conn *net.IPConn, err error) {
	network := "ip6:ipv6-icmp"
	if target.Is4() {
		network = "ip4:icmp"
	}
	err = from(func() (err error) {
		conn, err = net.DialIP(network, nil, &net.IPAddr{IP: target.AsSlice(), Zone: target.Zone()})
		return err
	})
	return conn, err
}

// PingBeside starts a flow, waits, and then pings while the flow sends. The ping ends the flow, whose Duration is ignored.
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

// pings is the state of one Ping. Only the goroutine that receives replies uses samples. Each request contains its time of sending.
type pings struct {
	is4      bool
	mark     uint64
	start    time.Time
	patience time.Duration
	samples  []time.Duration
}

// sendRequests sends the requests at fixed times, so that a late one does not delay the next. One that cannot be sent counts as lost.
func (p *pings) sendRequests(ctx context.Context, conn *net.IPConn) {
	for i := range p.samples {
		select {
		case <-ctx.Done():
			return
		case <-time.After(time.Until(p.start.Add(time.Duration(i) * PingInterval))):
		}
		_, _ = conn.Write(p.echoRequest(i))
	}
}

// echoRequest returns echo request i. The kernel adds the checksum of ICMPv6.
func (p *pings) echoRequest(i int) []byte {
	message := make([]byte, pingSize)
	message[0] = echo6
	if p.is4 {
		message[0] = echo4
	}
	binary.BigEndian.PutUint16(message[4:], uint16(p.mark))
	binary.BigEndian.PutUint16(message[6:], uint16(i))
	payload := message[icmpHeader:]
	binary.BigEndian.PutUint64(payload, p.mark)
	binary.BigEndian.PutUint32(payload[headerSize:], uint32(i))
	binary.BigEndian.PutUint64(payload[headerSize+4:], uint64(time.Since(p.start)))
	if p.is4 {
		binary.BigEndian.PutUint16(message[2:], checksum(message))
	}
	return message
}

// checksum returns the Internet checksum (RFC 1071) of a message.
func checksum(message []byte) uint16 {
	var sum uint32
	for i := 0; i+1 < len(message); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(message[i:]))
	}
	for sum>>16 != 0 {
		sum = sum&0xffff + sum>>16
	}
	return ^uint16(sum)
}

// isReply reports whether a message answers a request of this ping.
func (p *pings) isReply(message []byte) bool {
	want := byte(reply6)
	if p.is4 {
		want = reply4
	}
	return len(message) >= pingHeader && message[0] == want && binary.BigEndian.Uint64(message[icmpHeader:]) == p.mark
}

// receiveReplies reads until every request has a reply or has timed out. It ignores network errors, such as an unreachable host.
func (p *pings) receiveReplies(conn *net.IPConn) {
	buffer := make([]byte, maxDatagram)
	_ = conn.SetReadDeadline(p.start.Add(time.Duration(len(p.samples))*PingInterval + p.patience))
	for missing := len(p.samples); missing > 0; {
		n, _, err := conn.ReadFrom(buffer) // ReadFrom removes the IPv4 header; Read does not
		if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil || !p.isReply(buffer[:n]) {
			continue
		}
		payload := buffer[icmpHeader:]
		i := binary.BigEndian.Uint32(payload[headerSize:])
		took := time.Since(p.start) - time.Duration(binary.BigEndian.Uint64(payload[headerSize+4:]))
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
	// A percentile by the nearest-rank method.
	at := func(percent int) time.Duration { return sorted[(len(sorted)*percent+99)/100-1] }
	r.P50, r.P95, r.P99 = at(50), at(95), at(99)
	return r
}
