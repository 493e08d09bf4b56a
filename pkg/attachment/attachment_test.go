// SPDX-License-Identifier: Apache-2.0

package attachment

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

func TestMain(m *testing.M) { kerneltest.Main(m) }

// The names are fixed, because a new version must find the objects that an old one created. The hash of the reference plugins is from
// sha512sum(1).
func TestNames(t *testing.T) {
	for _, c := range []struct {
		key       Key
		hash      string
		host, pod string
		reference string
		offset    int64
	}{
		{Key{"podlace", "0123456789abcdef", "eth0"}, "2b16eae4e550402d", "fe:62:c4:f3:f9:e1", "b2:c5:e2:f1:f9:1b",
			"46d35c6a9e0ed75882799dbb49474a1d", 6105145428952464572},
		{Key{"podlace", "0123456789abcdef", "net1"}, "b22cfeee77b59b11", "56:12:58:ef:8d:5f", "7a:ea:fc:b3:49:40",
			"d954c4bcd4c878d7cbde9680e222f222", 7897649962870447949},
	} {
		ref := c.key.ReferenceHash()
		got := []any{c.key.Hash(), c.key.HostVeth(), c.key.MAC("host").String(), c.key.MAC("pod").String(), ref[:32], c.key.offset()}
		want := []any{c.hash, "veth" + c.hash[:11], c.host, c.pod, c.reference, c.offset}
		if diff := cmp.Diff(want, got); diff != "" || len(ref) != 128 {
			t.Errorf("%+v, %d digits:\n%s", c.key, len(ref), diff)
		}
	}
}

// Two keys get different names even if network, container ID and interface name concatenate to the same text.
func TestNamesDiffer(t *testing.T) {
	seen := map[string]Key{}
	for _, k := range []Key{{"a", "b", "c"}, {"ab", "", "c"}, {"", "ab", "c"}, {"a", "bc", ""}, {"a", "b", "d"}, {"a", "b.c", "c"},
		{"a.b", "c", "c"}} {
		for _, name := range []string{k.Hash(), k.MAC("host").String(), k.MAC("pod").String(), fmt.Sprint(k.offset())} {
			if other, ok := seen[name]; ok {
				t.Errorf("%+v and %+v share %s", k, other, name)
			}
			seen[name] = k
		}
		if mac := k.MAC("pod"); mac[0]&3 != 2 || len(mac) != 6 {
			t.Errorf("%s is no local unicast address", mac)
		}
		if k.offset() < 0 || len(k.HostVeth()) != 15 {
			t.Errorf("%+v: offset %d, %s", k, k.offset(), k.HostVeth())
		}
	}
}

func request(network, id, ifname string) *plugin.Request {
	return &plugin.Request{Plugin: "test", Verb: "ADD", Network: network, ContainerID: id, IfName: ifname, NetnsPath: "/run/netns/x",
		Pod: plugin.Pod{Namespace: "shop", Name: "web-0"}, Log: slog.New(slog.NewTextHandler(io.Discard, nil))}
}

type testState struct {
	Value string `json:"value"`
}

// attach opens an attachment in a network that no other test uses.
func attach(t *testing.T, id string) (*Attachment, *plugin.Request) {
	t.Helper()
	r := request(t.Name(), id, "eth0")
	a, err := Open(r)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); os.RemoveAll(folder(r.Network)) })
	return a, r
}

