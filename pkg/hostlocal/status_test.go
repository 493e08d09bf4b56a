// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// STATUS fails for an exhausted pool only with strictStatus, and not while ADD can take an address from a pod of an earlier boot.
func TestStrictStatus(t *testing.T) {
	// the only addresses are 10.1.2.2 and both addresses of 10.1.3.0/31
	l := newLab(t, `"ranges":[[{"subnet":"10.1.2.0/30"},{"subnet":"10.1.3.0/31"}],[{"subnet":"fd00::/64"}]]`)
	strict := l
	strict.ipam += `,"strictStatus":true`
	l.ok(l.call("ADD", "a", ""))
	l.ok(l.call("ADD", "b", ""))
	strict.ok(strict.call("STATUS", "", ""))
	l.ok(l.call("ADD", "c", ""))
	l.ok(l.call("STATUS", "", ""))
	const says = "no IP addresses available in range set: 10.1.2.1-10.1.2.2,10.1.3.0-10.1.3.1: 3 of 3 addresses are leased in "
	strict.mustFail(strict.call("STATUS", "", ""), plugin.CodeNotAvailable, says+l.dir)
	l.reboot()
	strict.ok(strict.call("STATUS", "", ""))
	for _, id := range []string{"d", "e", "f"} {
		l.ok(l.call("ADD", id, ""))
	}
	strict.mustFail(strict.call("STATUS", "", ""), plugin.CodeNotAvailable, says)
	l.ok(l.call("DEL", "d", ""))
	strict.ok(strict.call("STATUS", "", ""))
}

// With two exhausted range sets, STATUS opens each file once. The lease of a gateway frees no address.
func TestStatusReadsOnce(t *testing.T) {
	l := newLab(t, `"ranges":[[{"subnet":"10.1.2.0/30"}],[{"subnet":"10.1.3.0/31"}]],"strictStatus":true`)
	l.ok(l.call("ADD", "a", ""))
	l.reboot()
	l.ok(l.call("DEL", "a", ""))
	l.put("10.1.2.1", "old\r\neth0")
	l.put("10.1.2.2", "new\r\neth0")
	l.put("10.1.3.0", "new\r\neth0")
	l.put("10.1.3.1", "new\r\neth0")
	if err := os.Chtimes(filepath.Join(l.dir, "10.1.2.1"), time.Time{}, time.Unix(1, 0)); err != nil {
		t.Fatal(err)
	}
	for name, n := range openCounts(t, l.dir, func() {
		l.mustFail(l.call("STATUS", "", ""), plugin.CodeNotAvailable, "no IP addresses available in range set: 10.1.2.1")
	}) {
		if n != 1 {
			t.Errorf("STATUS opened %s %d times", name, n)
		}
	}
}

// STATUS logs one line when a pool becomes exhausted, one when it has free addresses again, and none in between (F-47).
func TestStatusLogsChanges(t *testing.T) {
	l := newLab(t, `"ranges":[[{"subnet":"10.1.3.0/31"}]]`)
	lines := func(says string) (n int) {
		t.Helper()
		for range 3 {
			a := l.call("STATUS", "", "")
			l.ok(a)
			n += strings.Count(a.log, says)
		}
		return n
	}
	for range 2 {
		l.ok(l.call("ADD", "a", ""))
		if n := lines("level=WARN"); n != 0 {
			t.Errorf("%d warnings of a pool with room", n)
		}
		l.ok(l.call("ADD", "b", ""))
		if n := lines("level=WARN"); n != 1 {
			t.Errorf("%d warnings in three calls, want 1", n)
		}
		l.ok(l.call("DEL", "b", ""))
		if n := lines("available again"); n != 1 {
			t.Errorf("%d lines when the pool has room again, want 1", n)
		}
		l.ok(l.call("DEL", "a", ""))
	}
}

// STATUS succeeds while another process holds the lock, and creates no files (C-72).
func TestC72StatusIsPassive(t *testing.T) {
	l := newLab(t, one+`,"strictStatus":true`)
	l.ok(l.call("STATUS", "", ""))
	if entries, err := os.ReadDir(filepath.Dir(l.dir)); err != nil || len(entries) != 0 {
		t.Errorf("made %v, %v", entries, err)
	}
	l.mustGive("a", "10.1.2.2/24")
	dir, err := store.Open(l.dir)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	lock, err := dir.Lock(store.LockTimeout, lockFile, 0o750)
	if err != nil {
		t.Fatal(err)
	}
	defer lock.Unlock()
	before, modified := l.files(), l.modified()
	start := time.Now()
	l.ok(l.call("STATUS", "", ""))
	if waited := time.Since(start); waited >= store.LockTimeout {
		t.Errorf("STATUS waited %v for the lock", waited)
	}
	if diff := cmp.Diff(before, l.files()); diff != "" || modified != l.modified() {
		t.Errorf("STATUS changed the folder:\n%s", diff)
	}
}

