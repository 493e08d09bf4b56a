// SPDX-License-Identifier: Apache-2.0

package claim

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/podlace/podlace/pkg/poddevices"
)

const ours = `"sriov.podlace.io":{"Devices":[{"PoolName":"node1","DeviceName":"0000-3b-10-2","RequestNames":["nic"],"CDIDeviceIDs":null}]}`

// stateEntry returns the entry of a claim in the kubelet's file.
func stateEntry(uid, name, drivers string, pods ...string) string {
	set := map[string]struct{}{}
	for _, p := range pods {
		set[p] = struct{}{}
	}
	text, _ := json.Marshal(set)
	return fmt.Sprintf(`{"ClaimUID":%q,"ClaimName":%q,"Namespace":"shop","PodUIDs":%s,"DriverState":{%s}}`, uid, name, text, drivers)
}

func stateText(claims ...string) string {
	return withChecksum(`{"kind":"DRACheckpoint","apiVersion":"` + stateVersion + `","ClaimInfoStateList":[` + strings.Join(claims,
		",") + `]}`)
}

// withChecksum returns a text with its checksum, in the format of the kubelet's file.
func withChecksum(text string) string {
	data, _ := json.Marshal(struct {
		Data     string
		Checksum uint32
	}{text, crc32.ChecksumIEEE([]byte(text))})
	return string(data)
}

// newRecord returns a claim record with one device for each request.
func newRecord(uid, namespace, name string, requests ...string) Record {
	r := Record{State: Prepared, Writer: "v1", Reserved: []Consumer{{Resource: "pods", Name: "web-0", UID: "pod-" + uid}}}
	for i, request := range requests {
		r.Devices = append(r.Devices, poddevices.Device{Resource: "example.com/fast", ID: fmt.Sprintf("0000:3b:10.%d", i),
			Claim: &poddevices.Claim{UID: uid, Namespace: namespace, Name: name, Request: request, Result: i, Pool: "node1",
				Device: fmt.Sprintf("0000-3b-10-%d", i)}})
	}
	return r
}

