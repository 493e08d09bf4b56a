// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"time"

	"github.com/podlace/podlace/pkg/cli/sandbox"
)

const (
	podPort  = 8080            // of the server in the canary's pod
	patience = 5 * time.Second // for an answer; long enough for a slow machine

	sendRequest    = 's' // the server sends the payload
	receiveRequest = 'r' // the server reads up to the end of the stream, and then answers with one byte

	payloadTime = 500 * time.Millisecond // that the payload takes at the limit
	mostOfLimit = 1.25                   // permitted rate, as a part of the limit
)

// serve starts a TCP server in the canary's pod, with a socket for each family, because package net checks only once, in the first
// namespace, whether one socket can serve both.
func serve(pod *sandbox.Pod) (stop func(), err error) {
	var listeners []net.Listener
	err = pod.Do(func() error {
		for _, network := range []string{"tcp4", "tcp6"} {
			l, err := net.Listen(network, fmt.Sprintf(":%d", podPort))
			if err != nil && network == "tcp4" {
				return err
			}
			if err == nil { // without IPv6 in the kernel there is no such socket
				listeners = append(listeners, l)
			}
		}
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("start a server in the pod: %w", err)
	}
	for _, l := range listeners {
		go func() {
			for conn, err := l.Accept(); err == nil; conn, err = l.Accept() {
				go answer(conn)
			}
		}()
	}
	return func() {
		for _, l := range listeners {
			_ = l.Close()
		}
	}, nil
}

func payload() []byte { return make([]byte, int(canaryLimit/8*payloadTime.Seconds())) }

func answer(conn net.Conn) {
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(2 * patience))
	request := make([]byte, 1)
	if _, err := io.ReadFull(conn, request); err != nil {
		return
	}
	if request[0] == sendRequest {
		_, _ = conn.Write(payload())
		return
	}
	if _, err := io.Copy(io.Discard, conn); err == nil {
		_, _ = conn.Write(request)
	}
}

// transfer sends a request with data to the server, and returns the number of bytes in its answer.
func transfer(ctx context.Context, target netip.AddrPort, request byte, data []byte) (int64, error) {
	conn, err := (&net.Dialer{Timeout: patience}).DialContext(ctx, "tcp", target.String())
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	if err := conn.SetDeadline(time.Now().Add(2 * patience)); err != nil {
		return 0, err
	}
	if _, err := conn.Write(append([]byte{request}, data...)); err != nil {
		return 0, err
	}
	if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
		return 0, err
	}
	return io.Copy(io.Discard, conn)
}

// ask returns an error if the server does not answer.
func ask(ctx context.Context, target netip.AddrPort) error {
	answered, err := transfer(ctx, target, receiveRequest, nil)
	if err == nil && answered == 0 {
		err = errors.New("the server in the pod did not answer")
	}
	return err
}

// tryLimit returns an error if data flows into or out of the pod faster than the limit, in bits per second.
func tryLimit(ctx context.Context, target netip.AddrPort, limit uint64) error {
	for direction, data := range map[string][]byte{"into": payload(), "out of": nil} {
		request := map[bool]byte{true: sendRequest, false: receiveRequest}[data == nil]
		began := time.Now()
		answered, err := transfer(ctx, target, request, data)
		took := time.Since(began)
		if err != nil {
			return fmt.Errorf("a transfer %s the pod at the limit: %w", direction, err)
		}
		sent := max(answered, int64(len(data)))
		if rate := float64(8*sent) / took.Seconds(); rate > mostOfLimit*float64(limit) {
			return fmt.Errorf("the limit of %d Mbit/s does not hold: %d kB went %s the pod in %d ms", limit/1e6, sent/1000, direction,
				took.Milliseconds())
		}
	}
	return nil
}

// freePort returns a TCP port that no program of the node uses.
func freePort() (int, error) {
	l, err := net.Listen("tcp4", ":0")
	if err != nil {
		return 0, err
	}
	defer l.Close()
	return l.Addr().(*net.TCPAddr).Port, nil
}

// nodeAddress returns the address, of the pod's family, with which the node reaches other networks, or 127.0.0.1 without such a route.
func nodeAddress(pod netip.Addr) (netip.Addr, error) {
	outside := "[2001:db8::1]:9"
	if pod.Is4() {
		outside = "192.0.2.1:9"
	}
	conn, err := net.Dial("udp", outside) // sends nothing
	if err == nil {
		defer conn.Close()
		return conn.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap(), nil
	}
	if pod.Is4() {
		return netip.AddrFrom4([4]byte{127, 0, 0, 1}), nil
	}
	return netip.Addr{}, fmt.Errorf("the node has no IPv6 route to other networks: %w", err)
}
