// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"bytes"
	"encoding/binary"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
)

// floodSize is larger than the kernel's limit for neighbour entries (gc_thresh3 in ip-sysctl.rst, 1,024 by default).
const floodSize = 3000

// uplinkAddresses are the addresses of a machine on the node's uplink: true is IPv4.
var uplinkAddresses = map[bool]string{true: "203.0.113.2", false: "2001:db8:113::2"}

func unassignedAddress(is4 bool, n int) netip.Addr {
	if is4 {
		n %= 100 << 8
		return netip.AddrFrom4([4]byte{10, 96, byte(128 + n>>8), byte(n)})
	}
	address := netip.MustParseAddr("fd00:96::f:0:0").As16()
	binary.BigEndian.PutUint32(address[12:], uint32(n))
	return netip.AddrFrom16(address)
}

// flood creates neighbour entries for floodSize unassigned addresses, beginning with number from. tap is a packet socket on the pod's eth0.
type flood func(a attached, tap int, is4 bool, from int) error

// forge sends neighbour requests for the gateway with forged senders, for each of which the gateway stores an entry.
func forge(a attached, tap int, is4 bool, from int) error {
	s := a.station()
	return sendMany(tap, from, func(n int) []byte {
		gateway := a.gateway(is4)
		if is4 {
			return arpFrame(a.bridgeMAC(), s.mac, 1, s.mac, unassignedAddress(is4, n), gateway)
		}
		return icmp(a.bridgeMAC(), s.mac, unassignedAddress(is4, n), gateway, 135, make([]byte, 4), gateway.AsSlice(), []byte{1, 1}, s.mac)
	})
}

// scanByGateway sends packets to unassigned addresses through the node, which then resolves them.
func scanByGateway(a attached, tap int, is4 bool, from int) error {
	s := a.station()
	return sendMany(tap, from, func(n int) []byte {
		if is4 {
			return udp4(a.bridgeMAC(), s.mac, s.v4, unassignedAddress(is4, n), 1000, 2000, "anybody")
		}
		return udp6(a.bridgeMAC(), s.mac, s.v6, unassignedAddress(is4, n), 1000, 2000, "anybody")
	})
}

// scan sends packets to unassigned addresses, which the kernel resolves in the pod's namespace, from a UDP socket without privileges.
func scan(a attached, _ int, is4 bool, from int) error {
	return a.Pod.Do(func() error {
		var conn *net.UDPConn
		for n := range floodSize {
			if n%100 == 0 { // a socket blocks while too many of its datagrams wait for resolution
				var err error
				if conn, err = net.ListenUDP(map[bool]string{true: "udp4", false: "udp6"}[is4], nil); err != nil {
					return err
				}
				defer conn.Close()
			}
			to := netip.AddrPortFrom(unassignedAddress(is4, from+n), 2000)
			_, _ = conn.WriteToUDPAddrPort([]byte("anybody"), to) // the neighbour table may be full
		}
		return nil
	})
}

func (a attached) bridgeMAC() net.HardwareAddr {
	mac, err := net.ParseMAC(a.result.Interfaces[0].Mac)
	if err != nil {
		a.Error(err)
	}
	return mac
}

func (a attached) gateway(is4 bool) netip.Addr {
	for _, ip := range a.result.IPs {
		if gateway, _ := netip.AddrFromSlice(ip.Gateway); gateway.Unmap().Is4() == is4 {
			return gateway.Unmap()
		}
	}
	return netip.Addr{}
}

func sendMany(tap, from int, frame func(n int) []byte) error {
	for n := range floodSize {
		if _, err := unix.Write(tap, frame(from+n)); err != nil && !errors.Is(err, unix.ENOBUFS) {
			return err
		}
	}
	return nil
}

// uplinkAnswers reports whether a namespace gets an answer from the machine on the uplink.
func uplinkAnswers(within func(func() error) error, is4 bool) bool {
	return within(func() error {
		conn, err := net.Dial("udp", net.JoinHostPort(uplinkAddresses[is4], "7"))
		if err != nil {
			return err
		}
		defer conn.Close()
		buf := make([]byte, 16)
		for range 3 {
			_, _ = conn.Write([]byte("ping")) // fails if the kernel reported that an earlier packet could not be sent
			_ = conn.SetReadDeadline(time.Now().Add(time.Second))
			if _, err = conn.Read(buf); err == nil {
				return nil
			}
		}
		return err
	}) == nil
}

