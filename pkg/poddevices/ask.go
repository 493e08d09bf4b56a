// SPDX-License-Identifier: Apache-2.0

package poddevices

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"
)

// Ask sends a question to the socket and waits until the deadline for the answer. Its error matches the Cause of the answer,
// fs.ErrNotExist or syscall.ECONNREFUSED if no daemon listens, or os.ErrDeadlineExceeded.
func Ask(socket string, until time.Time, q Question) (a Answer, err error) {
	conn, err := dial(socket, until)
	if err != nil {
		return a, fmt.Errorf("ask the SR-IOV device plugin: %w", err)
	}
	defer conn.Close()
	if err := errors.Join(write(conn, q), read(conn, &a)); err != nil {
		return Answer{}, fmt.Errorf("ask the SR-IOV device plugin: %w", err)
	}
	if err := a.err(); err != nil {
		return Answer{}, fmt.Errorf("the SR-IOV device plugin answers: %w", err)
	}
	return a, nil
}

// conn is a blocking connection with a deadline. Each start of a pod waits for it, and the poller and threads of package net take
// longer to start than the answer.
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

// callWithDeadline runs a blocking system call, limited by the socket option SO_SNDTIMEO or SO_RCVTIMEO, and retries it after a signal.
func (c *conn) callWithDeadline(option int, f func() error) error {
	for {
		left := time.Until(c.until)
		if left < time.Microsecond { // the kernel takes zero for no limit
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
		// sendmsg takes MSG_NOSIGNAL, which prevents SIGPIPE if the peer has closed the connection.
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

func write(conn io.Writer, v any) error { return json.NewEncoder(conn).Encode(v) } // Encode appends the newline

func read(conn io.Reader, v any) error {
	line, err := bufio.NewReader(io.LimitReader(conn, maxLine)).ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("read a line of at most %d bytes: %w", maxLine, err)
	}
	return json.Unmarshal(line, v)
}
