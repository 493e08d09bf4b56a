// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"io"
)

// interruptible is a reader whose Read returns when the context ends. Run catches signals, so Ctrl-C would otherwise not end a read from a
// terminal.
type interruptible struct {
	ctx  context.Context
	from io.Reader
}

// Read uses a buffer of its own, because the interrupted read may still write into it after Ctrl-C.
func (i interruptible) Read(p []byte) (int, error) {
	type result struct {
		data []byte
		err  error
	}
	done := make(chan result, 1)
	go func() {
		data := make([]byte, len(p))
		n, err := i.from.Read(data)
		done <- result{data[:n], err}
	}()
	select {
	case r := <-done:
		return copy(p, r.data), r.err
	case <-i.ctx.Done():
		return 0, context.Cause(i.ctx)
	}
}
