// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/plugin"
)

// CHECK compares the owner in the lease file (C-65).
func TestCheck(t *testing.T) {
	l := newLab(t, one)
	l.mustGive("a", "10.1.2.2/24")
	l.ok(l.call("CHECK", "a", prev("10.1.2.2/24", "192.0.2.1/24", "fd00::1/64"))) // addresses of other plugins do not count
	l.mustFail(l.call("CHECK", "a", prev("10.1.2.3/24")), plugin.CodeStateDiffers, "the lease of 10.1.2.3 is missing")
	l.mustFail(l.call("CHECK", "b", prev("10.1.2.2/24")), plugin.CodeStateDiffers,
		"the lease of 10.1.2.2 belongs to container a, interface eth0")
	other := plugin.Attachment{ContainerID: "a", IfName: "net1"}
	l.mustFail(l.callFor("CHECK", other, prev("10.1.2.2/24")), plugin.CodeStateDiffers, "belongs to")
	l.put("10.1.2.2", "")
	l.mustFail(l.call("CHECK", "a", prev("10.1.2.2/24")), plugin.CodeStateDiffers, "a file that cannot be read")
	if err := os.RemoveAll(l.dir); err != nil {
		t.Fatal(err)
	}
	l.mustFail(l.call("CHECK", "a", prev("10.1.2.2/24")), plugin.CodeStateDiffers, "lease folder")
}

// DEL creates no files, and succeeds with an invalid configuration (C-45, C-47).
func TestDelNeedsLittle(t *testing.T) {
	l := newLab(t, one)
	l.ok(l.call("DEL", "a", ""))
	if _, err := os.Stat(l.dir); err == nil {
		t.Error("DEL made the lease folder")
	}
	l.mustGive("a", "10.1.2.2/24")
	broken := l
	broken.ipam = strings.Replace(l.ipam, one, `"ranges":7,"routes":"x","resolvConf":"/nonexistent"`, 1)
	l.ok(broken.call("DEL", "a", `"prevResult":[]`, "CNI_NETNS=", "CNI_ARGS=IP=x"))
	if l.files()["10.1.2.2"] != "" {
		t.Error("DEL left the lease")
	}
}

func TestGC(t *testing.T) {
	l := newLab(t, one)
	for i, id := range []string{"a", "b", "c"} {
		l.mustGive(id, fmt.Sprintf("10.1.2.%d/24", i+2))
	}
	l.callFor("ADD", plugin.Attachment{ContainerID: "a", IfName: "net1"}, "")
	l.put("10.1.2.20", "old-kept")
	l.put("10.1.2.21", "old-gone")
	l.put("10.1.2.22", "")
	l.age()
	l.ok(l.call("GC", "", `"cni.dev/valid-attachments":[{"containerID":"a","ifname":"eth0"},{"containerID":"c","ifname":"net1"},
		{"containerID":"old-kept","ifname":"eth0"}]`))
	var left []string
	for name := range l.files() {
		if _, err := netip.ParseAddr(name); err == nil {
			left = append(left, name)
		}
	}
	slices.Sort(left)
	if diff := cmp.Diff([]string{"10.1.2.2", "10.1.2.20", "10.1.2.22"}, left); diff != "" {
		t.Error(diff)
	}
	l.mustFail(l.call("GC", "", ""), plugin.CodeConfig, "valid-attachments is missing")
}

