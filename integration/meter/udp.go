// SPDX-License-Identifier: Apache-2.0

package meter

import (
	"context"
	"encoding/binary"
	"math/rand/v2"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"
)

const (
	headerSize  = 8 // the mark of the flow
	maxDatagram = 65000
	udpBuffer   = 4 << 20
	// udpTick is the interval at which the sender wakes up and sends the datagrams that are due.
	udpTick = time.Millisecond
)

func runUDP(ctx context.Context, cancel context.CancelFunc, flow Flow) (Result, error) {
	receiver, err := listenUDP(flow)
	if err != nil {
		return Result{}, err
	}
	defer receiver.Close()
	sender, err := dialUDP(flow, flow.target(addrPort(receiver.LocalAddr())))
	if err != nil {
		return Result{}, err
	}
	defer sender.Close()

	var sent atomic.Uint64
	counts := newTally(flow.Duration)
	mark := rand.Uint64()
	var sending sync.WaitGroup // until the ports are free again too
	sending.Go(func() {
		<-ctx.Done()
		closeAll([]*net.UDPConn{sender, receiver})
	})
	paused := watchPauses()
	sending.Go(func() { sendUDP(ctx, sender, flow, mark, &sent) })
	receiveUDP(receiver, counts, mark, flow.Patience)
	pause := paused()
	stopped := context.Cause(ctx)
	cancel()
	sending.Wait()
	wire := perPacket(ethernetHeader + ipHeader(is4(flow)) + udpHeader)
	result, err := finish(counts, wire, &sent, stopped)
	result.Arrivals, result.Paused = counts.arrivalList(wire), pause
	return result, err
}

func listenUDP(flow Flow) (conn *net.UDPConn, err error) {
	err = flow.To(func() (err error) {
		conn, err = net.ListenUDP(networkName(UDP, flow.Listen), net.UDPAddrFromAddrPort(flow.Listen))
		return err
	})
	if err != nil {
		return nil, err
	}
	_ = conn.SetReadBuffer(udpBuffer) // the kernel may allow less
	return conn, nil
}

func dialUDP(flow Flow, target netip.AddrPort) (conn *net.UDPConn, err error) {
	err = flow.From(func() (err error) {
		conn, err = net.DialUDP(networkName(UDP, target), nil, net.UDPAddrFromAddrPort(target))
		return err
	})
	return conn, err
}

// sendUDP sends datagrams at the flow's rate until ctx is done. It ignores send errors, because only received datagrams count.
func sendUDP(ctx context.Context, conn *net.UDPConn, flow Flow, mark uint64, sent *atomic.Uint64) {
	packet := make([]byte, flow.Size)
	binary.BigEndian.PutUint64(packet, mark)
	tick := time.NewTicker(udpTick)
	defer tick.Stop()
	start, offered := time.Now(), 0.0
	for ctx.Err() == nil {
		due := flow.Rate / 8 * time.Since(start).Seconds()
		for ctx.Err() == nil && (flow.Rate == 0 || offered < due) {
			n, _ := conn.Write(packet)
			sent.Add(uint64(n))
			offered += float64(len(packet))
		}
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
}

// receiveUDP counts the datagrams with the flow's mark, and ignores those of earlier flows.
func receiveUDP(conn *net.UDPConn, counts *tally, mark uint64, patience time.Duration) {
	buffer := make([]byte, maxDatagram)
	deadline := time.Now().Add(patience)
	_ = conn.SetReadDeadline(deadline)
	for {
		n, err := conn.Read(buffer)
		if err != nil {
			return
		}
		if n < headerSize || binary.BigEndian.Uint64(buffer) != mark {
			continue
		}
		end, open := counts.addBytes(time.Now(), n)
		if !open {
			return
		}
		if end != deadline {
			deadline = end
			_ = conn.SetReadDeadline(deadline)
		}
	}
}
