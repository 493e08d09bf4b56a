// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
)

// discard is the port of a service that ignores what it gets (RFC 863).
const discard = 9

// Answers reports whether a host on a link of this namespace answers ARP or neighbour discovery for an address within the given time. If no
// route leads to the address without a gateway, nobody can. A packet to the address makes the kernel ask. The namespace must be that of the
// process.
func (n *NS) Answers(addr netip.Addr, within time.Duration) (bool, error) {
	m, err := n.MatchRoute(addr)
	if NoRoute(err) || err == nil && (!m.OnLink || m.Local) {
		return m.Local, nil
	}
	if err != nil {
		return false, err
	}
	state, err := n.neighbour(m.FirstLink(), addr)
	if err != nil || state == netlink.NUD_PERMANENT {
		return state == netlink.NUD_PERMANENT, err
	}
	fault.Step("ask for", addr.String())
	_ = n.h.NeighDel(&netlink.Neigh{LinkIndex: m.FirstLink(), IP: addr.AsSlice()}) // what was learnt earlier is no answer
	if err := sendDatagram(addr); err != nil {
		return false, fmt.Errorf("ask for %s: %w", addr, err)
	}
	for end := time.Now().Add(within); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
		if state, err = n.neighbour(m.FirstLink(), addr); err != nil || state == netlink.NUD_REACHABLE {
			return err == nil, err
		}
	}
	return false, nil
}

// neighbour returns the NUD state of a neighbour entry (rtnetlink(7)), or 0 if there is none.
func (n *NS) neighbour(link int, addr netip.Addr) (state int, err error) {
	list, err := dump(func() ([]netlink.Neigh, error) { return n.h.NeighList(link, netlink.FAMILY_ALL) })
	for _, e := range list {
		if ip, ok := netip.AddrFromSlice(e.IP); ok && ip.Unmap() == addr {
			return e.State, nil
		}
	}
	return 0, err
}

// sendDatagram sends a byte to the discard service of an address. The package net would add 300 KB to each plugin.
func sendDatagram(addr netip.Addr) error {
	family, to := unix.AF_INET6, unix.Sockaddr(&unix.SockaddrInet6{Port: discard, Addr: addr.As16()})
	if addr.Is4() {
		family, to = unix.AF_INET, &unix.SockaddrInet4{Port: discard, Addr: addr.As4()}
	}
	fd, err := unix.Socket(family, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	return unix.Sendto(fd, []byte{0}, 0, to)
}
