// SPDX-License-Identifier: Apache-2.0

package demo

import (
	"bytes"
	"context"
	"encoding/binary"
	"fmt"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/podlace/podlace/pkg/meter"
)

const (
	pingSpacing = 10 * time.Millisecond

	icmpHeader = 8
	echo4      = 8
	echo6      = 128
	reply4     = 0
	reply6     = 129
)

// A pingResult counts echoes.
type pingResult struct {
	sent, received int
	fastest        time.Duration
}

// ping sends n ICMP echoes from a place, one after the other. It needs a raw
// socket, which the owner of the namespace may have.
func ping(ctx context.Context, from meter.Place, target netip.Addr, n int) (pingResult, error) {
	network := "ip6:ipv6-icmp"
	if target.Is4() {
		network = "ip4:icmp"
	}
	var conn *net.IPConn
	err := from(func() (err error) {
		conn, err = net.DialIP(network, nil, &net.IPAddr{IP: target.AsSlice()})
		return err
	})
	if err != nil {
		return pingResult{}, err
	}
	defer conn.Close()
	var r pingResult
	for seq := range n {
		r.sent++
		if took, err := echo(conn, target.Is4(), uint16(seq)); err == nil {
			r.received++
			if r.fastest == 0 || took < r.fastest {
				r.fastest = took
			}
		}
		select {
		case <-ctx.Done():
			return r, ctx.Err()
		case <-time.After(pingSpacing):
		}
	}
	return r, nil
}

func echo(conn *net.IPConn, is4 bool, seq uint16) (time.Duration, error) {
	start := time.Now()
	request := echoRequest(is4, uint16(os.Getpid()), seq)
	if err := conn.SetDeadline(start.Add(patience)); err != nil {
		return 0, err
	}
	if _, err := conn.Write(request); err != nil {
		return 0, err
	}
	reply := make([]byte, 256)
	for {
		// ReadFrom takes the IPv4 header off, Read does not.
		n, _, err := conn.ReadFrom(reply)
		if err != nil {
			return 0, fmt.Errorf("echo %d: %w", seq, err)
		}
		if isReply(request, reply[:n], is4) {
			return time.Since(start), nil
		}
	}
}

func echoRequest(is4 bool, id, seq uint16) []byte {
	message := make([]byte, 64)
	message[0] = echo6
	if is4 {
		message[0] = echo4
	}
	binary.BigEndian.PutUint16(message[4:], id)
	binary.BigEndian.PutUint16(message[6:], seq)
	if is4 { // the kernel does it for ICMPv6
		binary.BigEndian.PutUint16(message[2:], checksum(message))
	}
	return message
}

func isReply(request, reply []byte, is4 bool) bool {
	want := byte(reply6)
	if is4 {
		want = reply4
	}
	return len(reply) >= icmpHeader && reply[0] == want && bytes.Equal(reply[4:icmpHeader], request[4:icmpHeader])
}

// checksum is that of RFC 1071.
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
