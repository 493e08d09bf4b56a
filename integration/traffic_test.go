// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/sandbox"
)

// trafficLimit bounds a connection that should come about. The first packet of a
// fresh pod may have to wait for one resend.
const trafficLimit = 3 * time.Second

// patience is how long to wait for traffic that should, or should not, get through.
func patience(blocked bool) time.Duration {
	if blocked {
		return time.Second / 2
	}
	return trafficLimit
}

// networked calls f in the namespace of a pod, or of the host, where it may use
// package net. That package finds out once which families work, by binding to
// ::1, and would find none if it did so in a pod whose lo is down.
func networked(pod *sandbox.Pod, f func() error) error {
	if l, err := net.Listen("tcp", "[::1]:0"); err == nil {
		_ = l.Close()
	}
	return enter(pod, f)
}

// serve answers every TCP connection to a port of a pod with the pod's name.
func serve(pod *sandbox.Pod, port int) (io.Closer, error) {
	var l net.Listener
	err := networked(pod, func() error {
		var err error
		l, err = net.Listen("tcp", fmt.Sprintf("[::]:%d", port))
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("listen in %s: %w", pod.Name, err)
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, pod.Name)
			_ = c.Close()
		}
	}()
	return l, nil
}

// dial connects from a pod, or from the host, and returns what the server says.
func dial(from *sandbox.Pod, address string, limit time.Duration) (string, error) {
	var c net.Conn
	err := networked(from, func() error {
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

// reach fails the test unless the pod answers at the address.
func reach(t testing.TB, from *sandbox.Pod, address string, pod *sandbox.Pod) {
	t.Helper()
	got, err := dial(from, address, trafficLimit)
	if err != nil || got != pod.Name {
		t.Errorf("%s -> %s: %q, %v; want %q", name(from), address, got, err, pod.Name)
	}
}

func name(pod *sandbox.Pod) string {
	if pod == nil {
		return "host"
	}
	return pod.Name
}

// ping sends one echo request from a pod, or from the host, and waits for the answer.
func ping(from *sandbox.Pod, address string, limit time.Duration) error {
	to, err := netip.ParseAddr(address)
	if err != nil {
		return err
	}
	network, request, answer := "ip4:icmp", byte(8), byte(0)
	if to.Is6() {
		network, request, answer = "ip6:ipv6-icmp", 128, 129
	}
	var c *net.IPConn
	if err := networked(from, func() error {
		c, err = net.DialIP(network, nil, &net.IPAddr{IP: to.AsSlice()})
		return err
	}); err != nil {
		return err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(limit))
	if _, err := c.Write(echo(request)); err != nil {
		return err
	}
	return awaitEcho(c, answer)
}

// echo is an ICMP message of the given type; the kernel fills in the checksum of version 6.
func echo(kind byte) []byte {
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
		n, _, err := c.ReadFrom(b) // unlike Read it removes the IP header
		if err != nil {
			return err
		}
		if n > 0 && b[0] == answer {
			return nil
		}
	}
}

// frameType is an EtherType that is set aside for experiments (IEEE 802).
const frameType = 0x88b5

// frame sends an Ethernet broadcast from one pod and waits for it in another,
// which needs a working link and no address at all.
func frame(from, to *sandbox.Pod, ifname string, limit time.Duration) error {
	var receiver, sender int
	if err := to.Do(func() (err error) { receiver, err = packetSocket(ifname); return }); err != nil {
		return fmt.Errorf("%s: %w", to.Name, err)
	}
	defer unix.Close(receiver)
	if err := from.Do(func() (err error) { sender, err = packetSocket(ifname); return }); err != nil {
		return fmt.Errorf("%s: %w", from.Name, err)
	}
	defer unix.Close(sender)
	wait := unix.NsecToTimeval(int64(limit))
	if err := unix.SetsockoptTimeval(receiver, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &wait); err != nil {
		return err
	}
	message := append([]byte("\xff\xff\xff\xff\xff\xff\x02\x00\x00\x00\x00\x01\x88\xb5"), from.Name...)
	if _, err := unix.Write(sender, message); err != nil {
		return fmt.Errorf("send: %w", err)
	}
	b := make([]byte, 1500)
	n, err := unix.Read(receiver, b)
	if err != nil {
		return fmt.Errorf("receive: %w", err)
	}
	if !strings.Contains(string(b[:n]), from.Name) {
		return errors.New("another frame arrived")
	}
	return nil
}

func packetSocket(ifname string) (int, error) {
	link, err := net.InterfaceByName(ifname)
	if err != nil {
		return 0, err
	}
	const protocol = uint16(frameType>>8 | frameType&0xff<<8)
	fd, err := unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(protocol))
	if err != nil {
		return 0, err
	}
	if err := unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: protocol, Ifindex: link.Index}); err != nil {
		_ = syscall.Close(fd)
		return 0, err
	}
	return fd, nil
}
