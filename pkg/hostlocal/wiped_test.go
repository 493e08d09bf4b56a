// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// record writes a record of another plugin, or of host-local, for eth0 of a container.
func (l lab) record(name, id string, state map[string]any) {
	l.Helper()
	state["ipam"] = json.RawMessage("{" + l.ipam + "}")
	att, err := attachment.Open(&plugin.Request{Plugin: name, Network: l.network, ContainerID: id, IfName: "eth0", NetnsPath: l.netns})
	kerneltest.Must(l.T, err, att.Save(state))
	att.Close()
}

// recordOf returns the path of host-local's record of a container.
func (l lab) recordOf(id string) string {
	return filepath.Join(store.Root, l.network, "host-local-"+attachment.Key{Network: l.network, ContainerID: id, IfName: "eth0"}.Hash())
}

// While a verb holds an attachment, a wiped folder cannot get its lease back. No ADD takes its address meanwhile, and a later ADD or STATUS
// restores it. Until then there is no boot file, so that a kill changes nothing.
func TestPartlyRestored(t *testing.T) {
	for _, verb := range []string{"ADD", "STATUS"} {
		l := newLab(t, one)
		for i, id := range []string{"a", "b", "c"} {
			l.mustGive(id, fmt.Sprintf("10.1.2.%d/24", i+2))
		}
		before := l.leasesOf()
		kerneltest.Must(t, os.RemoveAll(l.dir))
		lock, err := attachment.Waiting.Key(attachment.Key{Network: l.network, ContainerID: "a", IfName: "eth0"})
		kerneltest.Must(t, err)
		l.ok(l.call("STATUS", "", ""))
		l.mustGive("d", "10.1.2.5/24")
		wish := l.call("ADD", "e", `"runtimeConfig":{"ips":["10.1.2.2"]}`)
		l.mustFail(wish, plugin.CodeAddressTaken, "it is leased to container a, interface eth0")
		if _, err := os.Lstat(filepath.Join(l.dir, bootFile)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("a lease is missing, and the folder has a boot file: %v", err)
		}
		lock.Close()
		l.ok(l.call(verb, "e", ""))
		l.ok(l.call("DEL", "d", ""))
		l.ok(l.call("DEL", "e", ""))
		if diff := cmp.Diff(before, l.leasesOf()); diff != "" {
			t.Errorf("after %s: %s", verb, diff)
		}
		if _, err := os.Lstat(filepath.Join(l.dir, bootFile)); err != nil {
			t.Error(err)
		}
	}
}

// Simultaneous ADDs in a wiped folder take no address of a live pod.
func TestWipedFolderParallel(t *testing.T) {
	l := newLab(t, one)
	for i := range 30 {
		l.ok(l.call("ADD", fmt.Sprint("old", i), ""))
	}
	before := l.leasesOf()
	for range 5 {
		kerneltest.Must(t, os.RemoveAll(l.dir))
		given, failed := l.addConcurrently(10)
		l.mustBeDistinct(given)
		if len(failed) > 0 {
			t.Errorf("got %+v", failed)
		}
		for id := range given {
			l.ok(l.call("DEL", id, ""))
		}
		if diff := cmp.Diff(before, l.leasesOf()); diff != "" {
			t.Fatal(diff)
		}
	}
}

// STATUS, GC and reload create the leases of live attachments that a wiped folder lacks, also of a killed ADD. Records without addresses
// and of dead pods change nothing. The lease has the time of the record, so that the removal of a dead pod finds it.
func TestRestoredLeases(t *testing.T) {
	for _, verb := range []string{"STATUS", "GC", "reload"} {
		l := newLab(t, `"ranges":[[{"subnet":"10.1.2.0/24"}],[{"subnet":"fd00::/64"}]]`)
		l.record("bridge", "killed", map[string]any{"unfinished": true, "addresses": []string{"10.1.2.8/24"}})
		l.record("host-local", "none", map[string]any{})
		dead := l
		dead.netns = "/nonexistent"
		dead.record("bridge", "dead", map[string]any{"addresses": []string{"10.1.2.9/24"}})
		l.mustGive("a", "10.1.2.2/24 fd00::2/64")
		l.mustGive("b", "10.1.2.3/24 fd00::3/64")
		before := l.leasesOf()
		if before["10.1.2.8"] != `600 "killed\r\neth0"` || len(before) != 5 {
			t.Error(before)
		}
		kerneltest.Must(t, os.RemoveAll(l.dir))
		if verb == "reload" {
			kerneltest.Must(t, Restore(slog.New(slog.DiscardHandler)))
		} else {
			l.ok(l.call(verb, "", `"cni.dev/valid-attachments":[{"containerID":"a","ifname":"eth0"},{"containerID":"b","ifname":"eth0"},
				{"containerID":"killed","ifname":"eth0"}]`))
		}
		if diff := cmp.Diff(before, l.leasesOf()); diff != "" {
			t.Errorf("%s: %s", verb, diff)
		}
		record, err := os.Stat(l.recordOf("a"))
		kerneltest.Must(t, err)
		lease, err := os.Stat(filepath.Join(l.dir, "fd00::2"))
		kerneltest.Must(t, err)
		if !lease.ModTime().Equal(record.ModTime()) {
			t.Errorf("%s: the lease is of %v, its record of %v", verb, lease.ModTime(), record.ModTime())
		}
		for _, id := range []string{"a", "b", "killed"} {
			l.ok(l.call("DEL", id, ""))
		}
		if left := l.leasesOf(); len(left) > 0 {
			t.Errorf("left %v", left)
		}
	}
}

