// SPDX-License-Identifier: Apache-2.0

package meter

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// tcpBuffer is the size of one read or write in bytes, at which system calls cost little even at tens of Gbit/s.
const tcpBuffer = 256 << 10

func runTCP(ctx context.Context, cancel context.CancelFunc, flow Flow) (Result, error) {
	listener, err := listenTCP(ctx, flow)
	if err != nil {
		return Result{}, err
	}
	defer listener.Close()
	senders, err := dialTCP(ctx, flow, flow.target(addrPort(listener.Addr())))
	defer closeAll(senders)
	if err != nil {
		return Result{}, err
	}
	receivers, err := acceptTCP(listener, len(senders), flow.Patience)
	defer closeAll(receivers)
	if err != nil {
		return Result{}, err
	}

	var sent atomic.Uint64
	counts := newTally(flow.Duration)
	stop := context.AfterFunc(ctx, func() {
		closeAll(senders)
		closeAll(receivers)
	})
	defer stop()
	var sending, receiving, watching sync.WaitGroup
	var seen []segmentCount
	paused := watchPauses()
	watching.Go(func() { seen = sampleSegments(ctx, receivers, counts) })
	for i := range senders {
		sending.Go(func() { sendTCP(senders[i], &sent) })
		receiving.Go(func() { receiveTCP(receivers[i], counts, flow.Patience) })
	}
	receiving.Wait()
	pause := paused()
	stopped := context.Cause(ctx)
	if counts.isEmpty() {
		cancel()
	}
	watching.Wait()
	segment := segmentSize(senders[0]) // read late, because it grows with the window on links with a large MTU
	cancel()
	sending.Wait()
	header := ethernetHeader + ipHeader(is4(flow)) + tcpHeader
	result, err := finish(counts, perSegment(segment, header), &sent, stopped)
	result.Paused = pause
	for _, s := range seen {
		result.Arrivals = append(result.Arrivals, Arrival{At: s.at, Wire: float64(s.received) * float64(segment+header)})
	}
	return result, err
}

func listenTCP(ctx context.Context, flow Flow) (listener *net.TCPListener, err error) {
	var config net.ListenConfig
	config.SetMultipathTCP(false)
	err = flow.To(func() error {
		l, err := config.Listen(ctx, networkName(TCP, flow.Listen), flow.Listen.String())
		if err == nil {
			listener = l.(*net.TCPListener)
		}
		return err
	})
	return listener, err
}

func dialTCP(ctx context.Context, flow Flow, target netip.AddrPort) (conns []*net.TCPConn, err error) {
	dialer := net.Dialer{Timeout: flow.Patience, Control: flow.setControl}
	dialer.SetMultipathTCP(false)
	err = flow.From(func() error {
		for range flow.Streams {
			conn, err := dialer.DialContext(ctx, networkName(TCP, target), target.String())
			if err != nil {
				return err
			}
			tcp := conn.(*net.TCPConn)
			// With SO_LINGER 0, Close discards the send buffer, whose data would disturb the next flow.
			_ = tcp.SetLinger(0)
			conns = append(conns, tcp)
		}
		return nil
	})
	return conns, err
}

func (f Flow) setControl(_, _ string, conn syscall.RawConn) (err error) {
	if f.Control == "" {
		return nil
	}
	controlled := conn.Control(func(fd uintptr) {
		err = syscall.SetsockoptString(int(fd), syscall.IPPROTO_TCP, syscall.TCP_CONGESTION, f.Control)
	})
	return cmp.Or(controlled, err)
}

func acceptTCP(listener *net.TCPListener, n int, patience time.Duration) (conns []*net.TCPConn, err error) {
	if err := listener.SetDeadline(time.Now().Add(patience)); err != nil {
		return nil, err
	}
	for range n {
		conn, err := listener.AcceptTCP()
		if err != nil {
			return conns, err
		}
		conns = append(conns, conn)
	}
	return conns, nil
}

func sendTCP(conn *net.TCPConn, sent *atomic.Uint64) {
	buffer := make([]byte, tcpBuffer)
	for {
		n, err := conn.Write(buffer)
		sent.Add(uint64(n))
		if err != nil {
			return
		}
	}
}

func receiveTCP(conn *net.TCPConn, counts *tally, patience time.Duration) {
	buffer := make([]byte, tcpBuffer)
	deadline := time.Now().Add(patience)
	_ = conn.SetReadDeadline(deadline)
	for {
		n, err := conn.Read(buffer)
		if err != nil {
			return
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

// segmentSize returns the number of payload bytes of a full segment (TCP_MAXSEG).
func segmentSize(conn *net.TCPConn) int {
	const ethernetMTU = 1500
	size := ethernetMTU - ipv4Header - tcpHeader
	raw, err := conn.SyscallConn()
	if err != nil {
		return size
	}
	_ = raw.Control(func(fd uintptr) {
		if n, err := syscall.GetsockoptInt(int(fd), syscall.IPPROTO_TCP, syscall.TCP_MAXSEG); err == nil && n > 0 {
			size = n
		}
	})
	return size
}

func finish(counts *tally, wire wireBytes, sent *atomic.Uint64, stopped error) (Result, error) {
	if stopped != nil {
		return Result{}, stopped
	}
	if counts.isEmpty() {
		return Result{}, fmt.Errorf("%w (%d bytes sent)", ErrSilent, sent.Load())
	}
	result := counts.result(wire)
	result.Sent = sent.Load()
	return result, nil
}

func closeAll[C interface{ Close() error }](conns []C) {
	for _, c := range conns {
		_ = c.Close()
	}
}

func addrPort(addr net.Addr) netip.AddrPort {
	switch a := addr.(type) {
	case *net.TCPAddr:
		return unmap(a.AddrPort())
	case *net.UDPAddr:
		return unmap(a.AddrPort())
	}
	return netip.AddrPort{}
}

func unmap(a netip.AddrPort) netip.AddrPort {
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port())
}

// networkName returns a network for package net with the address family, such as "tcp4". Without it, package net would check only once
// whether IPv6 works, and use that answer in all namespaces.
func networkName(p Protocol, addr netip.AddrPort) string {
	if addr.Addr().Unmap().Is4() {
		return string(p) + "4"
	}
	return string(p) + "6"
}

func is4(flow Flow) bool { return flow.Listen.Addr().Unmap().Is4() }
