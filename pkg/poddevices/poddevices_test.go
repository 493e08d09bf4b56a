// SPDX-License-Identifier: Apache-2.0

package poddevices

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func soon() time.Time { return time.Now().Add(10 * time.Second) }

func serveAt(t *testing.T, answer func(context.Context, Question) Answer) (socket string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "ask")
	if err != nil {
		t.Fatal(err)
	}
	socket = filepath.Join(dir, "s")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: socket, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() { defer close(done); Serve(ctx, l, answer, slog.New(slog.DiscardHandler)) }()
	t.Cleanup(func() { cancel(); <-done; os.RemoveAll(dir) })
	return socket
}

func echo(_ context.Context, q Question) Answer {
	return Answer{Devices: []Device{{Namespace: q.Namespace, Pod: q.Pod, Container: "app", Index: 1, Resource: "example.com/fast",
		ID: "0000:3b:10.2", CPUs: []int64{2, 3}}}}
}

func TestAsk(t *testing.T) {
	socket := serveAt(t, echo)
	var all sync.WaitGroup
	for i := range 4 * maxConcurrent {
		all.Go(func() {
			q := Question{Namespace: "shop", Pod: fmt.Sprint("web-", i)}
			got, err := Ask(socket, soon(), q)
			if diff := cmp.Diff(echo(t.Context(), q), got); diff != "" || err != nil {
				t.Errorf("%v\n%s", err, diff)
			}
		})
	}
	all.Wait()
}

func TestAskFails(t *testing.T) {
	refusing := serveAt(t, func(context.Context, Question) Answer { return Answer{Error: "the kubelet is unavailable"} })
	if got, err := Ask(refusing, soon(), Question{}); got.Devices != nil || err == nil ||
		!strings.Contains(err.Error(), "the kubelet is unavailable") {
		t.Errorf("%v, %v", got, err)
	}
	uncertain := serveAt(t, func(context.Context, Question) Answer { return Answer{Error: "who knows", Cause: ErrUncertain} })
	if _, err := Ask(uncertain, soon(), Question{}); !errors.Is(err, ErrUncertain) ||
		err.Error() != "the SR-IOV device plugin answers: who knows" {
		t.Errorf("got %v", err)
	}
	unprepared := serveAt(t, func(context.Context, Question) Answer { return Refusal(fmt.Errorf("claim shop/vf: %w", ErrUnprepared)) })
	if _, err := Ask(unprepared, soon(), Question{}); !errors.Is(err, ErrUnprepared) || errors.Is(err, ErrUncertain) ||
		err.Error() != "the SR-IOV device plugin answers: claim shop/vf: the claim is not prepared" {
		t.Errorf("got %v", err)
	}
	if _, err := Ask(refusing, soon(), Question{}); errors.Is(err, ErrUncertain) || errors.Is(err, ErrUnprepared) {
		t.Errorf("got %v", err)
	}
	if _, err := Ask(refusing+"-none", soon(), Question{}); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("got %v", err)
	}
	silent := serveAt(t, func(context.Context, Question) Answer { <-t.Context().Done(); return Answer{} })
	if _, err := Ask(silent, time.Now().Add(50*time.Millisecond), Question{}); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("got %v", err)
	}
	l, err := net.Listen("unix", silent+"2")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		if c, err := l.Accept(); err == nil {
			io.WriteString(c, `{"devices":[{"pod":`)
			c.Close()
		}
	}()
	if got, err := Ask(silent+"2", soon(), Question{}); err == nil {
		t.Errorf("half an answer is taken for %v", got)
	}
}

// TestHostile checks that the daemon survives malformed questions: it must answer the next client.
func TestHostile(t *testing.T) {
	socket := serveAt(t, echo)
	for what, text := range map[string]string{"nothing": "", "no end": "{", "no JSON": "hello\n", "another type": `{"pod":7}` + "\n",
		"a list": "[]\n", "binary": "\x00\xff\n",
		"long": strings.Repeat("x", 9<<20) + "\n"} {
		conn, err := net.Dial("unix", socket)
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			io.Copy(conn, strings.NewReader(text)) // fails if the server stops reading
			conn.(*net.UnixConn).CloseWrite()
		}()
		answer, _ := io.ReadAll(conn)
		conn.Close()
		if !bytes.Contains(answer, []byte(`"error":"want a question`)) {
			t.Errorf("%s: answer %.200s", what, answer)
		}
		if _, err := Ask(socket, soon(), Question{Pod: "a"}); err != nil {
			t.Errorf("after %s: %v", what, err)
		}
	}
}
