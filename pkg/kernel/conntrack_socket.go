// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"syscall"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/fault"
)

const (
	// conntrackTimeout limits the wait for one reply. Even a large connection tracking table takes only milliseconds to read.
	conntrackTimeout = 10 * time.Second
	// largestReply is more than the kernel sends at once.
	largestReply = 64 << 10
	// mostRequests are sent at once. The replies to more might overflow the socket's queue.
	mostRequests = 32
)

// Conntrack reads and changes the connection tracking table. It deletes entries through a socket of their own, because that of the walk has
// parts of the table queued.
type Conntrack struct{ walk, change *conntrackSocket }

// OpenConntrack opens a Conntrack, which the caller closes.
func OpenConntrack() (t Conntrack, err error) {
	if t.walk, err = openConntrackSocket(); err != nil {
		return Conntrack{}, err
	}
	if t.change, err = openConntrackSocket(); err != nil {
		t.walk.Close()
		return Conntrack{}, err
	}
	return t, nil
}

// Close closes the sockets.
func (t Conntrack) Close() {
	t.walk.Close()
	t.change.Close()
}

// conntrackSocket receives into one buffer. Package nl allocates 64 KiB for each reply, and a busy node has 200,000 entries.
type conntrackSocket struct {
	*os.File
	sequence uint32
	buffer   []byte
}

func openConntrackSocket() (*conntrackSocket, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("open conntrack socket: %w", err)
	}
	timeout := unix.NsecToTimeval(conntrackTimeout.Nanoseconds())
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &timeout)
	return &conntrackSocket{File: os.NewFile(uintptr(fd), "conntrack"), buffer: make([]byte, largestReply)}, nil
}

// request returns a request about the connection tracking table for exchange.
func request(operation, flags int, family uint8, attributes ...*nl.RtAttr) *nl.NetlinkRequest {
	req := nl.NewNetlinkRequest(netlink.ConntrackTable<<8|operation, flags)
	req.AddData(&nl.Nfgenmsg{NfgenFamily: family, Version: nl.NFNETLINK_V0})
	for _, a := range attributes {
		req.AddData(a)
	}
	return req
}

// exchange sends requests at once and calls f with the position of the request and each reply to it, which is valid until f returns. It
// ends at the first error of f, and returns the first of the kernel other than that an entry does not exist.
func (s *conntrackSocket) exchange(requests []*nl.NetlinkRequest, f func(of int, message []byte) error) error {
	var datagram []byte
	first := s.sequence + 1
	for i, req := range requests {
		s.sequence++
		req.Seq = s.sequence
		if i == len(requests)-1 && req.Flags&unix.NLM_F_DUMP == 0 {
			req.Flags |= unix.NLM_F_ACK
		}
		datagram = append(datagram, pad(req.Serialize())...)
	}
	fd := int(s.Fd())
	err := fault.Retry(func() error { return unix.Sendto(fd, datagram, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}) })
	for ended := false; err == nil && !ended; {
		err = s.receive(fd, func(m syscall.NetlinkMessage) error {
			of := m.Header.Seq - first
			switch {
			case of >= uint32(len(requests)): // of a former exchange that ended early
				return nil
			case m.Header.Type != unix.NLMSG_ERROR && m.Header.Type != unix.NLMSG_DONE:
				return f(int(of), m.Data)
			}
			ended = int(of) == len(requests)-1
			return fault.Ignore(errorIn(m.Data), unix.ENOENT)
		})
	}
	return err
}

// receive waits for one datagram of the kernel and calls f with each message until one fails.
func (s *conntrackSocket) receive(fd int, f func(syscall.NetlinkMessage) error) error {
	var n int
	var from unix.Sockaddr
	err := fault.Retry(func() (err error) {
		n, from, err = unix.Recvfrom(fd, s.buffer, 0)
		return err
	})
	if sender, ok := from.(*unix.SockaddrNetlink); err != nil || !ok || sender.Pid != nl.PidKernel {
		return cmp.Or(err, errors.New("a message of another process"))
	}
	messages, err := syscall.ParseNetlinkMessage(s.buffer[:n])
	for _, m := range messages {
		if err == nil {
			err = f(m)
		}
	}
	return err
}

// pad aligns a message in a datagram of several.
func pad(message []byte) []byte {
	return append(message, make([]byte, -len(message)&(unix.NLMSG_ALIGNTO-1))...)
}

// errorIn returns the error in the payload of an acknowledgement or at the end of a dump.
func errorIn(payload []byte) error {
	if number := int32(number32(payload[:min(4, len(payload))])); number != 0 {
		return unix.Errno(-number)
	}
	return nil
}
