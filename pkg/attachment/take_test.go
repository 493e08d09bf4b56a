// SPDX-License-Identifier: Apache-2.0

package attachment

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// Without a record, Take creates no files, and Remove removes the temporary file that a killed writer left. With one, Take returns the
// recorded state.
func TestTake(t *testing.T) {
	t.Cleanup(func() { os.RemoveAll(folder(t.Name())) })
	r := request(t.Name(), "id", "eth0")
	if att, _, found, err := Take[testState](r); att != nil || found || err != nil || att.Remove() != nil || att.RemoveWithLink() != nil {
		t.Errorf("without a folder: %v, %t, %v", att, found, err)
	}
	if _, err := os.Stat(filepath.Join(store.Root, t.Name())); err == nil {
		t.Error("Take made the folder")
	}
	a := mustOpen(t, r)
	if err := a.Save(testState{"x"}); err != nil {
		t.Fatal(err)
	}
	a.Close()
	if !Recorded(r) {
		t.Error("the record is not seen")
	}
	take := func(wantFound bool) {
		t.Helper()
		att, st, found, err := Take[testState](r)
		if err != nil {
			t.Fatal(err)
		}
		defer att.Close()
		if found != wantFound || found && (st.Value != "x" || att.pod != a.pod || att.netns != a.netns) {
			t.Errorf("found %t, want %t, %+v", found, wantFound, st)
		}
		if err := unix.FcntlFlock(mustFile(t, r).Fd(), unix.F_OFD_SETLK,
			&unix.Flock_t{Type: unix.F_WRLCK, Start: a.offset(), Len: 1}); err == nil {
			t.Error("the attachment is not locked")
		}
		if err := att.Remove(); err != nil || Recorded(r) {
			t.Errorf("the record is left: %v", err)
		}
	}
	take(true)
	torn := filepath.Join(store.Root, t.Name(), ".tmp-"+a.file())
	if err := os.WriteFile(torn, []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	take(false)
	if _, err := os.Stat(torn); err == nil {
		t.Error("the unfinished record is left")
	}
}

// TakeDead returns an attachment only if its namespace is gone.
func TestTakeDead(t *testing.T) {
	t.Cleanup(func() { os.RemoveAll(folder(t.Name())) })
	r := request(t.Name(), "new", "eth0")
	for netns, want := range map[string]bool{"/nonexistent": true, "/proc/self/ns/net": false} {
		of := request(t.Name(), "old", "eth0")
		of.NetnsPath = netns
		a := mustOpen(t, of)
		if err := a.Save(testState{"x"}); err != nil {
			t.Fatal(err)
		}
		a.Close()
		att, st, found, err := TakeDead[testState](r, plugin.Attachment{ContainerID: "old", IfName: "eth0"})
		if found != want || err != nil || (att != nil) != want || want && st.Value != "x" {
			t.Errorf("%s: %+v, %t, %v", netns, st, found, err)
		}
		att.Close()
	}
}

// RemoveWithLink removes only records with WithLink that another plugin wrote about the attachment.
func TestRemoveWithLink(t *testing.T) {
	t.Cleanup(func() { os.RemoveAll(folder(t.Name())) })
	requests := map[string]*plugin.Request{}
	for name, withLink := range map[string]bool{"bridge": false, "portmap": false, "bandwidth": true} {
		r := request(t.Name(), "id", "eth0")
		r.Plugin = name
		requests[name] = r
		a := mustOpen(t, r)
		a.WithLink = withLink
		if err := a.Save(testState{"x"}); err != nil {
			t.Fatal(err)
		}
		a.Close()
	}
	with, _, _, err := Take[testState](requests["bandwidth"])
	if err != nil || !with.WithLink {
		t.Fatalf("the record with the link lost that: %v", err)
	}
	with.SaveProgress(testState{"y"})
	if err := with.RemoveWithLink(); err != nil || !Recorded(requests["bandwidth"]) {
		t.Fatalf("removed its own record: %v", err)
	}
	with.Close()
	again, rec, _, err := Reopen[testState](Waiting, KeyOf(requests["bandwidth"]), "bandwidth")
	if err != nil || !rec.WithLink || !again.WithLink {
		t.Fatalf("saved again, the record lost that: %+v, %v", rec, err)
	}
	again.Close()
	att, _, _, err := Take[testState](requests["bridge"])
	if err != nil {
		t.Fatal(err)
	}
	defer att.Close()
	if err := att.RemoveWithLink(); err != nil {
		t.Error(err)
	}
	for name, want := range map[string]bool{"bridge": true, "portmap": true, "bandwidth": false} {
		if Recorded(requests[name]) != want {
			t.Errorf("%s: recorded %t, want %t", name, !want, want)
		}
	}
}

// A record whose state has another format is unreadable for GC, which finds the attachment's state by the hash in the file name.
func TestGCUnreadable(t *testing.T) {
	t.Cleanup(func() { os.RemoveAll(folder(t.Name())) })
	r := request(t.Name(), "", "")
	r.Valid = map[plugin.Attachment]bool{{ContainerID: "valid", IfName: "eth0"}: true}
	want := map[string]bool{}
	for _, id := range []string{"valid", "form", "torn", "sound"} {
		a := mustOpen(t, request(t.Name(), id, "eth0"))
		if err := a.Save(testState{"x"}); err != nil {
			t.Fatal(err)
		}
		data := map[string]string{"form": strings.Replace(content(t, a), `{"value":"x"}`, `"x"`, 1), "torn": "{"}[id]
		if data == "" {
			data = content(t, a)
		} else {
			want[a.Hash()] = true
		}
		if err := os.WriteFile(recordFile(a), []byte(data), 0o600); err != nil {
			t.Fatal(err)
		}
		a.Close()
	}
	gc, got := NewGC[testState](r), map[string]bool{}
	for hash := range gc.Unreadable() {
		got[hash] = true
		gc.ReportUnreadable(hash, nil)
	}
	if diff := cmp.Diff(want, got); diff != "" || gc.Err() != nil {
		t.Errorf("%v\n%s", gc.Err(), diff)
	}
	if records, unreadable, _ := ReadRecords(t.Name(), "test-"); len(records) != 2 || len(unreadable) != 0 {
		t.Errorf("left %v, %v", records, unreadable)
	}
}

func content(t *testing.T, a *Attachment) string {
	t.Helper()
	data, err := os.ReadFile(recordFile(a))
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// collect runs GC for the request. remove removes the state of one stale attachment.
func collect(r *plugin.Request, remove func(*Attachment, testState) error) error {
	gc := NewGC[testState](r)
	for att, st := range gc.Stale() {
		gc.Report(att, remove(att, st))
	}
	return gc.Err()
}

// GC deletes all stale attachments, continues after an error, and returns all errors (C-83).
func TestGC(t *testing.T) {
	t.Cleanup(func() { os.RemoveAll(folder(t.Name())) })
	r := request(t.Name(), "", "")
	for _, id := range []string{"a", "b", "c", "d"} {
		a := mustOpen(t, request(t.Name(), id, "eth0"))
		if err := a.Save(testState{id}); err != nil {
			t.Fatal(err)
		}
		a.Close()
	}
	r.Valid = map[plugin.Attachment]bool{{ContainerID: "b", IfName: "eth0"}: true, {ContainerID: "d", IfName: "net1"}: true}
	var seen []string
	err := collect(r, func(a *Attachment, st testState) error {
		seen = append(seen, st.Value)
		if a.ContainerID == "a" || a.ContainerID == "c" {
			return errors.New("cannot")
		}
		return a.Remove()
	})
	slices.Sort(seen)
	if diff := cmp.Diff([]string{"a", "c", "d"}, seen); diff != "" {
		t.Error(diff)
	}
	for _, id := range []string{"a", "c"} {
		if !r.Valid[plugin.Attachment{ContainerID: id, IfName: "eth0"}] {
			t.Errorf("the IPAM plugin may take the addresses of %s, which is not removed", id)
		}
		if want := "pod shop/web-0, container " + id + " eth0: cannot"; err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: want %q", err, want)
		}
	}
	if records, _ := List(t.Name(), "test"); len(records) != 3 {
		t.Errorf("left %v, want a, b and c", records)
	}
}

// GC waits while another process changes an attachment, and then uses the record of that process (C-85).
func TestGCWaits(t *testing.T) {
	t.Cleanup(func() { os.RemoveAll(folder(t.Name())) })
	r := request(t.Name(), "", "")
	r.Valid, r.Dead = map[plugin.Attachment]bool{}, map[plugin.Attachment]bool{{ContainerID: "a", IfName: "eth0"}: true}
	dead, alive := request(t.Name(), "a", "eth0"), request(t.Name(), "a", "eth0")
	dead.NetnsPath, alive.NetnsPath = "/nonexistent", "/proc/self/ns/net"
	a := mustOpen(t, dead)
	if err := a.Save(testState{"dead"}); err != nil {
		t.Fatal(err)
	}
	a.Close()
	a = mustOpen(t, alive) // an ADD of the same key runs
	result := make(chan error, 1)
	collected := 0
	go func() {
		result <- collect(r, func(a *Attachment, _ testState) error {
			collected++
			return a.Remove()
		})
	}()
	select {
	case err := <-result:
		t.Errorf("it did not wait for the lock: %v", err)
	case <-time.After(50 * time.Millisecond): // usually long enough for GC to wait; no assertion depends on it
	}
	if err := a.Save(testState{"alive"}); err != nil {
		t.Fatal(err)
	}
	a.Close()
	if err := <-result; err != nil || collected != 0 {
		t.Errorf("%v, collected %d: it is alive by now", err, collected)
	}
}
