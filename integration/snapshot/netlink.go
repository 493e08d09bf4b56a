// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sys/unix"
)

// Netlink messages have the byte order of the machine.
var native = binary.NativeEndian

// socket is a netlink socket for dumps. Libraries hide messages and flags that a snapshot needs, such as the flags of the last message, and
// do not support all attributes.
type socket struct {
	fd  int
	seq uint32
	buf []byte
}

// dial opens a socket in the calling thread's network namespace.
func dial(protocol int) (*socket, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, protocol)
	if err != nil {
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	s := &socket{fd: fd, buf: make([]byte, 1<<18)}
	err = unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK})
	if err == nil {
		err = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 10})
	}
	if err != nil {
		s.close()
		return nil, fmt.Errorf("open netlink: %w", err)
	}
	return s, nil
}

func (s *socket) close() { _ = unix.Close(s.fd) }

// errInterrupted means that a table changed while it was dumped.
var errInterrupted = errors.New("dump interrupted")

// dump returns the bodies of the messages that describe a table, or none if the kernel does not have it. It repeats a dump during which the
// table changed.
func (s *socket) dump(what string, typ uint16, body []byte) ([][]byte, error) {
	for try := 1; ; try++ {
		bodies, err := s.dumpOnce(typ, body)
		switch {
		case err == nil:
			return bodies, nil
		case absent(err):
			return nil, nil
		case !interrupted(err) || try == 20:
			return nil, fmt.Errorf("dump %s: %w", what, err)
		}
		time.Sleep(time.Duration(try) * time.Millisecond)
	}
}

func interrupted(err error) bool {
	return errors.Is(err, errInterrupted) || errors.Is(err, unix.EINTR) || errors.Is(err, unix.EAGAIN) ||
		errors.Is(err, unix.EBUSY)
}

func absent(err error) bool {
	for _, e := range []error{unix.EOPNOTSUPP, unix.EINVAL, unix.ENOENT, unix.EAFNOSUPPORT, unix.EPROTONOSUPPORT, unix.ENODEV} {
		if errors.Is(err, e) {
			return true
		}
	}
	return false
}

func (s *socket) dumpOnce(typ uint16, body []byte) ([][]byte, error) {
	if err := s.send(typ, body); err != nil {
		return nil, err
	}
	var bodies [][]byte
	var torn bool
	for {
		n, flags, err := s.receive()
		if err != nil {
			return nil, err
		}
		if flags&unix.MSG_TRUNC != 0 {
			return nil, errors.New("message longer than the buffer")
		}
		done, intr, err := s.split(s.buf[:n], &bodies)
		torn = torn || intr
		if err != nil {
			return nil, err
		}
		if done && torn {
			return nil, errInterrupted
		}
		if done {
			return bodies, nil
		}
	}
}

func (s *socket) receive() (n, flags int, err error) {
	for {
		n, _, flags, _, err = unix.Recvmsg(s.fd, s.buf, nil, 0)
		if !errors.Is(err, unix.EINTR) {
			return n, flags, err
		}
	}
}

func (s *socket) send(typ uint16, body []byte) error {
	s.seq++
	b := make([]byte, unix.NLMSG_HDRLEN, unix.NLMSG_HDRLEN+len(body))
	native.PutUint32(b, uint32(unix.NLMSG_HDRLEN+len(body)))
	native.PutUint16(b[4:], typ)
	native.PutUint16(b[6:], unix.NLM_F_REQUEST|unix.NLM_F_DUMP)
	native.PutUint32(b[8:], s.seq)
	_, err := unix.Write(s.fd, append(b, body...)) // to the kernel, since the socket is not connected
	return err
}

// split appends the body of each message in a datagram to bodies.
func (s *socket) split(b []byte, bodies *[][]byte) (done, torn bool, err error) {
	for len(b) >= unix.NLMSG_HDRLEN {
		size := int(native.Uint32(b))
		if size < unix.NLMSG_HDRLEN || size > len(b) {
			return false, torn, errors.New("malformed netlink message")
		}
		typ, flags, seq := native.Uint16(b[4:]), native.Uint16(b[6:]), native.Uint32(b[8:])
		body := b[unix.NLMSG_HDRLEN:size]
		b = b[min(align(size), len(b)):]
		if seq != s.seq {
			continue // the rest of a failed dump
		}
		torn = torn || flags&unix.NLM_F_DUMP_INTR != 0
		switch typ {
		case unix.NLMSG_DONE, unix.NLMSG_ERROR:
			return true, torn, status(body)
		default:
			*bodies = append(*bodies, append([]byte(nil), body...))
		}
	}
	return false, torn, nil
}

func status(body []byte) error {
	if len(body) >= 4 {
		if errno := int32(native.Uint32(body)); errno < 0 {
			return unix.Errno(-errno)
		}
	}
	return nil
}

func align(n int) int { return (n + 3) &^ 3 }
