// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// Sysctl is a setting below /proc/sys/net.
type Sysctl struct {
	Path  string // such as "ipv6/conf/eth0/accept_ra"
	Value string
}

const sysctlRoot = "/proc/sys/net"

// Set writes each setting that does not have its value yet. A setting that the kernel does not have, such as those of IPv6
// when it is switched off, is left out.
func (n *NS) Set(settings ...Sysctl) error {
	return n.within(func() error {
		for _, s := range settings {
			if err := s.set(); err != nil {
				return err
			}
		}
		return nil
	})
}

// Get returns the value of a setting; errors.Is fs.ErrNotExist when the kernel does not have it.
func (n *NS) Get(path string) (value string, err error) {
	err = n.within(func() error {
		data, err := os.ReadFile(filepath.Join(sysctlRoot, path))
		value = string(bytes.TrimSpace(data))
		return err
	})
	return value, err
}

func (s Sysctl) set() error {
	path := filepath.Join(sysctlRoot, s.Path)
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if errors.Is(err, fs.ErrPermission) || errors.Is(err, unix.EROFS) {
		f, err = os.OpenFile(path, os.O_RDONLY, 0)
	}
	if err != nil {
		return fmt.Errorf("sysctl %s: %w", s.Path, err)
	}
	defer f.Close()
	buf := make([]byte, 32)
	if got, err := f.Read(buf); err == nil && string(bytes.TrimSpace(buf[:got])) == s.Value {
		return nil
	}
	return change(fmt.Sprintf("sysctl %s=%s", s.Path, s.Value), func() error {
		_, err := f.WriteAt([]byte(s.Value), 0)
		return err
	})
}