// If GC cannot delete one of several stale leases, it returns an error but deletes the others (C-83).
func TestGCGoesOn(t *testing.T) {
	l := newLab(t, one)
	for i, id := range []string{"a", "b", "c"} {
		l.mustGive(id, fmt.Sprintf("10.1.2.%d/24", i+2))
	}
	l.age()
	for _, name := range []string{"10.1.2.2", "10.1.2.3"} { // a mount point cannot be deleted
		path := filepath.Join(l.dir, name)
		if err := unix.Mount(path, path, "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(path, unix.MNT_DETACH) })
	}
	a := l.call("GC", "", `"cni.dev/valid-attachments":[]`)
	l.mustFail(a, plugin.CodeTryAgain, "lease 10.1.2.2")
	l.mustFail(a, plugin.CodeTryAgain, "lease 10.1.2.3")
	if _, left := l.files()["10.1.2.4"]; left {
		t.Error("the third lease is left")
	}
	for _, name := range []string{"10.1.2.2", "10.1.2.3"} {
		_ = unix.Unmount(filepath.Join(l.dir, name), unix.MNT_DETACH)
	}
	l.ok(l.call("GC", "", `"cni.dev/valid-attachments":[]`))
	if files := l.files(); files["10.1.2.2"]+files["10.1.2.3"] != "" {
		t.Errorf("left %v", files)
	}
}

// A lease may contain any interface name that the kernel allows.
func TestUnusualInterfaceNames(t *testing.T) {
	l := newLab(t, one)
	for _, name := range []string{"é", "日本", "a.b", "@x"} {
		of := plugin.Attachment{ContainerID: "a", IfName: name}
		l.ok(l.callFor("ADD", of, ""))
		l.ok(l.callFor("DEL", of, ""))
		if names, _ := filepath.Glob(filepath.Join(l.dir, "10.*")); len(names) > 0 {
			t.Errorf("%s left %q", name, names)
		}
	}
}

// GC keeps another plugin's lease of a valid attachment, even with an interface name that this plugin's ADD might refuse.
func TestGCKeepsUnusualInterfaces(t *testing.T) {
	for _, name := range []string{"default", "all", "a%b", "-x", "é", "\ufffd"} {
		l := newLab(t, one)
		l.mustGive("b", "10.1.2.2/24")
		lease := filepath.Join(l.dir, "10.1.2.9")
		if err := os.WriteFile(lease, []byte("a\r\n"+name), 0o600); err != nil {
			t.Fatal(err)
		}
		l.age()
		l.ok(l.call("GC", "", `"cni.dev/valid-attachments":[{"containerID":"a","ifname":"`+name+`"}]`))
		if files := l.files(); files["10.1.2.9"] == "" || files["10.1.2.2"] != "" {
			t.Errorf("%s: left %v", name, files)
		}
	}
}

// For a lease without a valid owner, parseOwner returns an ID that no container has.
func TestForeignOwners(t *testing.T) {
	for _, lease := range []string{"a\r\n\xff", "a\r\n\x01", "a\r\nx y", "a\r\nx/y", "x y\r\neth0"} {
		if of := parseOwner([]byte(lease)); of.ContainerID[0] != '?' {
			t.Errorf("%q belongs to %v", lease, of)
		}
	}
}

func TestGCWithoutFolder(t *testing.T) {
	l := newLab(t, one)
	l.ok(l.call("GC", "", `"cni.dev/valid-attachments":[]`))
	if _, err := os.Stat(l.dir); err == nil {
		t.Error("GC made the lease folder")
	}
}

func TestStatus(t *testing.T) {
	l := newLab(t, one)
	l.ok(l.call("STATUS", "", ""))
	if _, err := os.Stat(l.dir); err == nil {
		t.Error("STATUS made the lease folder")
	}
	dangling := newLab(t, one)
	if err := errors.Join(os.MkdirAll(filepath.Dir(dangling.dir), 0o755), os.Symlink("/nonexistent", dangling.dir)); err != nil {
		t.Fatal(err)
	}
	dangling.mustFail(dangling.call("STATUS", "", ""), plugin.CodeNotAvailable, "lease folder")
	blocked := newLab(t, one)
	if err := os.WriteFile(blocked.dir, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	l.mustFail(blocked.call("STATUS", "", ""), plugin.CodeNotAvailable, "lease folder")
	l.mustFail(blocked.call("ADD", "a", ""), plugin.CodeIO, "lease folder")
	l.mustFail(newLab(t, `"ranges":[]`).call("STATUS", "", ""), plugin.CodeConfig, "no IP ranges")
}

// addConcurrently runs ADD for many containers at once, and returns the address of each, and the failed calls.
func (l lab) addConcurrently(pods int) (given map[string]string, failed []answer) {
	var mu sync.Mutex
	var group sync.WaitGroup
	given = map[string]string{}
	for i := range pods {
		group.Go(func() {
			id := fmt.Sprintf("pod%d", i)
			a := l.call("ADD", id, "")
			mu.Lock()
			defer mu.Unlock()
			if a.Code != 0 {
				failed = append(failed, a)
				return
			}
			given[id] = a.addresses()
		})
	}
	group.Wait()
	return given, failed
}

// mustBeDistinct checks that each container has an address of its own, whose lease contains the container's ID.
func (l lab) mustBeDistinct(given map[string]string) {
	l.Helper()
	seen := map[string]string{}
	for id, address := range given {
		if other, ok := seen[address]; ok {
			l.Errorf("%s was given to %s and %s", address, id, other)
		}
		seen[address] = id
		bare, _, _ := strings.Cut(address, "/")
		if data, err := os.ReadFile(filepath.Join(l.dir, bare)); string(data) != id+"\r\neth0" {
			l.Errorf("the lease of %s for %s holds %q, %v", address, id, data, err)
		}
	}
}

func TestParallel(t *testing.T) {
	l := newLab(t, `"ranges":[[{"subnet":"10.1.2.0/25","rangeEnd":"10.1.2.50"}]]`)
	given, failed := l.addConcurrently(52)
	l.mustBeDistinct(given)
	if len(given) != 49 || len(failed) != 3 {
		t.Errorf("%d have an address, %d not: the set holds 49", len(given), len(failed))
	}
	for _, a := range failed {
		l.mustFail(a, plugin.CodeExhausted, "no IP addresses available")
	}
}

// A failed ADD releases no addresses of other pods.
func TestUndoKeepsOthers(t *testing.T) {
	l := newLab(t, one)
	l.mustGive("a", "10.1.2.2/24")
	l.mustFail(l.call("ADD", "b", `"runtimeConfig":{"ips":["10.1.2.2","10.1.2.9"]}`), plugin.CodeAddressTaken, "10.1.2.2")
	l.mustFail(l.call("ADD", "b", `"runtimeConfig":{"ips":["10.1.2.8","10.1.2.9"]}`), plugin.CodeConfig, "10.1.2.9")
	if files := l.files(); files["10.1.2.2"] == "" || files["10.1.2.8"] != "" {
		t.Errorf("left %v", files)
	}
}

func TestOwner(t *testing.T) {
	for text, want := range map[string]plugin.Attachment{
		"id\r\neth0": {ContainerID: "id", IfName: "eth0"}, "id": {ContainerID: "id"}, " id \n": {ContainerID: "id"}, "": {},
		"id\r\neth0\r\n": {ContainerID: "id", IfName: "eth0"}, "\r\neth0": {ContainerID: "eth0"},
	} {
		if got := parseOwner([]byte(text)); got != want {
			t.Errorf("%q: %+v, want %+v", text, got, want)
		}
	}
	if owns(plugin.Attachment{}, plugin.Attachment{ContainerID: "a", IfName: "b"}) {
		t.Error("an empty lease is everybody's")
	}
}

// The address of a lease that cannot be read is not assigned, because its owner is unknown; other pods get addresses as usual.
func TestUnreadableLease(t *testing.T) {
	l := newLab(t, one)
	l.mustGive("a", "10.1.2.2/24")
	if err := os.Mkdir(filepath.Join(l.dir, "10.1.2.4"), 0o755); err != nil {
		t.Fatal(err)
	}
	l.mustGive("b", "10.1.2.3/24")
	l.mustGive("c", "10.1.2.5/24")
	for _, id := range []string{"a", "b", "c"} {
		l.ok(l.call("DEL", id, ""))
	}
	l.ok(l.call("GC", "", `"cni.dev/valid-attachments":[]`))
	if _, err := os.Stat(filepath.Join(l.dir, "10.1.2.4")); err != nil {
		t.Error("it is gone")
	}
	// the runtime must call DEL of a pod again whose lease cannot be read
	l.mustGive("d", "10.1.2.6/24")
	if err := os.Truncate(filepath.Join(l.dir, "10.1.2.6"), 1<<30); err != nil {
		t.Fatal(err)
	}
	l.mustFail(l.call("ADD", "d", ""), plugin.CodeAddressTaken, "10.1.2.6 has been allocated to d")
	l.mustFail(l.call("DEL", "d", ""), plugin.CodeIO, "10.1.2.6: larger than")
	if err := os.WriteFile(filepath.Join(l.dir, "10.1.2.6"), []byte("d\r\neth0"), 0o600); err != nil {
		t.Fatal(err)
	}
	l.ok(l.call("DEL", "d", ""))
	if _, err := os.Stat(filepath.Join(l.dir, "10.1.2.6")); err == nil {
		t.Error("the second DEL left it")
	}
}

func TestBadConfiguration(t *testing.T) {
	l := newLab(t, `"ranges":[[{"subnet":"10.1.2.0/33"}]]`)
	for _, verb := range []string{"ADD", "CHECK", "STATUS"} {
		l.mustFail(l.call(verb, "a", prev()), plugin.CodeConfig, `subnet "10.1.2.0/33"`)
	}
	l.ok(l.call("DEL", "a", ""))
}

func TestUnreadableFolder(t *testing.T) {
	l := newLab(t, one)
	if err := errors.Join(os.MkdirAll(filepath.Dir(l.dir), 0o755), os.Symlink("/nonexistent", l.dir)); err != nil {
		t.Fatal(err)
	}
	if a := l.call("ADD", "a", ""); a.Code == 0 || a.Code == plugin.CodeInternal {
		t.Errorf("got %+v", a)
	}
}
