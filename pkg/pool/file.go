// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"fmt"
	"io"
	"os"
	"syscall"
)

// ReadFile reads a configuration for Parse. What is no regular file is an error: a pipe would keep the caller waiting.
func ReadFile(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = fmt.Errorf("open %s: it is no regular file", path)
	}
	if err != nil {
		return nil, err
	}
	return io.ReadAll(io.LimitReader(f, maxBytes+1))
}
