// SPDX-License-Identifier: Apache-2.0

package poddevices

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"syscall"
	"time"
)

const (
	// maxLine is the largest question or answer in bytes.
	maxLine = 8 << 20
	// connTimeout limits the total time of a connection, from the question to the end of the answer.
	connTimeout = 10 * time.Second
	// maxConcurrent is the number of questions that Serve answers concurrently. Further connections wait in a queue.
	maxConcurrent = 64
)

// Serve answers questions until ctx is done.
func Serve(ctx context.Context, l *net.UnixListener, answer func(context.Context, Question) Answer, log *slog.Logger) {
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	free := make(chan struct{}, maxConcurrent)
	for {
		conn, err := l.AcceptUnix()
		if ctx.Err() != nil {
			return
		}
		if err != nil { // for example: too many open files
			log.Warn("could not accept a connection; retrying", "error", err)
			time.Sleep(100 * time.Millisecond)
			continue
		}
		free <- struct{}{}
		go func() {
			defer func() { <-free }()
			defer conn.Close()
			if err := serve(ctx, conn, answer); err != nil && !errors.Is(err, io.EOF) { // a client that only probes the socket sends no question
				log.Warn("could not answer a question", "error", err)
			}
		}()
	}
}

func serve(ctx context.Context, conn *net.UnixConn, answer func(context.Context, Question) Answer) error {
	if err := conn.SetDeadline(time.Now().Add(connTimeout)); err != nil {
		return err
	}
	uid, err := peer(conn)
	if err != nil {
		return err
	}
	var q Question
	err = read(conn, &q) // read before any answer: closing a socket with unread data would discard the answer
	if uid != 0 && int(uid) != os.Geteuid() {
		return errors.Join(fmt.Errorf("user %d is not root", uid), write(conn, Answer{Error: "only root may ask"}))
	}
	if err != nil {
		return errors.Join(err, write(conn, Answer{Error: "want a question: " + err.Error()}))
	}
	return write(conn, answer(ctx, q))
}

// peer() returns the user ID of the client (SO_PEERCRED of unix(7)).
func peer(conn *net.UnixConn) (uid uint32, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *syscall.Ucred
	control := raw.Control(func(fd uintptr) {
		cred, err = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	})
	if err := errors.Join(control, err); err != nil {
		return 0, fmt.Errorf("read the client's user ID: %w", err)
	}
	return cred.Uid, nil
}