// The record of sriov has the addresses of each VF, whose leases are of its own interface.
func TestRestoredVFs(t *testing.T) {
	l := newLab(t, one)
	vfs := []map[string]any{{"name": "eth0", "addresses": []string{"10.1.2.2/24"}}, {"name": "net1", "addresses": []string{"10.1.2.3/24"}}}
	l.record("sriov", "a", map[string]any{"vfs": vfs})
	l.mustGive("b", "10.1.2.4/24")
	want := map[string]string{"10.1.2.2": `600 "a\r\neth0"`, "10.1.2.3": `600 "a\r\nnet1"`, "10.1.2.4": `600 "b\r\neth0"`}
	if diff := cmp.Diff(want, l.leasesOf()); diff != "" {
		t.Error(diff)
	}
	chained := l
	chained.network, chained.dir = l.network+".vf", l.dir+".vf"
	l.record("sriov", "c", map[string]any{"vfs": vfs, "chained": true})
	chained.mustGive("d", "10.1.2.4/24")
	want = map[string]string{"10.1.2.2": `600 "c\r\neth0"`, "10.1.2.3": `600 "c\r\nnet1"`, "10.1.2.4": `600 "d\r\neth0"`}
	if diff := cmp.Diff(want, chained.leasesOf()); diff != "" {
		t.Error(diff)
	}
}

// GC restores no lease that it would remove again.
func TestGCRestoresValid(t *testing.T) {
	l := newLab(t, one)
	l.mustGive("a", "10.1.2.2/24")
	l.mustGive("b", "10.1.2.3/24")
	kerneltest.Must(t, os.RemoveAll(l.dir))
	log := l.call("GC", "", `"cni.dev/valid-attachments":[{"containerID":"a","ifname":"eth0"}]`).log
	if !strings.Contains(log, "address=10.1.2.2") || strings.Contains(log, "address=10.1.2.3") {
		t.Error(log)
	}
}

// ADD in another folder of the network does not get the leases that the first one lacks.
func TestRestoredFolder(t *testing.T) {
	l := newLab(t, one)
	l.mustGive("a", "10.1.2.2/24")
	kerneltest.Must(t, os.RemoveAll(l.dir))
	dir := t.TempDir()
	other := labIn(t, l.netns, dir, one)
	other.network, other.dir = l.network, filepath.Join(dir, l.network)
	other.mustGive("b", "10.1.2.2/24")
}

// While a record cannot be read, ADD and STATUS restore what they can and write no boot file, so that the rest follows once it can be.
// STATUS logs the record once, and other networks do not wait for it.
func TestUnreadRecord(t *testing.T) {
	l := newLab(t, one)
	l.mustGive("a", "10.1.2.2/24")
	l.mustGive("b", "10.1.2.3/24")
	record, err := os.ReadFile(l.recordOf("b"))
	kerneltest.Must(t, err, os.WriteFile(l.recordOf("b"), []byte(`{"format":99}`), 0o600), os.RemoveAll(l.dir))
	logged := ""
	for range 3 {
		a := l.call("STATUS", "", "")
		l.ok(a)
		logged += a.log
	}
	if strings.Count(logged, l.recordOf("b")) != 1 || !strings.Contains(logged, "format is 99") {
		t.Error(logged)
	}
	l.ok(l.call("ADD", "c", `"runtimeConfig":{"ips":["10.1.2.9"]}`))
	if _, err := os.Lstat(filepath.Join(l.dir, bootFile)); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a lease is missing, and the folder has a boot file: %v", err)
	}
	other := newLab(t, one)
	other.mustGive("a", "10.1.2.2/24")
	_, err = os.Lstat(filepath.Join(other.dir, bootFile))
	kerneltest.Must(t, err, os.WriteFile(l.recordOf("b"), record, 0o600))
	l.ok(l.call("STATUS", "", ""))
	want := map[string]string{"10.1.2.2": `600 "a\r\neth0"`, "10.1.2.3": `600 "b\r\neth0"`, "10.1.2.9": `600 "c\r\neth0"`}
	if diff := cmp.Diff(want, l.leasesOf()); diff != "" {
		t.Error(diff)
	}
	_, err = os.Lstat(filepath.Join(l.dir, bootFile))
	kerneltest.Must(t, err)
}