// withLAN gives the node an uplink to a machine that answers requests and, like a separate one, has its own neighbour table. It returns a
// lab whose pod is this machine.
func (l lab) withLAN() lab {
	l.Helper()
	lan := kerneltest.NewPod(l.T)
	l.runOnNode(strings.ReplaceAll(`ip link add up0 type veth peer name eth0 netns LAN
		ip addr add 203.0.113.1/24 dev up0; ip addr add 2001:db8:113::1/64 dev up0 nodad; ip link set up0 up
		ip -n LAN addr add 203.0.113.2/24 dev eth0; ip -n LAN addr add 2001:db8:113::2/64 dev eth0 nodad; ip -n LAN link set eth0 up
		mac=$(cat /sys/class/net/up0/address)
		ip -n LAN neigh replace 203.0.113.1 lladdr $mac dev eth0 nud permanent
		ip -n LAN neigh replace 2001:db8:113::1 lladdr $mac dev eth0 nud permanent`, "LAN", filepath.Base(lan.Path)), "ip link del up0")
	for _, address := range uplinkAddresses {
		var conn net.PacketConn
		if err := lan.Do(func() (err error) { conn, err = net.ListenPacket("udp", net.JoinHostPort(address, "7")); return err }); err != nil {
			l.Fatal(err)
		}
		l.Cleanup(func() { conn.Close() })
		go func() {
			for buf := make([]byte, 16); ; {
				n, from, err := conn.ReadFrom(buf)
				if err != nil {
					return
				}
				_, _ = conn.WriteTo(buf[:n], from)
			}
		}()
	}
	l.Pod = lan
	return l
}

// TestNeighbourTableFlood: the kernel counts the neighbour entries of all network namespaces together, so a pod with many entries can cut
// off the node and all other pods. antiSpoof blocks forged requests, so that the uplink keeps working, but not packets to many addresses of
// the pod's own subnet, as SECURITY.md says. The test fills the neighbour table of the whole machine, so it runs only in a virtual one.
func TestNeighbourTableFlood(t *testing.T) {
	if line, err := os.ReadFile("/proc/cmdline"); err != nil || !bytes.Contains(line, []byte(" podlace.vm=")) {
		t.Skip("SKIPPED: it fills the neighbour table of the whole machine; make vm runs it")
	}
	unprotected, shipped := []any{}, []any{"antiSpoof", true}
	for _, c := range []struct {
		name  string
		keys  []any
		flood flood
		fills bool
	}{
		{"forged questions", unprotected, forge, true},
		{"forged questions with antiSpoof", shipped, forge, false},
		{"a scan by the gateway with antiSpoof", shipped, scanByGateway, true},
		{"a scan with antiSpoof", shipped, scan, true},
	} {
		for family, is4 := range map[string]bool{"IPv4": true, "IPv6": false} {
			t.Run(c.name+"/"+family, func(t *testing.T) {
				l := bareLab(t, append([]any{"name", "table", "bridge", "bttab", "isDefaultGateway", true,
					"ipam", hostLocal("10.96.0.0/16", "fd00:96::/64")}, c.keys...)...)
				l.withoutBridge()
				l.withLAN()
				attacker := l.add("attacker")
				node, pod := attacker.reachedDuring(c.flood, is4)
				entries := attacker.foreignNeighbours()
				t.Logf("%d entries; during the flood the uplink works for the node: %t, for another pod: %t", entries, node, pod)
				if fills := entries > 500; fills != c.fills || !fills && (entries > 0 || !node || !pod) {
					t.Errorf("the table fills: %t, want %t", fills, c.fills)
				}
			})
		}
	}
}

// foreignNeighbours counts the neighbour entries for unassigned addresses, on the node's bridge and in the pod.
func (a attached) foreignNeighbours() (count int) {
	a.Helper()
	v4, v6 := netip.MustParsePrefix("10.96.128.0/17"), netip.MustParsePrefix("fd00:96::f:0:0/96")
	look := func() error {
		entries, err := netlink.NeighList(0, netlink.FAMILY_ALL)
		for _, e := range entries {
			if address, _ := netip.AddrFromSlice(e.IP); v4.Contains(address.Unmap()) || v6.Contains(address) {
				count++
			}
		}
		return err
	}
	if err := errors.Join(look(), a.Pod.Do(look)); err != nil {
		a.Fatal(err)
	}
	return count
}

// reachedDuring reports whether the node and another pod, whose entries for the uplink it removes first, reach the uplink during the flood.
func (a attached) reachedDuring(flood flood, is4 bool) (node, pod bool) {
	a.Helper()
	here := func(f func() error) error { return f() }
	other := a.other().add("other")
	if !uplinkAnswers(here, is4) || !uplinkAnswers(other.Pod.Do, is4) {
		a.Fatal("the uplink does not work before the flood")
	}
	a.runOnNode("ip neigh flush dev up0; ip -n "+filepath.Base(other.Pod.Path)+" neigh flush dev eth0", "true")
	tap, first, stop, ended := a.tap(), make(chan struct{}), make(chan struct{}), make(chan error)
	go func() {
		for from := 0; ; from += floodSize {
			err := flood(a, tap, is4, from)
			if from == 0 {
				close(first)
			}
			select {
			case <-stop:
				ended <- err
				return
			default:
			}
		}
	}()
	<-first
	node, pod = uplinkAnswers(here, is4), uplinkAnswers(other.Pod.Do, is4)
	close(stop)
	if err := <-ended; err != nil {
		a.Error(err)
	}
	return node, pod
}
