// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// leasesOf returns the owner of each address according to the lease files.
func (l lab) leasesOf() map[string]string {
	l.Helper()
	found := map[string]string{}
	for name, content := range l.files() {
		if _, err := netip.ParseAddr(name); err == nil {
			found[name] = content
		}
	}
	return found
}

// mutations returns functions that damage a file in different ways.
func mutations(random *rand.Rand) []func(path string, data []byte) error {
	write := func(path string, data []byte) error { return os.WriteFile(path, data, 0o600) }
	return []func(string, []byte) error{
		func(path string, _ []byte) error { return write(path, nil) },
		func(path string, data []byte) error { return write(path, data[:random.IntN(len(data)+1)]) },
		func(path string, data []byte) error {
			if len(data) > 0 {
				data[random.IntN(len(data))] ^= 1 << random.IntN(8)
			}
			return write(path, data)
		},
		func(path string, data []byte) error { return write(path, append(data, data...)) },
		func(path string, _ []byte) error { return write(path, []byte("\x00\xff{]\r\n\r\n")) },
		func(path string, _ []byte) error {
			return write(path, []byte(strings.Repeat("x", maxLease+random.IntN(9999))))
		},
		func(path string, _ []byte) error { return write(path, []byte(`{"format":1,"state":{}}`)) },
		func(path string, _ []byte) error { return os.Remove(path) },
		func(path string, _ []byte) error { return errors.Join(os.Remove(path), os.Mkdir(path, 0o700)) },
		func(path string, _ []byte) error {
			return errors.Join(os.Remove(path), os.MkdirAll(filepath.Join(path, "full"), 0o700))
		},
		func(path string, _ []byte) error { return errors.Join(os.Remove(path), unix.Mkfifo(path, 0o600)) },
		func(path string, _ []byte) error { return errors.Join(os.Remove(path), os.Symlink("/dev/zero", path)) },
	}
}

// A damaged lease file, record or boot file does not affect ADD and DEL of other pods. A pod keeps its lease until its DEL, which leaves no
// files (F-05).
func TestF05Mutations(t *testing.T) {
	kerneltest.Slow(t)
	seed := rand.Uint64()
	random := rand.New(rand.NewPCG(seed, 5))
	damage := mutations(random)
	for step := range 1000 {
		if t.Failed() {
			t.Fatalf("seed %d, step %d", seed, step-1)
		}
		l := newQuickLab(t, `"ranges":[[{"subnet":"10.1.2.0/24"}],[{"subnet":"fd00::/64"}]]`)
		for i := range 4 {
			l.ok(l.call("ADD", fmt.Sprint("pod", i), ""))
		}
		l.ok(l.call("DEL", "pod3", ""))
		path := l.anyFile(random)
		data, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if err := damage[random.IntN(len(damage))](path, data); err != nil {
			t.Fatal(err)
		}
		l.mustServeOthers(path, string(data))
	}
}

// anyFile returns the name of a random lease file, record or boot file.
func (l lab) anyFile(random *rand.Rand) string {
	l.Helper()
	var paths []string
	for _, dir := range []string{l.dir, filepath.Join(store.Root, l.network)} {
		entries, err := os.ReadDir(dir)
		if err != nil {
			l.Fatal(err)
		}
		for _, e := range entries {
			if e.Name() != lockFile && e.Name() != ".lock" {
				paths = append(paths, filepath.Join(dir, e.Name()))
			}
		}
	}
	return paths[random.IntN(len(paths))]
}

// mustServeOthers checks that CNI commands of other pods succeed. Those of the pod that owns the damaged file may fail.
func (l lab) mustServeOthers(damaged, content string) {
	l.Helper()
	victim := ""
	if filepath.Dir(damaged) == l.dir {
		victim, _, _ = strings.Cut(content, "\r\n")
	} else if _, after, ok := strings.Cut(content, `"containerID":"`); ok {
		victim, _, _ = strings.Cut(after, `"`)
	}
	given := l.call("ADD", "new", "")
	l.ok(given)
	var all []string
	for _, ip := range given.IPs {
		all = append(all, ip.Address)
	}
	l.ok(l.call("CHECK", "new", prev(all...)))
	l.ok(l.call("STATUS", "", ""))
	for i := range 3 {
		id := fmt.Sprint("pod", i)
		for _, addr := range []string{fmt.Sprintf("10.1.2.%d", i+2), fmt.Sprintf("fd00::%d", i+2)} {
			path := filepath.Join(l.dir, addr)
			if path == damaged {
				continue
			}
			if lease, err := os.ReadFile(path); string(lease) != id+"\r\neth0" {
				l.Errorf("%s: the lease of %s on %s: %q, %v", damaged, id, addr, lease, err)
			}
		}
		if a := l.call("DEL", id, ""); a.Code != 0 && id != victim {
			l.Errorf("%s: DEL %s: %+v", damaged, id, a)
		}
	}
	l.ok(l.call("DEL", "new", ""))
	for name := range l.namesLeft() { // GC skips young leases
		_ = os.Chtimes(filepath.Join(l.dir, name), time.Time{}, time.Now().Add(-time.Hour))
	}
	if a := l.call("GC", "", `"cni.dev/valid-attachments":[]`); a.Code != 0 && !strings.Contains(a.Msg, damaged+": directory not empty") {
		l.Errorf("GC with %s damaged: %+v", damaged, a)
	}
	for addr := range l.namesLeft() {
		if path := filepath.Join(l.dir, addr); path != damaged {
			l.Errorf("%s is damaged, and %s is left", damaged, path)
		}
	}
}

