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

// Silent returns the addresses for which no host on a link of this namespace answers ARP or neighbour discovery in time, although a
// datagram makes the kernel ask. An address without an on-link route counts as silent. n must be the namespace of the process.
func (n *NS) Silent(addresses []netip.Addr, within time.Duration) (silent []netip.Addr, err error) {
	asked, wait := map[netip.Addr]Link{}, time.Duration(0)
	for _, addr := range addresses {
		m, err := n.MatchRoute(addr)
		switch {
		case NoRoute(err) || err == nil && !m.OnLink && !m.Local:
			asked[addr] = Link{}
		case err == nil && !m.Local:
			asked[addr], wait = Link{Index: m.FirstLink()}, within
			err = n.ask(asked[addr], addr)
		}
		if err != nil && !NoRoute(err) {
			return nil, err
		}
	}
	time.Sleep(wait)
	for _, addr := range addresses {
		link, ok := asked[addr]
		known, err := n.neighbourOf(link, addr)
		if err != nil {
			return nil, err
		}
		if ok && (known == nil || known.State&(netlink.NUD_REACHABLE|netlink.NUD_PERMANENT) == 0) {
			silent = append(silent, addr)
		}
	}
	return silent, nil
}

// ask makes the kernel forget what it learnt about an address, and ask again.
func (n *NS) ask(link Link, addr netip.Addr) error {
	known, err := n.neighbourOf(link, addr)
	if err != nil || known != nil && known.State&netlink.NUD_PERMANENT != 0 {
		return err
	}
	_ = n.DelNeighbour(link, addr)
	fault.Step("ask for", addr.String())
	if err := sendDatagram(addr); err != nil {
		return fmt.Errorf("ask for %s: %w", addr, err)
	}
	return nil
}

// sendDatagram sends a byte to the discard service of an address. Package net would add 300 KB to each plugin.
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
