// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"
)

const (
	// maxConfiguration is far more than any configuration of a network has.
	maxConfiguration = 1 << 20
	// maxCached is what a plugin reads of a configuration, which libcni's cache holds.
	maxCached = 16 << 20
	// maxPidfile is more than a process ID and a newline have.
	maxPidfile = 32
)

// readRegular reads a regular file of at most most bytes. Links are followed: configurations may be links. An error names the file.
func readRegular(path string, most int64) ([]byte, error) {
	data, err := readSmall(path, most)
	var of *fs.PathError
	if errors.As(err, &of) {
		err = of.Err // the path is told once
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return data, nil
}

func readSmall(path string, most int64) ([]byte, error) {
	// First without opening: to open a device may do something, and a socket has no clear error.
	if info, err := os.Stat(path); err != nil || !info.Mode().IsRegular() {
		return nil, orIrregular(err)
	}
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a FIFO that is there by now must not block
	if err != nil {
		return nil, err
	}
	defer f.Close()
	if info, err := f.Stat(); err != nil || !info.Mode().IsRegular() {
		return nil, orIrregular(err)
	}
	data, err := io.ReadAll(io.LimitReader(f, most+1))
	if err == nil && int64(len(data)) > most {
		err = fmt.Errorf("larger than %d bytes", most)
	}
	return data, err
}

func orIrregular(err error) error {
	if err == nil {
		err = errors.New("want a regular file")
	}
	return err
}