func (l lab) namesLeft() map[string]bool {
	l.Helper()
	entries, err := os.ReadDir(l.dir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) { // there is no folder before the first ADD
		l.Fatal(err)
	}
	left := map[string]bool{}
	for _, e := range entries {
		if _, err := netip.ParseAddr(e.Name()); err == nil {
			left[e.Name()] = true
		}
	}
	return left
}

// Without the last assigned address, or with another text in its file, ADD begins its search at the first address (F-06).
func TestF06LastAddress(t *testing.T) {
	l := newLab(t, one)
	l.mustGive("a", "10.1.2.2/24")
	l.mustGive("b", "10.1.2.3/24")
	l.ok(l.call("DEL", "a", ""))
	path := filepath.Join(l.dir, lastPrefix+"0")
	const first = "10.1.2.2/24"
	for content, want := range map[string]string{"": first, "10.1.": first, "fd00::2": first, "10.1.2.3": "10.1.2.4/24"} {
		kerneltest.Must(t, os.WriteFile(path, []byte(content), 0o600))
		l.mustGive("c", want)
		l.ok(l.call("DEL", "c", ""))
	}
	kerneltest.Must(t, os.Remove(path))
	l.mustGive("c", "10.1.2.2/24")
}

// If a cleanup program removes the lock file of the lease folder while pods start, no address is assigned twice, because link(2) creates a
// lease and fails if it exists (F-07).
func TestF07LockFileRemoved(t *testing.T) {
	l := newLab(t, one)
	l.mustGive("first", "10.1.2.2/24")
	stop, stopped := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(stopped)
		for {
			select {
			case <-stop:
				return
			default:
				_ = os.Remove(filepath.Join(l.dir, lockFile))
				time.Sleep(time.Millisecond)
			}
		}
	}()
	given, failed := l.addConcurrently(50)
	close(stop)
	<-stopped
	for _, a := range failed {
		l.mustFail(a, plugin.CodeTryAgain, "removed again and again")
	}
	if len(given) == 0 {
		t.Error("no pod got an address")
	}
	l.mustBeDistinct(given)
	for id := range given {
		l.ok(l.call("DEL", id, ""))
	}
	l.ok(l.call("DEL", "first", ""))
	if left := l.leasesOf(); len(left) > 0 {
		t.Errorf("DEL left %v", left)
	}
}