// modified returns the modification time of the lease folder.
func (l lab) modified() time.Time {
	l.Helper()
	info, err := os.Stat(l.dir)
	if err != nil {
		l.Fatal(err)
	}
	return info.ModTime()
}

// STATUS fails if leases cannot be written to the lease folder.
func TestStatusOfBrokenFolders(t *testing.T) {
	for what, place := range map[string]func(dir string) error{
		"a file for the leases": func(dir string) error { return os.WriteFile(dir, nil, 0o600) },
		"a file above": func(dir string) error {
			return errors.Join(os.Remove(filepath.Dir(dir)), os.WriteFile(filepath.Dir(dir), nil, 0o600))
		},
		"a folder for the lock":   func(dir string) error { return os.MkdirAll(filepath.Join(dir, lockFile), 0o700) },
		"a link to nothing":       func(dir string) error { return os.Symlink("/nonexistent", dir) },
		"a read-only file system": func(dir string) error { return readOnly(filepath.Dir(dir)) },
	} {
		t.Run(what, func(t *testing.T) {
			l := newLab(t, one)
			t.Cleanup(func() { _ = unix.Unmount(filepath.Dir(l.dir), unix.MNT_DETACH) })
			if err := place(l.dir); err != nil {
				t.Fatal(err)
			}
			a := l.call("STATUS", "", "")
			l.mustFail(a, plugin.CodeNotAvailable, "lease folder: ")
			if strings.Count(a.Msg, filepath.Dir(l.dir)) != 1 {
				t.Errorf("the message must name the folder once: %s", a.Msg)
			}
			if a = l.call("ADD", "a", ""); a.Code == 0 || a.Code == plugin.CodeInternal {
				t.Errorf("ADD: %+v", a)
			}
		})
	}
}

// readOnly makes a folder read-only with a bind mount.
func readOnly(path string) error {
	return errors.Join(unix.Mount(path, path, "", unix.MS_BIND, ""), unix.Mount("", path, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
}

// If two plugins in the chain of a network have pools, STATUS logs an exhausted one only once.
func TestPoolsOfOneNetwork(t *testing.T) {
	full := newLab(t, `"ranges":[[{"subnet":"10.1.3.0/31"}]]`)
	room := full
	room.ipam = strings.Replace(full.ipam, "10.1.3.0/31", "10.1.4.0/24", 1)
	full.ok(full.call("ADD", "a", ""))
	full.ok(full.call("ADD", "b", ""))
	var log strings.Builder
	for range 3 {
		for _, l := range []lab{full, room} {
			a := l.call("STATUS", "", "")
			l.ok(a)
			log.WriteString(a.log)
		}
	}
	if n := strings.Count(log.String(), "level="); n != 1 || !strings.Contains(log.String(), "no IP addresses available") {
		t.Errorf("%d lines, want 1:\n%s", n, log.String())
	}
}

// TestStatusOpensNoRecord: STATUS opens no record while each pod has a lease.
func TestStatusOpensNoRecord(t *testing.T) {
	l := newLab(t, one)
	l.mustGive("a", "10.1.2.2/24")
	opened := openCounts(t, filepath.Join(store.Root, l.network), func() { l.ok(l.call("STATUS", "", "")) })
	if opened[filepath.Base(l.recordOf("a"))] > 0 {
		t.Error(opened)
	}
}

// TestStatusAfterNewRange: STATUS opens no record although the leases of older pods are outside the range.
func TestStatusAfterNewRange(t *testing.T) {
	l := newLab(t, one)
	l.mustGive("a", "10.1.2.2/24")
	l.ipam = strings.Replace(l.ipam, "10.1.2.0/24", "10.1.3.0/24", 1)
	l.mustGive("b", "10.1.3.2/24")
	opened := openCounts(t, filepath.Join(store.Root, l.network), func() { l.ok(l.call("STATUS", "", "")) })
	if opened[filepath.Base(l.recordOf("a"))] > 0 {
		t.Error(opened)
	}
}
