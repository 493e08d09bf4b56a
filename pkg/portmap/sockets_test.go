// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/ports"
)

// openListener opens a listening socket, for example with "tcp4" and "127.0.0.1:8080".
func openListener(t testing.TB, network, address string, options ...int) {
	t.Helper()
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		return c.Control(func(fd uintptr) {
			for _, option := range options {
				kerneltest.Must(t, unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, option, 1))
			}
		})
	}}
	if strings.HasPrefix(network, "tcp") {
		l, err := config.Listen(context.Background(), network, address)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		return
	}
	l, err := config.ListenPacket(context.Background(), network, address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
}

func used(t testing.TB, ports ...string) string {
	t.Helper()
	list, err := listeningPorts(portList(ports...))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, p := range list {
		names = append(names, p.String()+">"+p.To.Addr().String())
	}
	return strings.Join(names, " ")
}

// listeningPorts finds listening sockets of both families whose port a hostPort would take (F-40, S-27).
func TestListening(t *testing.T) {
	newNode(t, "10.1.0.1/24", "fd00::1/64")
	for i, x := range []struct {
		network, address string
		options          []int
		ports            []string // PORT stands for the port number
		want             string
	}{
		{"tcp4", "0.0.0.0:PORT", nil, []string{"tcp PORT 10.1.0.5:80", "tcp PORT [fd00::5]:80", "udp PORT 10.1.0.5:80"}, "tcp PORT>10.1.0.5"},
		{"tcp6", "[::]:PORT", nil, []string{"tcp PORT 10.1.0.5:80", "tcp PORT [fd00::5]:80"}, "tcp PORT>fd00::5"},
		{"tcp", ":PORT", nil, []string{"tcp PORT 10.1.0.5:80", "tcp PORT [fd00::5]:80"}, "tcp PORT>10.1.0.5 tcp PORT>fd00::5"},
		{"tcp", ":PORT", nil, []string{"tcp 10.1.0.1:PORT 10.1.0.5:80", "tcp [fd00::1]:PORT [fd00::5]:80"},
			"tcp 10.1.0.1:PORT>10.1.0.5 tcp [fd00::1]:PORT>fd00::5"},
		{"tcp4", "127.0.0.1:PORT", nil, []string{"tcp PORT 10.1.0.5:80", "tcp 10.1.0.1:PORT 10.1.0.5:80", "tcp 127.0.0.1:PORT 10.1.0.5:80"},
			"tcp PORT>10.1.0.5 tcp 127.0.0.1:PORT>10.1.0.5"},
		{"tcp6", "[fd00::1]:PORT", nil, []string{"tcp PORT [fd00::5]:80", "tcp [fd00::2]:PORT [fd00::5]:80", "tcp [fd00::1]:PORT [fd00::5]:80"},
			"tcp PORT>fd00::5 tcp [fd00::1]:PORT>fd00::5"},
		{"tcp4", "10.1.0.1:PORT", []int{unix.SO_REUSEPORT}, []string{"tcp PORT 10.1.0.5:80"}, "tcp PORT>10.1.0.5"},
		// The node does not have these hostIPs yet.
		{"tcp4", "0.0.0.0:PORT", nil, []string{"tcp 192.0.2.77:PORT 10.1.0.5:80"}, "tcp 192.0.2.77:PORT>10.1.0.5"},
		{"tcp6", "[::]:PORT", nil, []string{"tcp [fd77::1]:PORT [fd00::5]:80"}, "tcp [fd77::1]:PORT>fd00::5"},
		{"tcp4", "10.1.0.1:PORT", nil, []string{"tcp 192.0.2.77:PORT 10.1.0.5:80"}, ""},
		{"udp4", "0.0.0.0:PORT", nil, []string{"udp PORT 10.1.0.5:80", "udp PORT [fd00::5]:80", "tcp PORT 10.1.0.5:80"}, "udp PORT>10.1.0.5"},
		{"udp", ":PORT", nil, []string{"udp PORT 10.1.0.5:80", "udp PORT [fd00::5]:80"}, "udp PORT>10.1.0.5 udp PORT>fd00::5"},
		{"udp4", "127.0.0.1:PORT", []int{unix.SO_REUSEADDR}, []string{"udp PORT 10.1.0.5:80", "udp 10.1.0.1:PORT 10.1.0.5:80"},
			"udp PORT>10.1.0.5"},
		{"udp6", "[::1]:PORT", []int{unix.SO_REUSEPORT}, []string{"udp PORT [fd00::5]:80", "udp [fd00::1]:PORT [fd00::5]:80"},
			"udp PORT>fd00::5"},
		{"tcp4", "0.0.0.0:PORT", nil, []string{"sctp PORT 10.1.0.5:80"}, ""},
		{"tcp4", "0.0.0.0:1PORT", nil, []string{"tcp PORT 10.1.0.5:80"}, ""},
	} {
		port := func(s string) string { return strings.ReplaceAll(s, "PORT", fmt.Sprint(2000+i)) }
		t.Run(port(x.network+" "+x.address), func(t *testing.T) {
			for j := range x.ports {
				x.ports[j] = port(x.ports[j])
			}
			if got := used(t, x.ports...); got != "" {
				t.Errorf("before: %s", got)
			}
			openListener(t, x.network, port(x.address), x.options...)
			if diff := cmp.Diff(port(x.want), used(t, x.ports...)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// openConnection opens a connection from a port of the node. With closed, the node's side then closes it and stays in TIME_WAIT.
func openConnection(t *testing.T, network, from, to string, closed bool) {
	t.Helper()
	dialer := net.Dialer{Timeout: time.Minute}
	if strings.HasPrefix(network, "tcp") {
		dialer.LocalAddr = net.TCPAddrFromAddrPort(netip.MustParseAddrPort(from))
	} else {
		dialer.LocalAddr = net.UDPAddrFromAddrPort(netip.MustParseAddrPort(from))
	}
	c, err := dialer.Dial(network, to)
	if err != nil {
		t.Fatal(err)
	}
	if closed {
		c.Close()
		return
	}
	t.Cleanup(func() { c.Close() })
}

// listeningPorts ignores a port that only an open connection or one in TIME_WAIT uses.
func TestListeningLeftOver(t *testing.T) {
	newNode(t, "10.1.0.1/24", "fd00::1/64")
	openListener(t, "tcp", ":2100")
	openListener(t, "udp", ":2100")
	for i, x := range []struct {
		network, address string
		closed           bool
	}{
		{"tcp4", "127.0.0.1", false}, {"tcp4", "127.0.0.1", true}, {"tcp6", "[::1]", false}, {"tcp6", "[::1]", true},
		{"udp4", "127.0.0.1", false}, {"udp6", "[::1]", false},
	} {
		port := 2200 + i
		openConnection(t, x.network, fmt.Sprintf("%s:%d", x.address, port), x.address+":2100", x.closed)
		protocol := x.network[:3]
		if got := used(t, fmt.Sprintf("%s %d 10.1.0.5:80", protocol, port), fmt.Sprintf("%s %d [fd00::5]:80", protocol, port)); got != "" {
			t.Errorf("%+v: %s", x, got)
		}
	}
	// A server has ended with one client still connected and another just gone; a second server listens on another address.
	l, err := net.Listen("tcp4", "127.0.0.1:2300")
	if err != nil {
		t.Fatal(err)
	}
	for range 2 {
		c, err := net.Dial("tcp4", "127.0.0.1:2300")
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
	}
	accepted, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	accepted.Close()
	l.Close()
	openListener(t, "tcp4", "10.1.0.1:2300")
	if got := used(t, "tcp 127.0.0.1:2300 10.1.0.5:80"); got != "" {
		t.Error(got)
	}
}

// Among any number of ports, listeningPorts quickly finds the only listening socket.
func TestListeningMany(t *testing.T) {
	newNode(t, "10.1.0.1/24", "fd00::1/64")
	openListener(t, "tcp", ":3150")
	openListener(t, "udp4", "127.0.0.1:3007")
	took := map[uint16]time.Duration{}
	for _, n := range []uint16{manyPorts / 2, 200} {
		var list []ports.Port
		for i := range n {
			for _, to := range []string{"10.1.0.5:80", "[fd00::5]:80"} {
				list = append(list, ports.Port{Protocol: []string{"tcp", "udp"}[i%2], Port: 3000 + i, To: netip.MustParseAddrPort(to)})
			}
		}
		want := "[udp 3007]"
		if n == 200 {
			want = "[udp 3007 tcp 3150 tcp 3150]"
		}
		best := time.Hour
		for range 20 {
			start := time.Now()
			used, err := listeningPorts(list)
			best = min(best, time.Since(start))
			if got := fmt.Sprint(used); err != nil || got != want {
				t.Fatalf("%s, %v, want %s", got, err, want)
			}
		}
		took[n] = best
	}
	if took[200] > 5*took[manyPorts/2] {
		t.Errorf("%d and 200 ports: took %v", manyPorts/2, took)
	}
}
