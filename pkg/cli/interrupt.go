// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"io"
)

// interruptible is a reader whose Read returns when the context ends. Without this type, Ctrl-C would not end a read from a terminal,
// because Run catches signals.
type interruptible struct {
	ctx  context.Context
	from io.Reader
}

// Read reads into a buffer of its own, because after Ctrl-C the interrupted read may still write into this buffer.
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
