// SPDX-License-Identifier: Apache-2.0

package poddevices

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"time"
)

const (
	// maxLine is the largest question or answer in bytes.
	maxLine = 8 << 20
	// connTimeout limits a connection, from the question to the end of the answer.
	connTimeout = 10 * time.Second
	// maxConcurrent is the number of questions that Serve answers concurrently; further connections queue.
	maxConcurrent = 64
)

// Serve answers questions until ctx is done. It answers everyone, so only root may have access to the socket.
func Serve(ctx context.Context, l *net.UnixListener, answer func(context.Context, Question) Answer, log *slog.Logger) {
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	free := make(chan struct{}, maxConcurrent)
	for {
		conn, err := l.AcceptUnix()
		if ctx.Err() != nil {
			return
		}
		if err != nil { // such as too many open files
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
	var q Question
	if err := read(conn, &q); err != nil {
		return errors.Join(err, write(conn, Answer{Error: "want a question: " + err.Error()}))
	}
	return write(conn, answer(ctx, q))
}