// newNode creates a folder of claim records, and a kubelet's root folder with a file of claims.
func newNode(t *testing.T, file string, records ...Record) (folder, kubelet string) {
	t.Helper()
	kubelet = t.TempDir()
	folder = filepath.Join(kubelet, "run", "claims")
	if file != "" {
		if err := os.WriteFile(stateFile(kubelet), []byte(file), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, r := range records {
		if err := Write(folder, r); err != nil {
			t.Fatal(err)
		}
	}
	return folder, kubelet
}

// TestFind checks that Find returns the devices of a pod's claims, also of a shared claim that was prepared for another pod.
func TestFind(t *testing.T) {
	shared, other := stateEntry("c-1", "shared", ours, "first", "second"), stateEntry("c-2", "other", ours, "third")
	one, two := newRecord("c-1", "shop", "shared", "a", "b"), newRecord("c-2", "shop", "other", "c")
	preparing := two
	preparing.State = Preparing
	for _, c := range []struct {
		title, file string
		records     []Record
		uid         string
		want        string // requests of the devices
		says        string // text of the error
	}{
		{title: "nothing was ever prepared", uid: "first"},
		{title: "no record", file: stateText(), uid: "first"},
		{title: "of other pods", file: stateText(shared, other), records: []Record{one, two}, uid: "fourth"},
		{title: "first pod", file: stateText(shared, other), records: []Record{one, two}, uid: "first", want: "a b"},
		{title: "second pod", file: stateText(shared, other), records: []Record{one, two}, uid: "second", want: "a b"},
		{title: "two claims", file: stateText(shared, stateEntry("c-2", "other", ours, "first")), records: []Record{one, two}, uid: "first",
			want: "a b c"},
		{title: "another driver", file: stateText(stateEntry("c-9", "gpu", `"gpu.example.com":{"Devices":null}`, "first")), uid: "first"},
		{title: "reserved, but not in the kubelet's file", file: stateText(), records: []Record{one}, uid: "pod-c-1", want: "a b"},
		{title: "reserved, and in the kubelet's file", file: stateText(stateEntry("c-1", "shared", ours, "pod-c-1")),
			records: []Record{one}, uid: "pod-c-1", want: "a b"},

		{title: "lost record", file: stateText(shared), uid: "first", says: "the pod has claim shop/shared: the claim is not prepared: it has no record"},
		{title: "being prepared", file: stateText(other), records: []Record{preparing}, uid: "third",
			says: "the pod has claim shop/other: the claim is not prepared"},
		{title: "no file", records: []Record{one}, uid: "first", says: "the pod may have claim shop/shared"},
		{title: "no file, another namespace", records: []Record{newRecord("c-3", "lab", "x", "a")}, uid: "first"},
		{title: "torn file", file: stateText(shared)[:50], records: []Record{one}, uid: "fourth", says: "the pod may have claim shop/shared"},
		{title: "wrong checksum", file: strings.Replace(stateText(shared), "second", "secord", 1), records: []Record{one}, uid: "second",
			says: "checksum"},
		{title: "another version", file: withChecksum(`{"apiVersion":"checkpoint.dra.kubelet.k8s.io/v2"}`), records: []Record{one}, uid: "fourth",
			says: `version "checkpoint.dra.kubelet.k8s.io/v2"`},
		{title: "no UID", file: stateText(shared), records: []Record{one}, says: "the runtime does not pass the pod's UID"},
		{title: "no UID, no claims", file: stateText()},
	} {
		t.Run(c.title, func(t *testing.T) {
			folder, kubelet := newNode(t, c.file, c.records...)
			devices, err := NewCache(folder, kubelet).Find(Pod{"shop", "web-0", c.uid})
			var got []string
			for _, d := range devices {
				got = append(got, d.Claim.Request)
				if d.Namespace != "shop" || d.Pod != "web-0" || d.UID != c.uid {
					t.Errorf("of pod %s/%s with UID %s", d.Namespace, d.Pod, d.UID)
				}
			}
			if strings.Join(got, " ") != c.want || (err != nil) != (c.says != "") || err != nil && !strings.Contains(err.Error(), c.says) {
				t.Errorf("got %q, %v", got, err)
			}
		})
	}
}

// TestDamaged changes or removes each byte of the kubelet's file in turn. Find must never take a pod with a claim for one without.
func TestDamaged(t *testing.T) {
	good := stateText(stateEntry("c-1", "shared", ours, "first"))
	folder, kubelet := newNode(t, good, newRecord("c-1", "shop", "shared", "a"))
	for i := range good {
		for _, bad := range []string{good[:i], good[:i] + "x" + good[i+1:], good[:i] + "\x00" + good[i+1:], good[:i] + good[i+1:]} {
			if err := os.WriteFile(stateFile(kubelet), []byte(bad), 0o600); err != nil {
				t.Fatal(err)
			}
			if devices, err := NewCache(folder, kubelet).Find(Pod{"shop", "web-0", "first"}); err == nil && len(devices) == 0 {
				t.Fatalf("byte %d: no claims in %s", i, bad)
			}
		}
	}
}

// TestUnreadable checks that Find fails for each pod that may have a device of a claim whose record cannot be read.
func TestUnreadable(t *testing.T) {
	folder, kubelet := newNode(t, stateText(stateEntry("c-1", "shared", ours, "first")), newRecord("c-1", "shop", "shared", "a"))
	path := filepath.Join(folder, "c-1")
	for _, text := range []string{"", "{", `{"format":1}`, `{"format":2,"pod-c-1":0}`, "pod-c-1"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := NewCache(folder, kubelet).Find(Pod{"shop", "web-0", "first"}); err == nil || !strings.Contains(err.Error(), "UID c-1") {
			t.Errorf("%q: got %v", text, err)
		}
		if _, err := NewCache(folder, kubelet).Find(Pod{"shop", "web-0", "another"}); err != nil {
			t.Errorf("%q: a pod of no claim: %v", text, err)
		}
		if _, err := NewCache(folder, kubelet).Find(Pod{"shop", "web-0", "pod-c-1"}); (err != nil) != strings.Contains(text, "pod-c-1") {
			t.Errorf("%q: reserved: %v", text, err)
		}
		if _, _, err := Holder(folder, "", "0000:3b:10.0"); err == nil {
			t.Errorf("%q: no claim has the device", text)
		}
		if _, err := NewCache(folder, t.TempDir()).Find(Pod{"shop", "web-0", "another"}); err == nil {
			t.Errorf("%q: without the kubelet's file: no error", text)
		}
	}
}

// TestStandIn checks that a claim with an unreadable record has exactly the devices that the record or the kubelet's file lists. If
// both are unreadable, any device may belong to it.
func TestStandIn(t *testing.T) {
	const newer = `{"format":2,"state":"prepared","devices":[{"id":"0000:3b:10.0","resource":"example.com/fast"}]}`
	noted := stateText(stateEntry("c-1", "shared", ours, "first"))
	for _, c := range []struct {
		title, record, kubelet string
		holds                  []string
		unknown                bool
	}{
		{title: "newer", record: newer, kubelet: stateText(), holds: []string{"0000:3b:10.0"}},
		{title: "newer, without the kubelet's file", record: newer, kubelet: "{", holds: []string{"0000:3b:10.0"}},
		{title: "newer, and the kubelet names another device", record: newer, kubelet: noted, holds: []string{"0000:3b:10.0", "0000:3b:10.2"}},
		{title: "corrupt", record: "{", kubelet: noted, holds: []string{"0000:3b:10.2"}},
		{title: "a device without address", record: `{"format":2,"devices":[{"id":"0000:3b:10.0"},{}]}`, kubelet: "{", unknown: true},
		{title: "corrupt, and the kubelet has no such claim", record: "{", kubelet: stateText()},
		{title: "corrupt, and being prepared", record: "{", unknown: true,
			kubelet: stateText(stateEntry("c-1", "shared", `"sriov.podlace.io":{}`, "first"))},
		{title: "corrupt, and the kubelet names no address", record: "{", unknown: true,
			kubelet: stateText(stateEntry("c-1", "shared", `"sriov.podlace.io":{"Devices":[{"DeviceName":"x"}]}`, "first"))},
		{title: "corrupt, and so is the kubelet's file", record: "{", kubelet: "{", unknown: true},
	} {
		t.Run(c.title, func(t *testing.T) {
			folder, kubelet := newNode(t, c.kubelet, newRecord("c-2", "shop", "other", "a", "b"))
			if err := os.WriteFile(filepath.Join(folder, "c-1"), []byte(c.record), 0o600); err != nil {
				t.Fatal(err)
			}
			cache := NewCache(folder, kubelet)
			list, err := cache.List()
			var holds []string
			for _, r := range list {
				for _, d := range r.Devices {
					if r.State == Damaged && r.Claim().UID == "c-1" {
						holds = append(holds, d.ID)
					}
				}
			}
			if diff := cmp.Diff(c.holds, holds); diff != "" || (err != nil) != c.unknown || cache.Damaged() == nil {
				t.Errorf("%v, damaged: %v\n%s", err, cache.Damaged(), diff)
			}
			for _, id := range []string{"0000:3b:10.2", "0000:3b:10.3"} {
				_, has, err := Holder(folder, kubelet, id)
				if has != slices.Contains(c.holds, id) || (err != nil) != c.unknown {
					t.Errorf("%s: held: %t, %v", id, has, err)
				}
			}
		})
	}
}

func TestRecord(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "run", "claims")
	if records, err := List(folder); len(records) > 0 || err != nil {
		t.Fatalf("%v, %v", records, err)
	}
	if _, err := Read(folder, "c-1"); !errors.Is(err, fs.ErrNotExist) {
		t.Fatal(err)
	}
	web, admin := newRecord("c-1", "shop", "web", "a", "b/c"), newRecord("c-2", "lab", "watch", "a")
	admin.Devices[0].Claim.Admin = true
	for _, r := range []Record{web, admin} {
		if err := Write(folder, r); err != nil {
			t.Fatal(err)
		}
	}
	got, err := Read(folder, "c-1")
	if err != nil || got.Time.IsZero() || got.String() != "claim shop/web" {
		t.Fatalf("%+v, %v", got, err)
	}
	web.Time, web.Format = got.Time, format
	if diff := cmp.Diff(web, got); diff != "" {
		t.Error(diff)
	}
	if records, err := List(folder); err != nil || len(records) != 2 || records[0].Claim().Name != "watch" {
		t.Errorf("%v, %v", records, err)
	}
	if r, ok, err := Holder(folder, "", "0000:3b:10.0"); r.Claim().UID != "c-1" || !ok || err != nil {
		t.Errorf("%v, %t, %v", r, ok, err)
	}
	for range 2 {
		if err := Remove(folder, "c-1"); err != nil {
			t.Fatal(err)
		}
	}
	if _, ok, err := Holder(folder, "", "0000:3b:10.0"); ok || err != nil { // administrative access does not hold the device
		t.Errorf("%t, %v", ok, err)
	}
	for what, change := range map[string]func(*Record){
		"no devices": func(r *Record) { r.Devices = nil }, "no claim": func(r *Record) { r.Devices[0].Claim = nil },
		"no state": func(r *Record) { r.State = "" }, "another claim": func(r *Record) { r.Devices[1].Claim.UID = "c-9" },
		"no address": func(r *Record) { r.Devices[1].ID = "" }, "no request": func(r *Record) { r.Devices[1].Claim.Request = "" },
		"bound but not held": func(r *Record) { r.Bound = []Binding{{ID: "0000:3b:10.7", Driver: "vfio-pci"}} },
		"bound to no driver": func(r *Record) { r.Bound = []Binding{{ID: r.Devices[0].ID}} },
		"a path":             func(r *Record) { r.Devices[0].Claim.UID, r.Devices[1].Claim.UID = "../x", "../x" },
	} {
		bad := newRecord("c-1", "shop", "web", "a", "b")
		change(&bad)
		if err := Write(folder, bad); err == nil {
			t.Errorf("%s: written", what)
		}
	}
	if names, err := os.ReadDir(folder); len(names) != 1 || err != nil {
		t.Errorf("%v, %v", names, err)
	}
}

// TestNotes checks that KubeletClaims returns the claims of all pods, but only those with devices of this driver.
func TestNotes(t *testing.T) {
	_, kubelet := newNode(t, stateText(stateEntry("c-1", "shared", ours, "first", "second"), stateEntry("c-2", "gpu", `"gpu.example.com":{}`,
		"third"),
		stateEntry("c-3", "idle", ours)))
	device := []KubeletDevice{{"node1", "0000-3b-10-2"}}
	got, err := KubeletClaims(kubelet)
	if diff := cmp.Diff([]KubeletClaim{{"c-1", "shop", "shared", device}, {"c-3", "shop", "idle", device}}, got); diff != "" || err != nil {
		t.Errorf("%v\n%s", err, diff)
	}
	if _, err := KubeletClaims(t.TempDir()); !errors.Is(err, fs.ErrNotExist) {
		t.Error(err)
	}
}

func FuzzState(f *testing.F) {
	f.Add([]byte(stateText(stateEntry("c-1", "shared", ours, "first"))))
	f.Add([]byte(withChecksum(`{"apiVersion":"checkpoint.dra.kubelet.k8s.io/v2"}`)))
	f.Fuzz(func(t *testing.T, data []byte) {
		var of []KubeletClaim
		text, err := unwrap(data)
		if err == nil {
			of, err = parseState(text, "first")
		}
		if err != nil && of != nil {
			t.Error("claims beside an error")
		}
		for _, n := range of {
			if n.UID == "" || n.Name == "" || n.Namespace == "" {
				t.Errorf("%+v", n)
			}
		}
	})
}

// BenchmarkFind looks up a pod without claims on a node that has 256.
func BenchmarkFind(b *testing.B) {
	kubelet := b.TempDir()
	var all []string
	for i := range 256 {
		uid := fmt.Sprintf("c-%d", i)
		all = append(all, stateEntry(uid, uid, ours, "pod-"+uid))
		if err := Write(filepath.Join(kubelet, "claims"), newRecord(uid, "shop", uid, "a")); err != nil {
			b.Fatal(err)
		}
	}
	if err := os.WriteFile(stateFile(kubelet), []byte(stateText(all...)), 0o600); err != nil {
		b.Fatal(err)
	}
	c := NewCache(filepath.Join(kubelet, "claims"), kubelet)
	for b.Loop() {
		if devices, err := c.Find(Pod{"shop", "web-0", "none"}); devices != nil || err != nil {
			b.Fatal(devices, err)
		}
	}
}

// TestCache changes the folder of claim records in many ways, and sets its modification time back by an hour. After each change, the
// cache must return what List and a new cache do, and fail if a record is unreadable.
func TestCache(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "claims")
	c := NewCache(folder, t.TempDir())
	agree := func(what string) {
		t.Helper()
		want, wantErr := List(folder)
		for range 2 {
			got, err := c.List()
			if diff := cmp.Diff(want, got, cmpopts.EquateEmpty()); diff != "" || (err == nil) != (wantErr == nil) {
				t.Errorf("%s: %v, want %v\n%s", what, err, wantErr, diff)
			}
			for _, uid := range []string{"pod-c-1", "pod-c-2", "none"} {
				want, wantErr := NewCache(folder, c.kubelet).reservedFor(uid)
				got, err := c.reservedFor(uid)
				if diff := cmp.Diff(want, got); diff != "" || (err == nil) != (wantErr == nil) {
					t.Errorf("%s, pod %s: %v, want %v\n%s", what, uid, err, wantErr, diff)
				}
			}
		}
	}
	agree("no folder")
	one := newRecord("c-1", "shop", "one", "a")
	for _, step := range []struct {
		what   string
		change func() error
	}{
		{"written", func() error { return Write(folder, one) }},
		{"two", func() error { return Write(folder, newRecord("c-2", "shop", "two", "a")) }},
		{"replaced", func() error { one.State = Preparing; return Write(folder, one) }},
		{"damaged", func() error { return os.WriteFile(filepath.Join(folder, "c-3"), []byte("{"), 0o600) }},
		{"damaged one removed", func() error { return Remove(folder, "c-3") }},
		{"removed", func() error { return Remove(folder, "c-1") }},
	} {
		if err := step.change(); err != nil {
			t.Fatal(err)
		}
		agree(step.what)
		long := time.Now().Add(-time.Hour)
		if err := os.Chtimes(folder, long, long); err != nil {
			t.Fatal(err)
		}
		agree(step.what + ", an hour ago")
		if step.what == "two" && c.seen == nil {
			t.Error("the files of an unchanged folder are read each time")
		}
	}
}
