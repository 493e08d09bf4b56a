// SPDX-License-Identifier: Apache-2.0

package store

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/plugin"
)

func open(t *testing.T, path string) *Dir {
	t.Helper()
	d, err := Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { d.Close() })
	return d
}

// onDisk returns the content of every file in dir by name.
func onDisk(t *testing.T, dir string) map[string]string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	files := map[string]string{}
	for _, e := range entries {
		data, err := os.ReadFile(filepath.Join(dir, e.Name()))
		if err != nil {
			t.Fatal(err)
		}
		files[e.Name()] = string(data)
	}
	return files
}

func TestOpenAndMake(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a", "b")
	if _, err := Open(path); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("open a missing folder: %v", err)
	}
	for range 2 {
		d, err := Make(path, 0o700)
		if err != nil {
			t.Fatal(err)
		}
		if d.Path() != path || d.Close() != nil {
			t.Errorf("path %s", d.Path())
		}
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("%v, %v", info, err)
	}
	file := filepath.Join(path, "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Make(filepath.Join(file, "x"), 0o700); err == nil {
		t.Error("made a folder below a file")
	}
}

func TestFiles(t *testing.T) {
	path := t.TempDir()
	d := open(t, path)
	if _, err := d.Read("a"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("read a missing file: %v", err)
	}
	for _, content := range []string{"one", "", strings.Repeat("x", 3*4096), "two"} {
		if err := d.Write("a", []byte(content), 0o640); err != nil {
			t.Fatal(err)
		}
		if got, err := d.Read("a"); err != nil || string(got) != content {
			t.Errorf("read %q, %v", got, err)
		}
	}
	if err := d.Create("b", []byte("new"), 0o600); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]string{"a": "two", "b": "new"}, onDisk(t, path)); diff != "" {
		t.Error(diff)
	}
	for name, mode := range map[string]fs.FileMode{"a": 0o640, "b": 0o600} {
		if info, err := os.Stat(filepath.Join(path, name)); err != nil || info.Mode() != mode {
			t.Errorf("%s: %v, %v", name, info.Mode(), err)
		}
	}
	for range 2 {
		if err := d.Remove("a"); err != nil {
			t.Errorf("remove: %v", err)
		}
	}
	if diff := cmp.Diff(map[string]string{"b": "new"}, onDisk(t, path)); diff != "" {
		t.Error(diff)
	}
}

// creators returns the functions that create a file only if it does not exist.
func creators(d *Dir) map[string]func(string, []byte, fs.FileMode) error {
	return map[string]func(string, []byte, fs.FileMode) error{"unnamed": d.Create, "named": d.createNamed}
}

// Of many simultaneous writers of a new file, exactly one succeeds, and its content is complete from the start.
func TestCreateIsExclusive(t *testing.T) {
	const writers = 16
	path := t.TempDir()
	d := open(t, path)
	for name, create := range creators(d) {
		wins := make([]bool, writers)
		var group sync.WaitGroup
		for i := range writers {
			group.Go(func() {
				err := create(name, []byte(fmt.Sprint(i)), 0o600)
				if wins[i] = err == nil; err != nil && !errors.Is(err, fs.ErrExist) {
					t.Errorf("%s: %v", name, err)
				}
			})
		}
		group.Wait()
		winner := slices.Index(wins, true)
		if winner < 0 || slices.Contains(wins[winner+1:], true) {
			t.Errorf("%s: winners %v, want one", name, wins)
		}
		if got := onDisk(t, path); got[name] != fmt.Sprint(winner) {
			t.Errorf("%s holds %q, want %d", name, got[name], winner)
		}
	}
	if got := onDisk(t, path); len(got) != 2 {
		t.Errorf("leftovers in %v", got)
	}
}

// If a folder is in place of a file, the error has its name and a hint.
func TestFolderForFile(t *testing.T) {
	path := t.TempDir()
	d := open(t, path)
	if err := os.Mkdir(filepath.Join(path, "f"), 0o700); err != nil {
		t.Fatal(err)
	}
	_, read := d.Read("f")
	_, flock := d.Lock(LockTimeout, "f", 0o600)
	_, at := d.LockAt(LockTimeout, "f", 0o600, 7)
	for what, err := range map[string]error{"read": read, "lock": flock, "lock at": at} {
		var hinted *plugin.Error
		if !errors.As(err, &hinted) || !strings.Contains(err.Error(), filepath.Join(path, "f")) ||
			!strings.Contains(hinted.Hint, "rm -r '"+filepath.Join(path, "f")) {
			t.Errorf("%s: %v, %+v", what, err, hinted)
		}
	}
}

// While a writer replaces a file, every read returns complete content.
func TestWriteIsAtomic(t *testing.T) {
	d := open(t, t.TempDir())
	contents := []string{strings.Repeat("a", 8192), strings.Repeat("b", 16)}
	write := func(i int) {
		if err := d.Write("f", []byte(contents[i%2]), 0o600); err != nil {
			t.Error(err)
		}
	}
	write(0)
	var writer sync.WaitGroup
	done := make(chan struct{})
	writer.Go(func() {
		defer close(done)
		for i := range 500 {
			write(i)
		}
	})
	for reading := true; reading; {
		select {
		case <-done:
			reading = false
		default:
		}
		if got, err := d.Read("f"); err != nil || !slices.Contains(contents, string(got)) {
			t.Errorf("read %d bytes, %v", len(got), err)
			break
		}
	}
	writer.Wait()
}

