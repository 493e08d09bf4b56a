// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"os"
	"os/signal"
	"syscall"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/kerneltest"
)

// TestInterruptedRead: Ctrl-C ends a command that waits for standard input.
func TestInterruptedRead(t *testing.T) {
	stdin := os.Stdin
	in, out, err := os.Pipe()
	kerneltest.Must(t, err)
	os.Stdin = in
	received := make(chan os.Signal, 1) // so that a signal before Run does not end the test
	signal.Notify(received, os.Interrupt)
	t.Cleanup(func() {
		os.Stdin = stdin
		signal.Stop(received)
		out.Close()
		in.Close()
	})
	status := make(chan int, 1)
	go func() {
		var stdout, stderr bytes.Buffer
		status <- Run([]string{"validate", "-"}, &stdout, &stderr)
	}()
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); {
		kerneltest.Must(t, syscall.Kill(os.Getpid(), syscall.SIGINT))
		select {
		case got := <-status:
			if got != exitFailed {
				t.Errorf("status %d", got)
			}
			return
		case <-time.After(50 * time.Millisecond):
		}
	}
	t.Error("the command still waits for its input")
}