func mustOpen(t *testing.T, r *plugin.Request) *Attachment {
	t.Helper()
	a, err := Open(r)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func recordFile(a *Attachment) string { return filepath.Join(store.Root, a.Network, "test-"+a.Hash()) }

func TestRecord(t *testing.T) {
	a, _ := attach(t, "id")
	var st testState
	if ok, err := a.Load(&st); ok || err != nil {
		t.Errorf("before it was saved: %t, %v", ok, err)
	}
	for _, value := range []string{"one", "two"} {
		if err := a.Save(testState{value}); err != nil {
			t.Fatal(err)
		}
		if ok, err := a.Load(&st); !ok || err != nil || st.Value != value {
			t.Errorf("loaded %t, %v, %+v", ok, err, st)
		}
	}
	const want = `{"format":1,"network":"TestRecord","containerID":"id","ifname":"eth0","plugin":"test","pod":"shop/web-0","netns":"/run/netns/x",` +
		`"state":{"value":"two"}}` + "\n"
	if got, err := os.ReadFile(recordFile(a)); err != nil || string(got) != want {
		t.Errorf("file %s, %v", got, err)
	}
	if info, err := os.Stat(recordFile(a)); err != nil || info.Mode() != 0o600 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	for range 2 {
		if err := a.Remove(); err != nil {
			t.Errorf("remove: %v", err)
		}
	}
	if ok, err := a.Load(&st); ok || err != nil {
		t.Errorf("after it was removed: %t, %v", ok, err)
	}
}

// DEL and ADD succeed if the record is incomplete, or belongs to another version or plugin.
func TestUnreadableRecord(t *testing.T) {
	a, _ := attach(t, "id")
	if err := a.Save(testState{"x"}); err != nil {
		t.Fatal(err)
	}
	good, err := os.ReadFile(recordFile(a))
	if err != nil {
		t.Fatal(err)
	}
	for what, content := range map[string]string{
		"empty": "", "torn": string(good[:len(good)/2]), "zeros": "\x00\x00\x00", "null": "null", "other shape": `[]`,
		"other format":    strings.Replace(string(good), `"format":1`, `"format":2`, 1),
		"no format":       strings.Replace(string(good), `"format":1,`, "", 1),
		"other container": strings.Replace(string(good), `"id"`, `"other"`, 1),
		"other interface": strings.Replace(string(good), `"eth0"`, `"net1"`, 1),
		"no state":        strings.Replace(string(good), `,"state":{"value":"x"}`, "", 1),
		"other state":     strings.Replace(string(good), `{"value":"x"}`, `{"value":7}`, 1),
	} {
		if err := os.WriteFile(recordFile(a), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
		var st testState
		if ok, err := a.Load(&st); ok || err != nil {
			t.Errorf("%s: %t, %v: want it to count as none", what, ok, err)
		}
		if records, err := List(a.Network, "test"); err != nil || len(records) > 1 {
			t.Errorf("%s: listed %v, %v", what, records, err)
		}
	}
	if err := a.Save(testState{"y"}); err != nil {
		t.Errorf("replace it: %v", err)
	}
}

func TestRecorded(t *testing.T) {
	r := request(t.Name(), "id", "eth0")
	if Recorded(r) {
		t.Error("recorded in a network that is not there")
	}
	a, _ := attach(t, "id")
	if err := a.Save(testState{"x"}); err != nil {
		t.Fatal(err)
	}
	other := *r
	other.Plugin = "another"
	if !Recorded(r) || Recorded(request(t.Name(), "id", "net1")) || Recorded(&other) {
		t.Error("not what was saved")
	}
}

// A note belongs to the network and is not listed as a record.
// TestOpenRestricts: once a plugin has opened an attachment, no other user can write where the records are. The rest of the mode stays.
func TestOpenRestricts(t *testing.T) {
	r := &plugin.Request{Plugin: "x", Network: "restricted", ContainerID: "a", IfName: "eth0", NetnsPath: "/run/netns/x"}
	kerneltest.Must(t, os.MkdirAll(folder(r.Network), 0o700), os.Chmod(store.Root, 0o777), os.Chmod(folder(r.Network), 0o722))
	t.Cleanup(func() { kerneltest.Must(t, os.Chmod(store.Root, 0o700), store.RemoveAll(folder(r.Network))) })
	att, err := Open(r)
	kerneltest.Must(t, err)
	defer att.Close()
	for path, want := range map[string]fs.FileMode{store.Root: 0o755, folder(r.Network): 0o700} {
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: %v, %v, want %v", path, info.Mode(), err, want)
		}
	}
}

// TestNoteBySymlink: a symbolic link in place of a note is not followed.
func TestNoteBySymlink(t *testing.T) {
	kerneltest.Must(t, WriteNote("linked", "mark", "x"), os.WriteFile(store.Root+"/elsewhere", []byte("y"), 0o600),
		os.Remove(folder("linked")+"/.mark"), os.Symlink(store.Root+"/elsewhere", folder("linked")+"/.mark"))
	t.Cleanup(func() { kerneltest.Must(t, os.Remove(store.Root+"/elsewhere"), store.RemoveAll(folder("linked"))) })
	if text, ok := ReadNote("linked", "mark"); ok {
		t.Errorf("read %q through a symbolic link", text)
	}
}

func TestNotes(t *testing.T) {
	a, r := attach(t, "id")
	if _, ok := ReadNote(a.Network, "mark"); ok {
		t.Error("noted before")
	}
	for _, text := range []string{"longer text", "text"} {
		err := WriteNote(a.Network, "mark", text)
		got, ok := ReadNote(a.Network, "mark")
		if _, other := ReadNote(a.Network, "other"); err != nil || !ok || got != text || other {
			t.Errorf("noted %q: %v", got, err)
		}
	}
	if records, err := List(r.Network, r.Plugin); len(records) > 0 || err != nil {
		t.Errorf("listed %v, %v", records, err)
	}
	for range 2 {
		err := RemoveNote(a.Network, "mark")
		if _, ok := ReadNote(a.Network, "mark"); err != nil || ok {
			t.Errorf("still noted: %v", err)
		}
	}
}

// An unreadable folder is an error, not an empty folder.
func TestUnreadableFolder(t *testing.T) {
	r := request(t.Name(), "id", "eth0")
	if err := errors.Join(os.MkdirAll(store.Root, 0o700), os.WriteFile(folder(r.Network), nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.Remove(folder(r.Network)) })
	_, openErr := Open(r)
	_, listErr := List(r.Network, r.Plugin)
	_, _, _, takeErr := Take[testState](r)
	gcErr := collect(r, func(*Attachment, testState) error { return nil })
	if openErr == nil || listErr == nil || takeErr == nil || gcErr == nil {
		t.Errorf("open %v, list %v, take %v, GC %v", openErr, listErr, takeErr, gcErr)
	}
}

// mustFile opens a second file descriptor for a network's lock file.
func mustFile(t *testing.T, r *plugin.Request) *os.File {
	t.Helper()
	f, err := os.OpenFile(filepath.Join(folder(r.Network), lockFile), os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

// Save refuses a record that is too large for DEL to read. Load treats one as unreadable, without an error, because another version may
// have written it.
func TestRecordTooLarge(t *testing.T) {
	a, r := attach(t, "large")
	defer a.Close()
	if err := a.Save(testState{"small"}); err != nil {
		t.Fatal(err)
	}
	if err := a.Save(testState{strings.Repeat("x", 4<<20)}); plugin.Code(err) != plugin.CodeConfig {
		t.Errorf("got %v", err)
	}
	if st, ok, err := Checked[testState](r); err != nil || !ok || st.Value != "small" {
		t.Errorf("the record of before: %+v, %t", st, ok)
	}
	if err := os.WriteFile(filepath.Join(a.dir.Path(), a.file()), make([]byte, 5<<20), 0o600); err != nil {
		t.Fatal(err)
	}
	if ok, err := a.Load(&testState{}); ok || err != nil {
		t.Errorf("a large record of another version: %t, %v", ok, err)
	}
}

// DEL fails while the record cannot be read, because it may list existing state.
func TestUnreadableRecordFile(t *testing.T) {
	a, r := attach(t, "id")
	a.Close()
	path := recordFile(a)
	if err := errors.Join(os.WriteFile(path, nil, 0o600), unix.Mount("/proc/self/mem", path, "", unix.MS_BIND, "")); err != nil { // reads fail
		t.Fatal(err)
	}
	t.Cleanup(func() { unix.Unmount(path, unix.MNT_DETACH) })
	_, _, found, err := Take[testState](r)
	if found || !errors.Is(err, unix.EIO) || !strings.Contains(err.Error(), path) {
		t.Errorf("found %t, %v", found, err)
	}
}

// DEL removes a folder in place of the record, like any unreadable record.
func TestFolderForRecord(t *testing.T) {
	a, r := attach(t, "id")
	a.Close()
	if err := os.Mkdir(recordFile(a), 0o700); err != nil {
		t.Fatal(err)
	}
	if _, damaged, err := Scan(); err != nil || len(damaged) != 1 || damaged[0].Reason.Error() != "is a directory" {
		t.Errorf("%v, %v", damaged, err)
	}
	att, _, found, err := Take[testState](r)
	if found || err != nil {
		t.Fatalf("found %t, %v", found, err)
	}
	defer att.Close()
	if err := att.Remove(); err != nil || Recorded(r) {
		t.Error(err)
	}
}

// Calls for one attachment run one after the other, also those of different plugins; different attachments do not wait for each other.
func TestLock(t *testing.T) {
	a, r := attach(t, "id")
	mustOpen(t, request(t.Name(), "id", "net1")).Close()
	second := *r
	second.Plugin = "another"
	opened := make(chan error, 1)
	go func() {
		b, err := Open(&second)
		if err == nil {
			b.Close()
		}
		opened <- err
	}()
	select {
	case err := <-opened:
		t.Fatalf("opened twice: %v", err)
	case <-time.After(60 * time.Millisecond):
	}
	a.lock.Unlock()
	if err := <-opened; err != nil {
		t.Error(err)
	}
}

func TestList(t *testing.T) {
	if records, err := List("none", "test"); records != nil || err != nil {
		t.Errorf("of a network that is not there: %v, %v", records, err)
	}
	a, _ := attach(t, "a")
	b := mustOpen(t, request(t.Name(), "b", "eth0"))
	t.Cleanup(b.Close)
	b.plugin = "testing" // the other plugin's name is a prefix of this name
	junk := filepath.Join(store.Root, t.Name(), "test-junk")
	if err := errors.Join(a.Save(testState{"a"}), b.Save(testState{"b"}), os.WriteFile(junk, []byte("x"), 0o600)); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string][]string{"test": {"a"}, "testing": {"b"}, "tes": nil} {
		records, err := List(t.Name(), name)
		var got []string
		for _, rec := range records {
			got = append(got, rec.ContainerID)
		}
		slices.Sort(got)
		if diff := cmp.Diff(want, got); diff != "" || err != nil {
			t.Errorf("%q: %v\n%s", name, err, diff)
		}
	}
}

func FuzzRecord(f *testing.F) {
	for _, seed := range []string{"", "{}", "null", "[]", `{"format":1}`,
		`{"format":1,"network":"n","containerID":"i","ifname":"e","state":{}}`,
		`{"format":1,"state":null}`, `{"format":2}`, `{"format":"1"}`, `{"format":1.5}`} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		if rec, err := parse(data); (err == nil) != (rec.Format == format) {
			t.Errorf("%q: %+v, %v", data, rec, err)
		}
	})
}

// An address has the same MAC in all attachments of a network, and another one in another network.
func TestAddressMAC(t *testing.T) {
	one, two := netip.MustParseAddr("10.0.0.1"), netip.MustParseAddr("fd00::1")
	a, b, c := Key{"net", "a", "eth0"}, Key{"net", "b", "eth1"}, Key{"other", "a", "eth0"}
	if got := a.AddressMAC(one).String(); got != b.AddressMAC(one).String() || got == c.AddressMAC(one).String() ||
		got == a.AddressMAC(two).String() {
		t.Error(got, b.AddressMAC(one), c.AddressMAC(one), a.AddressMAC(two))
	}
	if mac := a.AddressMAC(two); mac[0]&3 != 2 || len(mac) != 6 {
		t.Errorf("%s is no local unicast address", mac)
	}
}