// A failed write leaves the old content and no other file.
func TestFailedWriteKeepsOld(t *testing.T) {
	path := t.TempDir()
	d := open(t, path)
	if err := os.MkdirAll(filepath.Join(path, "f", "x"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := d.Write("f", []byte("new"), 0o600); err == nil {
		t.Error("replaced a folder")
	}
	if err := d.Create("f", []byte("new"), 0o600); !errors.Is(err, fs.ErrExist) {
		t.Errorf("create: %v", err)
	}
	if entries, _ := os.ReadDir(path); len(entries) != 1 {
		t.Errorf("leftovers: %v", entries)
	}
}

func TestOverwrite(t *testing.T) {
	path := t.TempDir()
	d := open(t, path)
	for _, content := range []string{"long content", "short", ""} {
		if err := d.Overwrite("f", []byte(content), 0o640); err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(map[string]string{"f": content}, onDisk(t, path)); diff != "" {
			t.Error(diff)
		}
	}
	if info, err := os.Stat(filepath.Join(path, "f")); err != nil || info.Mode() != 0o640 {
		t.Errorf("%v, %v", info.Mode(), err)
	}
}

// Each operation fails if the folder was deleted.
func TestFolderGone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x")
	d, err := Make(path, 0o700)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	_, listErr := d.List()
	_, readErr := d.Read("f")
	_, lockErr := d.Lock(LockTimeout, "f", 0o600)
	_, lockAtErr := d.LockAt(LockTimeout, "f", 0o600, 1)
	for what, err := range map[string]error{"write": d.Write("f", nil, 0o600), "create": d.Create("f", nil, 0o600),
		"create by name": d.createNamed("f", nil, 0o600),
		"overwrite":      d.Overwrite("f", nil, 0o600), "read": readErr, "lock": lockErr, "lock at": lockAtErr} {
		if err == nil {
			t.Errorf("%s succeeded", what)
		}
	}
	if names, _ := d.List(); len(names) > 0 {
		t.Errorf("listed %v, %v", names, listErr)
	}
	if err := d.Remove("f"); err != nil {
		t.Errorf("cannot remove a missing file: %v", err)
	}
}

// List changes nothing. Create by name removes an old temporary file of a killed process, and one with a time far in the future, which a
// change of the clock can cause.
func TestStaleFiles(t *testing.T) {
	path := t.TempDir()
	d := open(t, path)
	for name, age := range map[string]time.Duration{"a": time.Hour, tempPrefix + "old": 2 * time.Minute, tempPrefix + "future": -time.Hour,
		tempPrefix + "fresh": 0, "b": 0, ".lock": time.Hour} {
		file, stamp := filepath.Join(path, name), time.Now().Add(-age)
		if err := errors.Join(os.WriteFile(file, nil, 0o600), os.Chtimes(file, stamp, stamp)); err != nil {
			t.Fatal(err)
		}
	}
	names, err := d.List()
	slices.Sort(names)
	if diff := cmp.Diff([]string{".lock", "a", "b"}, names); diff != "" || err != nil {
		t.Error(err, diff)
	}
	if n := len(onDisk(t, path)); n != 6 {
		t.Errorf("%d files after List, want 6", n)
	}
	if err := d.createNamed("c", nil, 0o600); err != nil {
		t.Error(err)
	}
	want := map[string]string{"a": "", "b": "", "c": "", ".lock": "", tempPrefix + "fresh": ""}
	if diff := cmp.Diff(want, onDisk(t, path)); diff != "" {
		t.Error(diff)
	}
}

// Remove deletes a file and also the temporary file that a killed process left for it.
func TestRemoveTakesUnfinished(t *testing.T) {
	path := t.TempDir()
	d := open(t, path)
	if err := os.WriteFile(filepath.Join(path, tempPrefix+"a"), []byte("half"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := d.Write("a", []byte("whole"), 0o600); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(map[string]string{"a": "whole"}, onDisk(t, path)); diff != "" {
		t.Errorf("after a killed writer:\n%s", diff)
	}
	if err := errors.Join(os.WriteFile(filepath.Join(path, tempPrefix+"a"), []byte("half"), 0o600), d.Remove("a")); err != nil {
		t.Fatal(err)
	}
	if got := onDisk(t, path); len(got) > 0 {
		t.Errorf("left %v", got)
	}
}

// An error contains the full path of a file, not only the name within the folder.
func TestErrorsNameTheFolder(t *testing.T) {
	path := t.TempDir()
	d := open(t, path)
	if err := os.MkdirAll(filepath.Join(path, "full/x"), 0o700); err != nil {
		t.Fatal(err)
	}
	for what, f := range map[string]func() error{
		"Lock":             func() error { _, err := d.Lock(LockTimeout, "full", 0o600); return err },
		"LockAt":           func() error { _, err := d.LockAt(LockTimeout, "full", 0o600, 7); return err },
		"Read":             func() error { _, err := d.Read("none"); return err },
		"Read of a folder": func() error { _, err := d.Read("full"); return err },
		"Written":          func() error { _, err := d.Written("none"); return err },
		"SetWritten":       func() error { return d.SetWritten("none", time.Now()) },
		"Write":            func() error { return d.Write("full", nil, 0o600) },
		"Overwrite":        func() error { return d.Overwrite("full", nil, 0o600) },
		"Create":           func() error { return d.Create("full", nil, 0o600) },
		"createNamed":      func() error { return d.createNamed("full", nil, 0o600) },
		"Remove":           func() error { return d.Remove("full") },
	} {
		var code unix.Errno
		if err := f(); err == nil || !strings.Contains(err.Error(), path+"/") || !errors.As(err, &code) {
			t.Errorf("%s: %v, want an error of the kernel with %s", what, err, path)
		}
	}
}
