// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"encoding/binary"
	"errors"
	"net/netip"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// IsBound reports whether any socket uses the port, on the given address or on all, by binding a socket to it for a moment. It returns
// false if the node does not have the address, or the kernel lacks the address family.
func IsBound(protocol byte, at netip.AddrPort) (bool, error) {
	err := bindSocket(protocol, at)
	switch {
	case errors.Is(err, unix.EADDRINUSE):
		return true, nil
	case errors.Is(err, unix.EADDRNOTAVAIL), errors.Is(err, unix.EAFNOSUPPORT):
		return false, nil
	}
	return false, err
}

// bindSocket binds a socket and closes it. It returns unix.EADDRINUSE if another socket uses the port. With SO_REUSEADDR, TCP ignores
// connections in state TIME_WAIT.
func bindSocket(protocol byte, at netip.AddrPort) error {
	kind := unix.SOCK_STREAM
	if protocol == unix.IPPROTO_UDP {
		kind = unix.SOCK_DGRAM
	}
	family, level, free := unix.AF_INET, unix.IPPROTO_IP, unix.IP_FREEBIND
	var local unix.Sockaddr
	if at.Addr().Is4() {
		local = &unix.SockaddrInet4{Port: int(at.Port()), Addr: at.Addr().As4()}
	} else {
		family, level, free = unix.AF_INET6, unix.IPPROTO_IPV6, unix.IPV6_FREEBIND
		local = &unix.SockaddrInet6{Port: int(at.Port()), Addr: at.Addr().As16()}
	}
	fd, err := unix.Socket(family, kind|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return err
	}
	defer unix.Close(fd)
	if kind == unix.SOCK_STREAM {
		err = unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	}
	if family == unix.AF_INET6 {
		err = errors.Join(err, unix.SetsockoptInt(fd, level, unix.IPV6_V6ONLY, 1))
	}
	if !at.Addr().IsUnspecified() {
		// IP_FREEBIND allows an address that the node does not have yet. A process that listens on all addresses will use this port on it too.
		err = errors.Join(err, unix.SetsockoptInt(fd, level, free, 1))
	}
	return errors.Join(err, unix.Bind(fd, local))
}

// Sockets is the ports on which sockets of one protocol (TCP or UDP) listen.
type Sockets map[uint16]bool

// tableUnreadable is a key in Sockets for a kernel without inet_diag. Any port may be in use there.
const tableUnreadable = 0

// Listen reports whether a socket listens on a port, on any address.
func (s Sockets) Listen(port uint16) bool { return s[port] || s[tableUnreadable] }

// States of sockets (include/net/tcp_states.h), and the size of struct inet_diag_req_v2 (include/uapi/linux/inet_diag.h).
const (
	stateClosed = 7 // UDP: not connected
	stateListen = 10
	diagRequest = 56
)

// ReadSockets returns the ports on which sockets of a protocol listen, in both address families, because an IPv6 socket may also use the
// IPv4 port. For /proc/net/tcp, the kernel would walk the table of all connections of the node, and package netlink requests sockets in all
// states.
func ReadSockets(protocol byte) Sockets {
	s := Sockets{}
	state := stateListen
	if protocol == unix.IPPROTO_UDP {
		state = stateClosed
	}
	for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
		body := append([]byte{family, protocol, 0, 0}, binary.NativeEndian.AppendUint32(nil, 1<<state)...)
		req := nl.NewNetlinkRequest(nl.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP)
		req.AddRawData(append(body, make([]byte, diagRequest-len(body))...))
		err := req.ExecuteIter(unix.NETLINK_SOCK_DIAG, 0, func(message []byte) bool {
			// struct inet_diag_msg: family, state, timer, retransmissions, source port, ...
			if len(message) >= 6 && binary.BigEndian.Uint16(message[4:]) != tableUnreadable {
				s[binary.BigEndian.Uint16(message[4:])] = true
			}
			return true
		})
		if err != nil && family == unix.AF_INET {
			s[tableUnreadable] = true
		}
	}
	return s
}
