// SPDX-License-Identifier: Apache-2.0

package allocation

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"sync"
	"syscall"
	"time"
)

// conn is a connection that blocks a thread. Every pod of a node waits for an answer: package net would start its poller for the one that is
// put here, which takes longer than the answer.
type conn struct {
	fd   int
	stop func() bool
	shut sync.Mutex // the end of ctx and Close may come together
}

// dial connects, and ends what is waited for when ctx does.
func dial(ctx context.Context, socket string) (*conn, error) {
	fd, err := syscall.Socket(syscall.AF_UNIX, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	c := &conn{fd: fd}
	c.stop = context.AfterFunc(ctx, c.wake)
	// More may connect than are answered, and a connect that waits then is not ended by a shutdown.
	if until, ok := ctx.Deadline(); ok {
		wait := syscall.NsecToTimeval(max(time.Until(until), time.Millisecond).Nanoseconds())
		err = syscall.SetsockoptTimeval(fd, syscall.SOL_SOCKET, syscall.SO_SNDTIMEO, &wait)
	}
	if err == nil {
		err = again(func() error { return syscall.Connect(fd, &syscall.SockaddrUnix{Name: socket}) })
	}
	if err == nil {
		err = ctx.Err() // its shutdown came before the connection
	}
	if err != nil {
		c.Close()
		return nil, fmt.Errorf("connect to %s: %w", socket, err)
	}
	return c, nil
}

func again(call func() error) error {
	for {
		if err := call(); !errors.Is(err, syscall.EINTR) {
			return err
		}
	}
}

func (c *conn) wake() {
	c.shut.Lock()
	defer c.shut.Unlock()
	if c.fd >= 0 {
		_ = syscall.Shutdown(c.fd, syscall.SHUT_RDWR) // whoever reads or writes gets an end
	}
}

func (c *conn) Close() {
	c.stop()
	c.shut.Lock()
	defer c.shut.Unlock()
	_ = syscall.Close(c.fd) // nothing is on its way any more
	c.fd = -1
}

func (c *conn) Read(b []byte) (n int, err error) {
	err = again(func() error { n, err = syscall.Read(c.fd, b); return err })
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
		// Not write(2), which brings SIGPIPE when nobody is there any more.
		err = again(func() error { n, err = syscall.SendmsgN(c.fd, b[written:], nil, nil, syscall.MSG_NOSIGNAL); return err })
		if err != nil {
			return written, os.NewSyscallError("write", err)
		}
		written += n
	}
	return written, nil
}