// While the records cannot be listed, no ADD in a wiped folder takes an address, which may be a live pod's.
func TestRecordsNotListed(t *testing.T) {
	l := newLab(t, one)
	l.mustGive("a", "10.1.2.2/24")
	kerneltest.Must(t, os.RemoveAll(l.dir))
	broken := filepath.Join(store.Root, "broken")
	ended := exec.Command("cat")
	_, err := ended.StdinPipe()
	kerneltest.Must(t, err, ended.Start(), os.Mkdir(broken, 0o700))
	kerneltest.Must(t, unix.Mount(fmt.Sprint("/proc/", ended.Process.Pid), broken, "", unix.MS_BIND, ""))
	kerneltest.Must(t, ended.Process.Kill())
	_ = ended.Wait() // the folder of an ended process cannot be read
	t.Cleanup(func() { _ = errors.Join(unix.Unmount(broken, unix.MNT_DETACH), os.Remove(broken)) })
	l.mustFail(l.call("ADD", "b", ""), plugin.CodeTryAgain, "leases of live pods may be missing")
	if left := l.leasesOf(); left["10.1.2.2"] == `600 "b\r\neth0"` {
		t.Errorf("ADD took %v", left)
	}
	kerneltest.Must(t, unix.Unmount(broken, unix.MNT_DETACH))
	l.mustGive("b", "10.1.2.3/24")
}

// GC restores without waiting for a verb that holds an attachment.
func TestGCWaitsForNoAttachment(t *testing.T) {
	l := newLab(t, one)
	l.mustGive("a", "10.1.2.2/24")
	kerneltest.Must(t, os.RemoveAll(l.dir))
	lock, err := attachment.Waiting.Key(attachment.Key{Network: l.network, ContainerID: "a", IfName: "eth0"})
	kerneltest.Must(t, err)
	defer lock.Close()
	start := time.Now()
	l.ok(l.call("GC", "", `"cni.dev/valid-attachments":[{"containerID":"a","ifname":"eth0"}]`))
	if waited := time.Since(start); waited >= store.LockTimeout {
		t.Errorf("GC waited %v for the attachment", waited)
	}
}

// The first STATUS in a folder without a boot file reads a record to find the missing lease and again under its lock, the second one none.
func TestStatusScansOnce(t *testing.T) {
	l := newLab(t, one)
	l.record("bridge", "a", map[string]any{"addresses": []string{"10.1.2.9/24"}})
	for _, want := range []int{2, 0} {
		for name, n := range openCounts(t, filepath.Join(store.Root, l.network), func() { l.ok(l.call("STATUS", "", "")) }) {
			if strings.HasPrefix(name, "bridge-") && n != want {
				t.Errorf("STATUS opened %s %d times, want %d", name, n, want)
			}
		}
	}
}

// TestDelReadsItsRecordOnce: DEL opens the record of its attachment once.
func TestDelReadsItsRecordOnce(t *testing.T) {
	l := newLab(t, one)
	l.mustGive("a", "10.1.2.2/24")
	opened := openCounts(t, filepath.Join(store.Root, l.network), func() { l.ok(l.call("DEL", "a", prev("10.1.2.2/24"))) })
	if n := opened[filepath.Base(l.recordOf("a"))]; n != 1 {
		t.Errorf("opened %d times", n)
	}
}

// TestDelOfTwoFolders: a second ADD after a change of dataDir has left leases in both folders, and DEL releases both. An unusable folder of
// the configuration is only logged, one of the record is an error.
func TestDelOfTwoFolders(t *testing.T) {
	l := newLab(t, one)
	l.mustGive("a", "10.1.2.2/24")
	dir := t.TempDir()
	changed := l
	changed.ipam = strings.Replace(l.ipam, filepath.Dir(l.dir), dir, 1)
	changed.dir = filepath.Join(dir, l.network)
	changed.put("10.1.2.7", "a\r\neth0")
	changed.put("10.1.2.8", "b\r\neth0")
	l.ok(changed.call("DEL", "a", ""))
	if left := l.leasesOf(); len(left) > 0 {
		t.Errorf("left %v", left)
	}
	if diff := cmp.Diff([]string{"10.1.2.8"}, sortedKeys(changed.leasesOf())); diff != "" {
		t.Error(diff)
	}
	l.ok(l.call("ADD", "c", ""))
	kerneltest.Must(t, os.RemoveAll(dir), os.WriteFile(dir, nil, 0o600), os.Rename(l.dir, l.dir+"~"), os.WriteFile(l.dir, nil, 0o600))
	l.mustFail(changed.call("DEL", "c", ""), plugin.CodeIO, "lease folder")
	kerneltest.Must(t, os.Remove(l.dir), os.Rename(l.dir+"~", l.dir))
	a := changed.call("DEL", "c", "")
	l.ok(a)
	if left := l.leasesOf(); len(left) > 0 || !strings.Contains(a.log, changed.dir) {
		t.Errorf("left %v; %s", left, a.log)
	}
}

