// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/harness"
)

// station is the MAC and the addresses of a pod, as its neighbours on the bridge see them.
type station struct {
	mac            net.HardwareAddr
	v4, v6, linkLo netip.Addr
}

func (a attached) station() station {
	a.Helper()
	mac, err := net.ParseMAC(a.result.Interfaces[2].Mac)
	if err != nil {
		a.Fatal(err)
	}
	at := func(i int) netip.Addr {
		addr, _ := netip.AddrFromSlice(a.result.IPs[i].Address.IP)
		return addr.Unmap()
	}
	ll := netip.AddrFrom16([16]byte{0xfe, 0x80, 8: mac[0] ^ 2, mac[1], mac[2], 0xff, 0xfe, mac[3], mac[4], mac[5]})
	return station{mac, at(0), at(1), ll}
}

func be(v uint16) []byte { return binary.BigEndian.AppendUint16(nil, v) }

func ether(to, from net.HardwareAddr, kind uint16, payload ...[]byte) []byte {
	return slices.Concat(to, from, be(kind), slices.Concat(payload...))
}

// arpFrame returns an ARP packet for IPv4 over Ethernet (RFC 826). op is 1 for a request and 2 for a reply.
func arpFrame(to, from net.HardwareAddr, op uint16, sender net.HardwareAddr, senderIP, target netip.Addr) []byte {
	return ether(to, from, unix.ETH_P_ARP, be(1), be(unix.ETH_P_IP), []byte{6, 4}, be(op), sender, senderIP.AsSlice(), to, target.AsSlice())
}

func checksum(data ...[]byte) []byte {
	sum := uint32(0)
	all := slices.Concat(data...)
	for i := 0; i+1 < len(all); i += 2 {
		sum += uint32(all[i])<<8 | uint32(all[i+1])
	}
	for sum > 0xffff {
		sum = sum>>16 + sum&0xffff
	}
	return be(^uint16(sum))
}

// udp4 returns a frame with an IPv4 datagram without a UDP checksum.
func udp4(to, from net.HardwareAddr, src, dst netip.Addr, sport, dport uint16, body string) []byte {
	udp := slices.Concat(be(sport), be(dport), be(uint16(8+len(body))), be(0), []byte(body))
	head := slices.Concat([]byte{0x45, 0}, be(uint16(20+len(udp))), []byte{0, 0, 0x40, 0, 64, unix.IPPROTO_UDP}, be(0), src.AsSlice(),
		dst.AsSlice())
	copy(head[10:], checksum(head))
	return ether(to, from, unix.ETH_P_IP, head, udp)
}

// ip6 returns a frame with an IPv6 packet of hop limit 255, which neighbour discovery requires.
func ip6(to, from net.HardwareAddr, src, dst netip.Addr, next byte, body []byte) []byte {
	return ether(to, from, unix.ETH_P_IPV6, []byte{0x60, 0, 0, 0}, be(uint16(len(body))), []byte{next, 255}, src.AsSlice(), dst.AsSlice(),
		body)
}

// icmp returns a frame with an ICMPv6 message: type, code, checksum and body.
func icmp(to, from net.HardwareAddr, src, dst netip.Addr, kind byte, body ...[]byte) []byte {
	message := slices.Concat([]byte{kind, 0, 0, 0}, slices.Concat(body...))
	copy(message[2:], checksum(src.AsSlice(), dst.AsSlice(), []byte{0, 0}, be(uint16(len(message))), []byte{0, 0, 0, unix.IPPROTO_ICMPV6},
		message))
	return ip6(to, from, src, dst, unix.IPPROTO_ICMPV6, message)
}

func udp6(to, from net.HardwareAddr, src, dst netip.Addr, sport, dport uint16, body string) []byte {
	return ip6(to, from, src, dst, unix.IPPROTO_UDP, slices.Concat(be(sport), be(dport), be(uint16(8+len(body))), be(0), []byte(body)))
}

// tap opens a packet socket on the pod's eth0.
func (a attached) tap() (fd int) {
	a.Helper()
	const protocol = uint16(unix.ETH_P_ALL<<8 | unix.ETH_P_ALL>>8)
	err := a.Pod.Do(func() error {
		link, err := net.InterfaceByName("eth0")
		if err != nil {
			return err
		}
		if fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_CLOEXEC, int(protocol)); err != nil {
			return err
		}
		return unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: protocol, Ifindex: link.Index})
	})
	if err != nil {
		a.Fatal(err)
	}
	a.Cleanup(func() { unix.Close(fd) })
	return fd
}

// arrived reads what a tap has received, up to the given frame, and reports whether the frame is there.
func arrived(tap int, frame []byte) bool {
	buf := make([]byte, 2048)
	for {
		n, _, err := unix.Recvfrom(tap, buf, unix.MSG_DONTWAIT)
		if err != nil {
			return false
		}
		if bytes.Equal(buf[:n], frame) {
			return true
		}
	}
}

// onOneCPU runs send on one CPU, because a frame that is sent on another CPU may overtake those before it.
func onOneCPU(send func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var before, one unix.CPUSet
	err := unix.SchedGetaffinity(0, &before)
	for cpu := 0; one.Count() == 0 && cpu < 64*len(before); cpu++ {
		if before.IsSet(cpu) {
			one.Set(cpu)
		}
	}
	return errors.Join(err, unix.SchedSetaffinity(0, &one), send(), unix.SchedSetaffinity(0, &before))
}

// lastFrame returns a harmless frame, which shows that all frames before it have arrived or been dropped.
func (p pair) lastFrame() []byte { return p.in4(unix.IPPROTO_UDP, 0, nil, datagram(1, 2)) }

// checkArrivals sends frames to a neighbour. Those of a guarded pod arrive if they are of the kind always, those of the pod "other" all.
func (a attached) checkArrivals(to attached, frames ...frame) {
	a.Helper()
	frames = append(frames, frame{"the end", always, pair{a.station(), to.station()}.lastFrame()})
	var sent [][]byte
	for _, f := range frames {
		sent = append(sent, f.bytes)
	}
	for i, arrived := range arrivals(a, to, sent) {
		if want := frames[i].kind == always || a.id == "other"; arrived != want {
			a.Errorf("%s from the pod %s: arrived %t, want %t", frames[i].what, a.id, arrived, want)
		}
	}
}

// arrivals sends frames between pods and returns which arrived. It waits for the last one, which no protection may drop.
func arrivals(from, to attached, frames [][]byte) []bool {
	to.Helper()
	out, in := from.tap(), to.tap()
	if err := onOneCPU(func() (err error) {
		for _, f := range frames {
			_, failed := unix.Write(out, f)
			err = errors.Join(err, failed)
		}
		return err
	}); err != nil {
		to.Fatal(fmt.Errorf("send: %w", err))
	}
	seen := make([]bool, len(frames))
	buf := make([]byte, 2048)
	for deadline := time.Now().Add(time.Minute); !seen[len(frames)-1]; {
		n, _, err := harness.ReceiveFrame(in, buf, time.Minute)
		if err != nil || time.Now().After(deadline) {
			to.Fatalf("the last frame did not arrive: %v", err)
		}
		for i, f := range frames {
			// the kernel strips the VLAN tag from a received frame
			kind, untagged := binary.BigEndian.Uint16(f[12:]), slices.Concat(f[:12], f[min(16, len(f)):])
			tagged := kind == unix.ETH_P_8021Q || kind == unix.ETH_P_8021AD
			seen[i] = seen[i] || bytes.Equal(buf[:n], f) || tagged && bytes.Equal(buf[:n], untagged)
		}
	}
	return seen
}
