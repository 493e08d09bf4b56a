// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
)

// ReadFile follows symbolic links, but refuses a file that is irregular or too large.
func TestReadFile(t *testing.T) {
	dir := t.TempDir()
	at := func(name string) string { return filepath.Join(dir, name) }
	for _, err := range []error{os.WriteFile(at("file"), []byte("text"), 0o600), os.Symlink("file", at("link")), os.Mkdir(at("folder"), 0o700),
		unix.Mkfifo(at("pipe"), 0o600), os.WriteFile(at("large"), make([]byte, maxFile+1), 0o600),
		os.WriteFile(at("most"), make([]byte, maxFile), 0o600)} {
		if err != nil {
			t.Fatal(err)
		}
	}
	for name, want := range map[string]int{"file": 4, "link": 4, "most": maxFile, "folder": -1, "pipe": -1, "large": -1, "none": -1,
		"/dev/zero": -1} {
		path := at(name)
		if filepath.IsAbs(name) {
			path = name
		}
		data, err := ReadFile(path)
		if (err != nil) != (want < 0) || err == nil && len(data) != want {
			t.Errorf("%s: %d bytes, %v", name, len(data), err)
		}
	}
}

func TestReadIsBounded(t *testing.T) {
	path := t.TempDir()
	d := open(t, path)
	for size, ok := range map[int]bool{maxFile: true, maxFile + 1: false} {
		if err := os.WriteFile(filepath.Join(path, "big"), make([]byte, size), 0o600); err != nil {
			t.Fatal(err)
		}
		if got, err := d.Read("big"); (err == nil) != ok || ok && len(got) != size {
			t.Errorf("of %d bytes read %d, %v", size, len(got), err)
		}
	}
	if err := unix.Mkfifo(filepath.Join(path, "fifo"), 0o600); err != nil {
		t.Fatal(err)
	}
	if got, err := d.Read("fifo"); len(got) > 0 {
		t.Errorf("of a fifo: %q, %v", got, err)
	}
	if _, err := d.Read("."); err == nil {
		t.Error("read a folder")
	}
}

// Write refuses content that Read would refuse, and leaves no file.
func TestWriteIsBounded(t *testing.T) {
	path := t.TempDir()
	d := open(t, path)
	for name, write := range map[string]func(string, []byte, fs.FileMode) error{
		"write": d.Write, "sync": d.WriteSync, "overwrite": d.Overwrite, "create": d.Create,
	} {
		if err := write(name, make([]byte, maxFile+1), 0o600); !errors.Is(err, ErrTooLarge) ||
			!strings.Contains(err.Error(), filepath.Join(path, name)) {
			t.Errorf("%s: %v", name, err)
		}
		if left := onDisk(t, path); len(left) > 0 {
			t.Errorf("%s: left %d files", name, len(left))
		}
		err := write(name, make([]byte, maxFile), 0o600)
		if err == nil {
			_, err = d.Read(name)
		}
		if err := errors.Join(err, d.Remove(name)); err != nil {
			t.Errorf("%s of %d bytes: %v", name, maxFile, err)
		}
	}
}

// No name or symbolic link leads out of the folder.
func TestNoEscape(t *testing.T) {
	outside := t.TempDir()
	secret := filepath.Join(outside, "secret")
	if err := os.WriteFile(secret, []byte("secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	path := t.TempDir()
	up, err := filepath.Rel(path, secret)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(os.Symlink(secret, filepath.Join(path, "link")), os.Symlink(up, filepath.Join(path, "rel")),
		os.Symlink(filepath.Join(outside, "new"), filepath.Join(path, "dangling"))); err != nil {
		t.Fatal(err)
	}
	d := open(t, path)
	for _, name := range []string{"link", "rel", "dangling", up, secret, "../secret"} {
		data, readErr := d.Read(name)
		_, lockErr := d.Lock(LockTimeout, name, 0o600)
		_, lockAtErr := d.LockAt(LockTimeout, name, 0o600, 1)
		if readErr == nil || lockErr == nil || lockAtErr == nil || d.Create(name, nil, 0o600) == nil {
			t.Errorf("%s: read %q, %v, lock %v, %v", name, data, readErr, lockErr, lockAtErr)
		}
		_ = d.Write(name, []byte("x"), 0o600)
		_ = d.Remove(name)
	}
	if diff := cmp.Diff(map[string]string{"secret": "secret"}, onDisk(t, outside)); diff != "" {
		t.Errorf("outside:\n%s", diff)
	}
}

func TestCreateRefusesPaths(t *testing.T) {
	path := t.TempDir()
	if err := os.Mkdir(filepath.Join(path, "sub"), 0o700); err != nil {
		t.Fatal(err)
	}
	d := open(t, path)
	for _, name := range []string{"", ".", "..", "/x", "../x", "sub/x", "x/"} {
		if err := d.Create(name, nil, 0o600); err == nil {
			t.Errorf("created %q", name)
		}
	}
}
