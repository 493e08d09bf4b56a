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
	// maxConfiguration is the size limit for files with network configurations. Real network configurations are much smaller than this limit.
	maxConfiguration = 1 << 20
	// maxCached is the size limit for files in the cache of libcni. A plugin accepts a configuration of up to this size. A file in the cache
	// of libcni contains such a configuration.
	maxCached = 16 << 20
	// maxPidfile is the size limit for a file that contains a process ID and a newline.
	maxPidfile = 32
)

// readRegular reads a regular file. For a file that is larger than the limit, readRegular returns an error. readRegular follows symbolic
// links, because a configuration may be a symbolic link. Each error of readRegular contains the name of the file.
func readRegular(path string, most int64) ([]byte, error) {
	data, err := readSmall(path, most)
	var of *fs.PathError
	if errors.As(err, &of) {
		err = of.Err // the error contains the path once
	}
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return data, nil
}

func readSmall(path string, most int64) ([]byte, error) {
	// readSmall checks the type of the file before it opens the file. Opening a device may have side effects, and opening a socket returns
	// an unclear error.
	if info, err := os.Stat(path); err != nil || !info.Mode().IsRegular() {
		return nil, orIrregular(err)
	}
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // the file may be a FIFO by now, which must not block
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
