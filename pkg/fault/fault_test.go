// SPDX-License-Identifier: Apache-2.0

//go:build !podlace_fault

package fault

import (
	"errors"
	"io"
	"io/fs"
	"syscall"
	"testing"
)

// Without the build tag podlace_fault, the environment variables of package fault are ignored.
func TestProduction(t *testing.T) {
	t.Setenv("PODLACE_FAIL_AT", "1")
	for range 3 {
		if err := Point("x"); err != nil {
			t.Error(err)
		}
	}
}

// An error has the description of the change, and an interrupted change is repeated at most maxRetries times.
func TestChange(t *testing.T) {
	for _, c := range []struct {
		interrupted, want int
		after             error
		says              string
	}{
		{0, 1, nil, ""},
		{3, 4, nil, ""},
		{0, 1, syscall.EPERM, "link set x up: operation not permitted"},
		{2, 3, syscall.EPERM, "link set x up: operation not permitted"},
		{1000, maxRetries, nil, "link set x up: interrupted system call"},
	} {
		calls := 0
		err := Change("link set x up", func() error {
			if calls++; calls <= c.interrupted {
				return syscall.EINTR
			}
			return c.after
		})
		if got := errorText(err); calls != c.want || got != c.says || !errors.Is(err, c.after) && c.after != nil {
			t.Errorf("%+v: %d calls, %q", c, calls, got)
		}
	}
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func TestRetry(t *testing.T) {
	calls := 0
	err := Retry(func() error {
		calls++
		return []error{io.EOF, syscall.EINTR, fs.ErrExist}[calls-1]
	}, io.EOF)
	if calls != 3 || err != fs.ErrExist {
		t.Errorf("%d calls, %v", calls, err)
	}
}

func TestIgnore(t *testing.T) {
	for err, want := range map[error]error{nil: nil, syscall.ENOENT: nil, fs.ErrExist: nil, syscall.EPERM: syscall.EPERM} {
		if got := Ignore(err, syscall.ENOENT, syscall.EEXIST, fs.ErrExist); got != want {
			t.Errorf("%v: %v", err, got)
		}
	}
}