// While a stopped process holds the lock of the lease folder, ADD, DEL and GC fail with "try again" after a timeout. STATUS and CHECK need
// no lock and succeed (F-08).
func TestF08LockHolderStopped(t *testing.T) {
	kerneltest.Slow(t)
	l := newLab(t, one)
	l.mustGive("a", "10.1.2.2/24")
	file, err := os.OpenFile(filepath.Join(l.dir, lockFile), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Flock(int(file.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	holder := exec.Command("sleep", "600")
	holder.ExtraFiles = []*os.File{file}
	if err := holder.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = holder.Process.Kill(), holder.Wait() })
	if err := errors.Join(holder.Process.Signal(syscall.SIGSTOP), file.Close()); err != nil {
		t.Fatal(err)
	}
	var group sync.WaitGroup
	for verb, more := range map[string]string{"ADD": "", "DEL": "", "GC": `"cni.dev/valid-attachments":[]`} {
		group.Go(func() { l.mustFail(l.call(verb, "b", more), plugin.CodeTryAgain, "held by another process") })
	}
	l.ok(l.call("STATUS", "", ""))
	l.ok(l.call("CHECK", "a", prev("10.1.2.2/24")))
	group.Wait()
	if diff := cmp.Diff([]string{"10.1.2.2"}, sortedKeys(l.leasesOf())); diff != "" {
		t.Error(diff)
	}
}

func sortedKeys(m map[string]string) (keys []string) {
	for k := range m {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	return keys
}

// fill uses up the free blocks or inodes of a file system, of which room frees n.
func fill(t *testing.T, dir, what string) (room func(n int)) {
	t.Helper()
	var fillers []string
	for i := 0; ; i++ {
		path := filepath.Join(dir, fmt.Sprint(".filler", i))
		var data []byte
		if what == "blocks" {
			data = make([]byte, os.Getpagesize())
		}
		if err := os.WriteFile(path, data, 0o600); err != nil {
			if !errors.Is(err, unix.ENOSPC) {
				t.Fatal(err)
			}
			_ = os.Remove(path)
			break
		}
		fillers = append(fillers, path)
	}
	return func(n int) {
		for ; n > 0 && len(fillers) > 0; n-- {
			if err := os.Remove(fillers[0]); err != nil {
				t.Fatal(err)
			}
			fillers = fillers[1:]
		}
	}
}

// Without free blocks or inodes, ADD fails and leaves no files, while DEL and GC succeed. With very little space, each ADD either succeeds
// or leaves no files (F-09).
func TestF09Full(t *testing.T) {
	for _, what := range []string{"blocks", "inodes"} {
		t.Run(what, func(t *testing.T) {
			l := newLab(t, `"ranges":[[{"subnet":"10.1.2.0/24"}],[{"subnet":"fd00::/64"}]]`)
			data := filepath.Dir(l.dir)
			if err := unix.Mount("tmpfs", data, "tmpfs", 0, "size=256k,nr_inodes=64"); err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = unix.Unmount(data, unix.MNT_DETACH) })
			for i := range 4 {
				l.ok(l.call("ADD", fmt.Sprint("pod", i), ""))
			}
			room := fill(t, data, what)
			before := l.leasesOf()
			for more := range 12 {
				id := fmt.Sprint("new", more)
				a := l.call("ADD", id, "")
				if a.Code == 0 {
					l.ok(l.call("DEL", id, ""))
				} else if a.Code != plugin.CodeIO {
					t.Errorf("%d more: %+v", more, a)
				}
				if more == 0 && a.Code == 0 || more == 11 && a.Code != 0 {
					t.Errorf("%d more: %+v", more, a)
				}
				if diff := cmp.Diff(before, l.leasesOf()); diff != "" {
					t.Fatalf("%d more: %s", more, diff)
				}
				if more == 3 {
					fill(t, data, what)
					l.ok(l.call("DEL", "pod0", ""))
					l.ok(l.call("DEL", "pod0", ""))
					delete(before, "10.1.2.2")
					delete(before, "fd00::2")
				}
				room(1)
			}
			fill(t, data, what)
			l.age()
			l.ok(l.call("GC", "", `"cni.dev/valid-attachments":[{"containerID":"pod2","ifname":"eth0"}]`))
			if diff := cmp.Diff([]string{"10.1.2.4", "fd00::4"}, sortedKeys(l.leasesOf())); diff != "" {
				t.Error(diff)
			}
			l.ok(l.call("CHECK", "pod2", prev("10.1.2.4/24", "fd00::4/64")))
		})
	}
}

// On a read-only file system, ADD fails and leaves no files; DEL fails and keeps the lease (F-10).
func TestF10ReadOnly(t *testing.T) {
	l := newLab(t, one)
	data := filepath.Dir(l.dir)
	if err := unix.Mount("tmpfs", data, "tmpfs", 0, "size=1m"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(data, unix.MNT_DETACH) })
	l.mustGive("a", "10.1.2.2/24")
	before := l.files()
	if err := unix.Mount("", data, "", unix.MS_REMOUNT|unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	l.mustFail(l.call("ADD", "b", ""), plugin.CodeIO, filepath.Join(l.dir, lockFile)+": read-only file system")
	l.mustFail(l.call("DEL", "a", ""), plugin.CodeIO, filepath.Join(l.dir, lockFile)+": read-only file system")
	l.mustFail(l.call("GC", "", `"cni.dev/valid-attachments":[]`), plugin.CodeIO, filepath.Join(l.dir, lockFile)+": read-only file system")
	l.mustFail(l.call("STATUS", "", ""), plugin.CodeNotAvailable, "read-only file system")
	l.ok(l.call("CHECK", "a", prev("10.1.2.2/24")))
	if err := unix.Mount("", data, "", unix.MS_REMOUNT, ""); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, l.files()); diff != "" {
		t.Error(diff)
	}
	l.ok(l.call("DEL", "a", ""))
	if left := l.leasesOf(); len(left) > 0 {
		t.Errorf("left %v", left)
	}
}
