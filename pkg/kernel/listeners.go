// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"
)

// manyPorts is how many ports take as long to bind as the tables of sockets to read.
const manyPorts = 32

// Listening returns those of the ports that a process of the node listens on, by TCP or UDP: forwarded, they never reach it again. SCTP
// is not looked at. A port is bound for a moment, without listening, which tells of the address and of what covers it.
func Listening(ports []HostPort) (used []HostPort, err error) {
	tables := map[string]socketTable{}
	listens := func(p HostPort) bool {
		if tables[p.Protocol] == nil {
			tables[p.Protocol] = readSockets(p.Protocol)
		}
		return tables[p.Protocol].listens(p.Port)
	}
	for _, p := range ports {
		if protocols[p.Protocol] == unix.IPPROTO_SCTP || len(ports) > manyPorts && !listens(p) {
			continue
		}
		err := p.bind()
		switch {
		case errors.Is(err, unix.EADDRINUSE):
			// A connection of the node's own that happens to leave from the port takes it as well.
			if listens(p) {
				used = append(used, p)
			}
		// No address of the node; a kernel without IPv6.
		case err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) && !errors.Is(err, unix.EAFNOSUPPORT):
			return nil, fmt.Errorf("bind %s: %w", p, err)
		}
	}
	return used, nil
}

// bind tells by unix.EADDRINUSE that a socket has the port. SO_REUSEADDR of TCP leaves out what remains of closed connections.
func (p HostPort) bind() error {
	kind := unix.SOCK_STREAM
	if p.Protocol == "udp" {
		kind = unix.SOCK_DGRAM
	}
	family, level, free := unix.AF_INET, unix.IPPROTO_IP, unix.IP_FREEBIND
	var at unix.Sockaddr
	if p.To.Addr().Is4() {
		four := &unix.SockaddrInet4{Port: int(p.Port)}
		if p.HostIP.IsValid() {
			four.Addr = p.HostIP.As4()
		}
		at = four
	} else {
		family, level, free = unix.AF_INET6, unix.IPPROTO_IPV6, unix.IPV6_FREEBIND
		six := &unix.SockaddrInet6{Port: int(p.Port)}
		if p.HostIP.IsValid() {
			six.Addr = p.HostIP.As16()
		}
		at = six
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
	if p.HostIP.IsValid() {
		// The address may come later, and a process that listens on all has it then.
		err = errors.Join(err, unix.SetsockoptInt(fd, level, free, 1))
	}
	return errors.Join(err, unix.Bind(fd, at))
}

// socketTable has the ports that sockets of one protocol listen on.
type socketTable map[uint16]bool

// unread is in the table when the kernel cannot tell (inet_diag is missing): any port may be listened on.
const unread = 0

func (t socketTable) listens(port uint16) bool { return t[port] || t[unread] }

// States of sockets (include/net/tcp_states.h), and the size of struct inet_diag_req_v2 (include/uapi/linux/inet_diag.h).
const (
	stateClosed = 7 // UDP: not connected
	stateListen = 10
	diagRequest = 56
)

// readSockets asks for both families: a socket of IPv6 may have the port of IPv4 as well. /proc/net/tcp is no way: reading it goes through
// the table of all connections of the node.
func readSockets(protocol string) socketTable {
	t := socketTable{}
	state := stateListen
	if protocol == "udp" {
		state = stateClosed
	}
	for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
		body := append([]byte{family, protocols[protocol], 0, 0}, binary.NativeEndian.AppendUint32(nil, 1<<state)...)
		req := nl.NewNetlinkRequest(nl.SOCK_DIAG_BY_FAMILY, unix.NLM_F_DUMP)
		req.AddRawData(append(body, make([]byte, diagRequest-len(body))...))
		err := req.ExecuteIter(unix.NETLINK_SOCK_DIAG, 0, func(message []byte) bool {
			// struct inet_diag_msg: family, state, timer, retransmissions, source port, ...
			if len(message) >= 6 && binary.BigEndian.Uint16(message[4:]) != unread {
				t[binary.BigEndian.Uint16(message[4:])] = true
			}
			return true
		})
		if err != nil && family == unix.AF_INET {
			t[unread] = true
		}
	}
	return t
}
