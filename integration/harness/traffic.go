// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// ServeClientAddress starts a TCP server in a pod that sends each client its own address.
func ServeClientAddress(pod *sandbox.Pod, port int) (net.Listener, error) {
	var l net.Listener
	err := Networked(pod, func() (err error) {
		l, err = net.Listen("tcp", fmt.Sprintf("[::]:%d", port))
		return err
	})
	if err != nil {
		return nil, err
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			client, _, _ := net.SplitHostPort(c.RemoteAddr().String())
			_, _ = fmt.Fprint(c, client)
			_ = c.Close()
		}
	}()
	return l, nil
}

// TrafficLimit is how long a connection that should succeed may take. On a busy machine, a new pod's first packets may be lost, and each
// retransmission waits twice as long as the one before.
const TrafficLimit = 30 * time.Second

// Patience returns the timeout of a test connection, which is shorter if it should be blocked.
func Patience(blocked bool) time.Duration {
	if blocked {
		return time.Second / 2
	}
	return TrafficLimit
}

// Networked calls f, which may use package net, in the namespace of a pod or the host. Package net finds the address families only once, by
// a bind to ::1, so this happens on the host first: in a pod whose lo is down, it would find no IPv6.
func Networked(pod *sandbox.Pod, f func() error) error {
	if l, err := net.Listen("tcp", "[::1]:0"); err == nil {
		_ = l.Close()
	}
	return Enter(pod, f)
}

// Serve starts a TCP server in a pod that sends the pod's name.
func Serve(pod *sandbox.Pod, port int) (io.Closer, error) {
	var l net.Listener
	err := Networked(pod, func() error {
		var err error
		l, err = net.Listen("tcp", fmt.Sprintf("[::]:%d", port))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("listen in %s: %w", pod.Name, err)
	}
	go speakTCP(l, pod.Name)
	return l, nil
}

// A Speaker is a TCP and UDP server at one address.
type Speaker struct {
	tcp net.Listener
	udp net.PacketConn
}

// Speak starts a server at an address of a machine, or of the node if it is nil. It answers connections and datagrams of Ask with the
// machine's name.
func Speak(on *sandbox.Pod, address string) (*Speaker, error) {
	s := &Speaker{}
	err := Networked(on, func() (err error) {
		if s.tcp, err = net.Listen("tcp", address); err == nil {
			s.udp, err = net.ListenPacket("udp", address)
		}
		return err
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("%s: %w", NameOf(on), err), s.Close())
	}
	go speakTCP(s.tcp, NameOf(on))
	go speakUDP(s.udp, NameOf(on))
	return s, nil
}

// Close stops the server.
func (s *Speaker) Close() (err error) {
	if s.tcp != nil {
		err = s.tcp.Close()
	}
	if s.udp != nil {
		err = errors.Join(err, s.udp.Close())
	}
	return err
}

func speakTCP(l net.Listener, as string) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		_, _ = io.WriteString(c, as)
		_ = c.Close()
	}
}

// speakUDP answers each datagram that ends with "?" by the server's name and the datagram, and ignores others.
func speakUDP(c net.PacketConn, as string) {
	b := make([]byte, 1500)
	for {
		n, client, err := c.ReadFrom(b)
		if err != nil {
			return
		}
		if bytes.HasSuffix(b[:n], []byte("?")) {
			_, _ = c.WriteTo(append([]byte(as+" "), b[:n]...), client)
		}
	}
}

// Ask returns the name of the machine that answers over TCP or UDP. It asks again from another port every three seconds, because a busy
// machine may lose a packet.
func Ask(from *sandbox.Pod, protocol, address string, limit time.Duration) (name string, err error) {
	const pause = 100 * time.Millisecond
	for end := time.Now().Add(limit); ; time.Sleep(pause) {
		name, err = askOnce(from, protocol, address, min(3*time.Second, time.Until(end)))
		if err == nil || time.Until(end) <= pause {
			return name, err
		}
	}
}

func askOnce(from *sandbox.Pod, protocol, address string, limit time.Duration) (string, error) {
	if protocol == "tcp" {
		return Dial(from, address, limit)
	}
	var c net.Conn
	err := Networked(from, func() (err error) { c, err = net.Dial("udp", address); return err })
	if err != nil {
		return "", err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(limit))
	if _, err := c.Write([]byte("?")); err != nil {
		return "", err
	}
	b := make([]byte, 1500)
	n, err := c.Read(b)
	return strings.TrimSuffix(string(b[:n]), " ?"), err
}

// Dial connects from a pod or from the host, and returns what the server sends.
func Dial(from *sandbox.Pod, address string, limit time.Duration) (string, error) {
	var c net.Conn
	err := Networked(from, func() error {
		var err error
		c, err = net.DialTimeout("tcp", address, limit)
		return err
	})
	if err != nil {
		return "", err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(limit))
	b, err := io.ReadAll(c)
	return string(b), err
}

// Reach fails the test if the pod does not answer at the address.
func Reach(t testing.TB, from *sandbox.Pod, address string, pod *sandbox.Pod) {
	t.Helper()
	got, err := Dial(from, address, TrafficLimit)
	if err != nil || got != pod.Name {
		t.Errorf("%s -> %s: %q, %v; want %q", NameOf(from), address, got, err, pod.Name)
	}
}

// NameOf returns the name of a pod, or "host" for nil.
func NameOf(pod *sandbox.Pod) string {
	if pod == nil {
		return "host"
	}
	return pod.Name
}

// Ping sends an ICMP echo request each second from a pod or the host, until there is a reply.
func Ping(from *sandbox.Pod, address string, limit time.Duration) error {
	to, err := netip.ParseAddr(address)
	if err != nil {
		return err
	}
	network, request, answer := "ip4:icmp", byte(8), byte(0)
	if to.Is6() {
		network, request, answer = "ip6:ipv6-icmp", 128, 129
	}
	var c *net.IPConn
	if err := Networked(from, func() error {
		c, err = net.DialIP(network, nil, &net.IPAddr{IP: to.AsSlice()})
		return err
	}); err != nil {
		return err
	}
	defer c.Close()
	for end := time.Now().Add(limit); ; {
		if _, err := c.Write(echoMessage(request)); err != nil {
			return err
		}
		_ = c.SetReadDeadline(time.Now().Add(min(time.Second, time.Until(end))))
		if err := awaitEcho(c, answer); !errors.Is(err, os.ErrDeadlineExceeded) || time.Now().After(end) {
			return err
		}
	}
}

// echoMessage returns an ICMP echo message. The kernel sets the checksum of ICMPv6.
func echoMessage(kind byte) []byte {
	m := []byte{kind, 0, 0, 0, 0x70, 0x6c, 0, 1}
	sum := uint32(0)
	for i := 0; i < len(m); i += 2 {
		sum += uint32(binary.BigEndian.Uint16(m[i:]))
	}
	sum = sum>>16 + sum&0xffff
	binary.BigEndian.PutUint16(m[2:], ^uint16(sum))
	return m
}

func awaitEcho(c *net.IPConn, answer byte) error {
	b := make([]byte, 1500)
	for {
		n, _, err := c.ReadFrom(b) // ReadFrom removes the IP header, Read does not
		if err != nil {
			return err
		}
		if n > 0 && b[0] == answer {
			return nil
		}
	}
}
