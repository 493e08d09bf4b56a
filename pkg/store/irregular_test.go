// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/plugin"
)

// hangTimeout is much longer than any operation takes.
const hangTimeout = 20 * time.Second

// irregularFiles returns functions that each create one kind of non-regular file at a path.
func irregularFiles(t *testing.T) map[string]func(path string) error {
	elsewhere := filepath.Join(t.TempDir(), "fifo")
	if err := unix.Mkfifo(elsewhere, 0o600); err != nil {
		t.Fatal(err)
	}
	return map[string]func(path string) error{
		"FIFO":          func(path string) error { return unix.Mkfifo(path, 0o600) },
		"folder":        func(path string) error { return os.MkdirAll(filepath.Join(path, "more"), 0o700) },
		"link":          func(path string) error { return os.Symlink("other", path) },
		"dangling link": func(path string) error { return os.Symlink("none", path) },
		"link to FIFO":  func(path string) error { return os.Symlink(elsewhere, path) },
		"socket": func(path string) error {
			fd, err := unix.Socket(unix.AF_UNIX, unix.SOCK_STREAM, 0)
			if err != nil {
				return err
			}
			defer unix.Close(fd)
			return unix.Bind(fd, &unix.SockaddrUnix{Name: path})
		},
	}
}

// runPromptly fails the test if f hangs.
func runPromptly(t *testing.T, what string, f func() error) error {
	t.Helper()
	done := make(chan error, 1)
	go func() { done <- f() }()
	select {
	case err := <-done:
		return err
	case <-time.After(hangTimeout):
		t.Fatalf("%s hangs", what)
		return nil
	}
}

// An irregular file never blocks an operation. Reading or locking one is an error with a hint. A write replaces a FIFO, a socket or a
// device, but not a folder, and never follows a symbolic link.
func TestIrregular(t *testing.T) {
	for kind, place := range irregularFiles(t) {
		for what, use := range map[string]func(d *Dir) error{
			"read": func(d *Dir) error { _, err := d.Read("f"); return err },
			"read with time": func(d *Dir) error {
				_, _, err := d.ReadWritten("f")
				return err
			},
			"lock":             func(d *Dir) error { _, err := d.Lock(LockTimeout, "f", 0o600); return err },
			"lock at":          func(d *Dir) error { _, err := d.LockAt(LockTimeout, "f", 0o600, 7); return err },
			"lock at, no wait": func(d *Dir) error { _, err := d.LockAt(0, "f", 0o600, 7); return err },
		} {
			d := open(t, t.TempDir())
			if err := place(filepath.Join(d.path, "f")); err != nil {
				t.Fatal(err)
			}
			err := runPromptly(t, what+" of a "+kind, func() error { return use(d) })
			var hinted *plugin.Error
			if want := map[bool]error{true: unix.EISDIR, false: ErrIrregular}[kind == "folder"]; !errors.Is(err, want) ||
				!errors.As(err, &hinted) || hinted.Hint == "" {
				t.Errorf("%s of a %s: %v", what, kind, err)
			}
			if _, err := os.Lstat(filepath.Join(d.path, "none")); err == nil {
				t.Errorf("%s of a %s made the file that the link names", what, kind)
			}
		}
	}
}

// A write replaces an irregular file, both at the temporary and at the final name.
func TestIrregularWrite(t *testing.T) {
	for kind, place := range irregularFiles(t) {
		for at, folder := range map[string]bool{tempPrefix + "f": true, "f": false} {
			for what, write := range map[string]func(d *Dir) error{
				"write":     func(d *Dir) error { return d.Write("f", []byte("new"), 0o600) },
				"sync":      func(d *Dir) error { return d.WriteSync("f", []byte("new"), 0o600) },
				"overwrite": func(d *Dir) error { return d.Overwrite("f", []byte("new"), 0o600) },
			} {
				d := open(t, t.TempDir())
				if err := errors.Join(place(filepath.Join(d.path, at)), os.WriteFile(filepath.Join(d.path, "other"), nil, 0o600)); err != nil {
					t.Fatal(err)
				}
				err := runPromptly(t, what+" beside a "+kind, func() error { return write(d) })
				if kind == "folder" && !folder {
					if !errors.Is(err, unix.EISDIR) && !errors.Is(err, unix.EEXIST) {
						t.Errorf("%s over a folder: %v", what, err)
					}
					continue
				}
				if got, readErr := d.Read("f"); err != nil || string(got) != "new" {
					t.Errorf("%s with a %s at %s: %v, then %q, %v", what, kind, at, err, got, readErr)
				}
				if got, err := d.Read("other"); len(got) > 0 || err != nil {
					t.Errorf("%s with a %s at %s wrote through the link: %q, %v", what, kind, at, got, err)
				}
			}
		}
	}
}

// Names works only on folders.
func TestNames(t *testing.T) {
	dir := t.TempDir()
	l, err := net.Listen("unix", filepath.Join(dir, "socket"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if err := unix.Mkfifo(filepath.Join(dir, "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	if names, err := Names(dir, 0); len(names) != 2 || err != nil {
		t.Errorf("got %q, %v", names, err)
	}
	if names, err := Names(dir, 1); len(names) != 1 || err != nil {
		t.Errorf("got %q, %v", names, err)
	}
	for _, name := range []string{"fifo", "socket", "none"} {
		err := runPromptly(t, "names of a "+name, func() error { _, err := Names(filepath.Join(dir, name), 0); return err })
		if err == nil {
			t.Errorf("a %s has names", name)
		}
	}
}