// DEL finds the lease in the folder of the record, although the configuration names another one.
func TestDelOfChangedFolder(t *testing.T) {
	l := newLab(t, one)
	l.mustGive("a", "10.1.2.2/24")
	changed := l
	changed.ipam = strings.Replace(l.ipam, filepath.Dir(l.dir), t.TempDir(), 1)
	l.ok(changed.call("DEL", "a", ""))
	if left := l.leasesOf(); len(left) > 0 {
		t.Errorf("left %v", left)
	}
}

// ADD keeps a record that it cannot read, for example of a newer version. DEL removes it and the lease.
func TestNewerRecord(t *testing.T) {
	l := newLab(t, one)
	l.mustGive("a", "10.1.2.2/24")
	path := l.recordOf("a")
	newer := []byte(`{"format":99}`)
	kerneltest.Must(t, os.WriteFile(path, newer, 0o600))
	a := l.call("ADD", "a", "")
	l.mustFail(a, plugin.CodeAddressTaken, "record")
	if data, err := os.ReadFile(path); string(data) != string(newer) || !strings.Contains(a.Detail, "call DEL first") {
		t.Errorf("%s, %v; %+v", data, err, a)
	}
	l.ok(l.call("DEL", "a", ""))
	if left := l.leasesOf(); len(left) > 0 {
		t.Errorf("left %v", left)
	}
	l.mustGive("a", "10.1.2.3/24")
}

// A file is the lease of an address only if its name is the address in its usual form.
func TestOddNames(t *testing.T) {
	for _, name := range []string{"fd00:0::2", "fd00::2%eth0"} {
		l := newLab(t, `"subnet":"fd00::/126","rangeStart":"fd00::2","strictStatus":true`)
		l.put("fd00::3", "a\r\neth0")
		l.put(name, "a\r\neth0")
		l.ok(l.call("STATUS", "", ""))
	}
}

// STATUS of a full pool does not log a lease that it cannot read, since it runs every few seconds.
func TestStatusIsSilent(t *testing.T) {
	l := newLab(t, `"subnet":"10.1.2.0/30"`)
	kerneltest.Must(t, os.MkdirAll(filepath.Join(l.dir, "10.1.2.2"), 0o755))
	for range 2 {
		a := l.call("STATUS", "", "")
		l.ok(a)
		if strings.Contains(a.log, "unreadable") {
			t.Error(a.log)
		}
	}
}

// After a reboot, a route of length 32 says that somebody uses the address of an old lease.
func TestReclaimKeepsForeign(t *testing.T) {
	l := newLab(t, `"subnet":"10.1.2.0/30"`)
	l.mustGive("a", "10.1.2.2/30")
	l.reboot()
	connect(t, "10.1.2.1/32", "10.9.9.9/32")
	routeTo(t, "10.1.2.2/32")
	l.mustFail(l.call("ADD", "b", ""), plugin.CodeExhausted, "no IP addresses available")
	l.mustFail(l.call("ADD", "b", `"runtimeConfig":{"ips":["10.1.2.2"]}`), plugin.CodeAddressTaken, "it is leased to container a")
}

// TestDeletedLease: STATUS, GC and reload create a single deleted lease of a live pod again, so that ADD does not assign its address.
func TestDeletedLease(t *testing.T) {
	for _, verb := range []string{"STATUS", "GC", "reload"} {
		l := newLab(t, `"ranges":[[{"subnet":"10.1.2.0/24"}],[{"subnet":"fd00::/64"}]]`)
		l.mustGive("a", "10.1.2.2/24 fd00::2/64")
		l.mustGive("b", "10.1.2.3/24 fd00::3/64")
		before := l.leasesOf()
		kerneltest.Must(t, os.Remove(filepath.Join(l.dir, "fd00::3")), os.Remove(filepath.Join(l.dir, lastPrefix+"1")))
		if verb == "reload" {
			kerneltest.Must(t, Restore(slog.New(slog.DiscardHandler)))
		} else {
			l.ok(l.call(verb, "", `"cni.dev/valid-attachments":[{"containerID":"a","ifname":"eth0"},{"containerID":"b","ifname":"eth0"}]`))
		}
		if diff := cmp.Diff(before, l.leasesOf()); diff != "" {
			t.Errorf("%s: %s", verb, diff)
		}
		l.mustGive("c", "10.1.2.4/24 fd00::4/64")
	}
}
