// SPDX-License-Identifier: Apache-2.0

package allocation

import (
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"
)

// The type conn is a blocking connection with a deadline. It does not use package net, because each start of a pod waits for an answer of
// the device plugin. Package net would prolong this wait: starting its poller, timers and threads takes longer than the answer.
type conn struct {
	fd    int
	until time.Time
}

func dial(socket string, until time.Time) (*conn, error) {
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	c := &conn{fd, until}
	connect := func() error { return syscall.Connect(fd, &syscall.SockaddrUnix{Name: socket}) }
	if err := c.callWithDeadline(syscall.SO_SNDTIMEO, connect); err != nil {
		c.Close()
		return nil, fmt.Errorf("connect to %s: %w", socket, err)
	}
	return c, nil
}

// callWithDeadline runs a blocking system call and retries it after a signal. The socket option (SO_SNDTIMEO or SO_RCVTIMEO) limits how
// long the call may block.
func (c *conn) callWithDeadline(option int, f func() error) error {
	for {
		left := time.Until(c.until)
		if left < time.Microsecond { // the kernel takes zero as no limit
			return os.ErrDeadlineExceeded
		}
		timeout := syscall.NsecToTimeval(left.Nanoseconds())
		if err := syscall.SetsockoptTimeval(c.fd, syscall.SOL_SOCKET, option, &timeout); err != nil {
			return os.NewSyscallError("setsockopt", err)
		}
		err := f()
		if errors.Is(err, syscall.EAGAIN) {
			return os.ErrDeadlineExceeded
		}
		if !errors.Is(err, syscall.EINTR) {
			return err
		}
	}
}

func (c *conn) Close() { _ = syscall.Close(c.fd) }

func (c *conn) Read(b []byte) (n int, err error) {
	err = c.callWithDeadline(syscall.SO_RCVTIMEO, func() error { n, err = syscall.Read(c.fd, b); return err })
	if err != nil {
		return 0, os.NewSyscallError("read", err)
	}
	if n == 0 && len(b) > 0 {
		return 0, io.EOF
	}
	return n, nil
}

func (c *conn) Write(b []byte) (written int, err error) {
	for written < len(b) {
		var n int
		// sendmsg with MSG_NOSIGNAL, in place of write(2), prevents SIGPIPE if the peer has closed the connection.
		err = c.callWithDeadline(syscall.SO_SNDTIMEO, func() error {
			n,
				err = syscall.SendmsgN(c.fd, b[written:], nil, nil, syscall.MSG_NOSIGNAL)
			return err
		})
		if err != nil {
			return written, os.NewSyscallError("write", err)
		}
		written += n
	}
	return written, nil
}
