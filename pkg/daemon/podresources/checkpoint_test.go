// SPDX-License-Identifier: Apache-2.0

package podresources

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/podlace/podlace/pkg/poddevices"
)

const before, after = "11111111-0000-4000-8000-000000000001", "22222222-0000-4000-8000-000000000002"

// TestSameName checks that each of two pods with the same name gets its own devices, if the kubelet returns both, or Get the wrong one
// for some time.
func TestSameName(t *testing.T) {
	both := func(int) ([]*api.PodResources, error) {
		return []*api.PodResources{webPod("app", "a", "b"), webPod("app", "c")}, nil
	}
	listed := startServer(t, &fakeKubelet{list: both})
	late := startServer(t, &fakeKubelet{get: func(n int, _ *api.GetPodResourcesRequest) (*api.PodResources, error) {
		return []*api.PodResources{webPod("app", "a", "b"), webPod("app"), webPod("app", "c")}[min(n, 2)], nil
	}})
	early := startServer(t, &fakeKubelet{get: func(n int, _ *api.GetPodResourcesRequest) (*api.PodResources, error) {
		return []*api.PodResources{webPod("app", "c"), webPod("app", "a"), webPod("other", "a", "b"), webPod("app", "a", "b")}[min(n, 3)], nil
	}})
	for _, k := range []*fakeKubelet{listed, late, early} {
		k.note(t, fast(before, "app", "a", "b"), fast(after, "app", "c"))
	}
	for uid, want := range map[string][]string{before: {"a", "b"}, after: {"c"}} {
		if got, err := ask(t, listed.Kubelet, uid); err != nil || !cmp.Equal(got, webDevices("app", want...)) {
			t.Errorf("%s: %v, %v", uid, got, err)
		}
	}
	if got, err := ask(t, late.Kubelet, after); err != nil || !cmp.Equal(got, webDevices("app", "c")) || len(late.questions()) != 3 {
		t.Errorf("%v, %v, asked %q", got, err, late.questions())
	}
	if got, err := ask(t, early.Kubelet, before); err != nil || !cmp.Equal(got, webDevices("app", "a", "b")) || len(early.questions()) != 4 {
		t.Errorf("%v, %v, asked %q", got, err, early.questions())
	}
}

// TestContradiction checks that the error has the devices of both sources if PodResources and the checkpoint contradict each other
// until the deadline.
func TestContradiction(t *testing.T) {
	for _, c := range []struct {
		name, says string
		told       *api.PodResources
		noted      []written
	}{
		{"other devices", "lists [app example.com/fast a, app example.com/fast b], but CHECKPOINT lists [app example.com/fast c] for UID " +
			after + ": the list is of another pod",
			webPod("app", "b", "a"), []written{fast(before, "app", "a", "b"), fast(after, "app", "c")}},
		{"one more", "[app example.com/fast a, app example.com/fast b], but", webPod("app", "a", "b"), []written{fast(after, "app", "a")}},
		{"one less", "lists [app example.com/fast a, app example.com/fast b] for", webPod("app", "a"), []written{fast(after, "app", "a", "b")}},
		{"another container", "lists [web example.com/fast a] for", webPod("app", "a"), []written{fast(after, "web", "a")}},
		{"another resource", "lists [app example.com/slow a] for", webPod("app", "a"),
			[]written{{after, "app", "example.com/slow", map[int64][]string{-1: {"a"}}, nil}}},
		{"the pod has none", "lists no devices for UID " + after, webPod("app", "a"), []written{fast(before, "app", "a")}},
		{"another has none", "lists no devices, but", webPod("app"), []written{fast(after, "app", "a")}},
		{"only an init container has one", "lists no devices, but", webPod("app"), []written{fast(after, "init", "a")}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			k := startServer(t, &fakeKubelet{get: always(c.told)})
			k.note(t, c.noted...)
			if got, err := askTwice(t, k, after); err == nil ||
				!strings.Contains(err.Error(), strings.ReplaceAll(c.says, "CHECKPOINT", k.Checkpoint)) {
				t.Errorf("%v, %v", got, err)
			}
		})
	}
}

// TestConfirmed checks that Ask accepts differences between PodResources and the checkpoint that are not errors of the kubelet.
func TestConfirmed(t *testing.T) {
	nodes := written{after, "app", "example.com/fast", map[int64][]string{0: {"a"}, 1: {"b", "a"}}, nil}
	for name, noted := range map[string][]written{
		"several NUMA nodes":    {nodes, fast(before, "app", "z")},
		"init containers":       {fast(after, "init", "a", "b", "c"), fast(after, "app", "a", "b")},
		"one entry for each":    {fast(after, "app", "a"), fast(before, "app", "c"), fast(after, "app", "b")},
		"others have resources": {fast(after, "app", "b", "a"), {after, "app", "example.com/gpu", map[int64][]string{0: {"g"}}, nil}},
	} {
		k := startServer(t, &fakeKubelet{get: always(webPod("app", "a", "b"))})
		k.note(t, noted...)
		k.Resources = []string{"example.com/fast"}
		if got, err := ask(t, k.Kubelet, after); err != nil || !cmp.Equal(got, webDevices("app", "a", "b")) {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
	k := startServer(t, &fakeKubelet{get: always(webPod("app"))})
	k.note(t, fast(after, "init", "a"))
	k.Resources = []string{"example.com/gpu"}
	if got, err := ask(t, k.Kubelet, after); err != nil || len(got) != 0 {
		t.Errorf("an init container with an unwanted device: %v, %v", got, err)
	}
}

// writeBadCheckpoint writes a checkpoint with the data, or none for "", a folder for "folder", and one that is too large for "large".
func (k *fakeKubelet) writeBadCheckpoint(t *testing.T, data string) {
	t.Helper()
	os.Remove(k.Checkpoint)
	switch data {
	case "":
	case "folder":
		os.Mkdir(k.Checkpoint, 0o755)
	case "large": // a valid checkpoint that is too large
		k.note(t, fast(after, "app", "z"))
		os.Truncate(k.Checkpoint, maxCheckpoint+1)
	default:
		os.WriteFile(k.Checkpoint, []byte(data), 0o600)
	}
}

// TestUnreadable checks that Ask without a readable checkpoint goes by the pod's name. It fails if two pods have it, or if PodResources
// has no devices.
func TestUnreadable(t *testing.T) {
	one := startServer(t, &fakeKubelet{get: always(webPod("app", "a"))})
	two := startServer(t, &fakeKubelet{list: func(int) ([]*api.PodResources, error) {
		return []*api.PodResources{webPod("app", "a"), webPod("app", "b")}, nil
	}})
	none := startServer(t, &fakeKubelet{get: always(webPod("app"))})
	for name, data := range map[string]string{"missing": "", "garbage": "{", "no JSON": `{"Data":{"PodDeviceEntries":[x]},"Checksum":1}`,
		"text": "hello", "null": `{"Data":{"PodDeviceEntries":null}}`,
		"no checksum":      `{"Data":{"PodDeviceEntries":[]}}`,
		"other keys":       `{"Data":{"PodDeviceEntries":[{"UID":"` + after + `","ResourceName":"r","DeviceIDs":{}}]}}`,
		"without resource": `{"Data":{"PodDeviceEntries":[{"PodUID":"` + after + `","DeviceIDs":{}}]}}`,
		"without devices":  `{"Data":{"PodDeviceEntries":[{"PodUID":"` + before + `","ResourceName":"r"}]}}`,
		"without devices, in the kubelet's form": `{"Data":{"PodDeviceEntries":[{"PodUID":"` + before +
			`","ResourceName":"r"}],"RegisteredDevices":{}},"Checksum":1}`,
		"another format": `{"Data":{"Pods":[]}}`, "torn": `{"Data":{"PodDeviceEntries":[{"PodUID":"` + after + `","Cont`, "large": "large",
		"folder": "folder"} {
		for _, k := range []*fakeKubelet{one, two, none} {
			k.writeBadCheckpoint(t, data)
		}
		if got, err := ask(t, one.Kubelet, after); err != nil || !cmp.Equal(got, webDevices("app", "a")) {
			t.Errorf("%s: %v, %v", name, got, err)
		}
		refused := func(k *fakeKubelet) ([]poddevices.Device, error) {
			if name == "missing" { // the kubelet may write it soon
				return askTwice(t, k, after)
			}
			return ask(t, k.Kubelet, after)
		}
		if got, err := refused(none); err == nil || !strings.Contains(err.Error(), "does not confirm it") {
			t.Errorf("%s: %v, %v", name, got, err)
		}
		if got, err := askTwice(t, two, after); err == nil || !strings.Contains(err.Error(), "2 pods have this name") {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
	os.Remove(one.Checkpoint)
	one.note(t, fast("", "app", "z"))
	if got, err := ask(t, one.Kubelet, ""); err != nil || !cmp.Equal(got, webDevices("app", "a")) {
		t.Errorf("without UID: %v, %v", got, err)
	}
}

// TestIndented checks that Ask can read a checkpoint with additional white space.
func TestIndented(t *testing.T) {
	data := marshal(t, []written{fast(before, "app", "a"), fast(after, "app", "b")})
	var indented bytes.Buffer
	if err := json.Indent(&indented, data, "", "  "); err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "checkpoint")
	for _, text := range [][]byte{data, indented.Bytes()} {
		if err := os.WriteFile(path, text, 0o600); err != nil {
			t.Fatal(err)
		}
		got, err := readCheckpoint(path, after)
		if err != nil || len(got) != 1 || got[0].ID != "b" || got[0].Container != "app" || got[0].Resource != "example.com/fast" {
			t.Errorf("%v, %v", got, err)
		}
		if got, err := readCheckpoint(path, after[:8]); err != nil || got != nil {
			t.Errorf("the beginning of a UID: %v, %v", got, err)
		}
	}
}

// TestNoneConfirmed checks that Ask returns an empty list only if a readable checkpoint has no devices for the pod's UID.
func TestNoneConfirmed(t *testing.T) {
	k := startServer(t, &fakeKubelet{get: always(webPod("app"))})
	for name, entries := range map[string][]written{"none": nil, "empty": {}, "of another pod": {fast(before, "app", "a")},
		"without a device": {{before, "app", "example.com/fast", map[int64][]string{0: nil}, nil}}} {
		k.note(t, entries...)
		if got, err := ask(t, k.Kubelet, after); err != nil || len(got) != 0 {
			t.Errorf("%s: %v, %v", name, got, err)
		}
		if got, err := ask(t, k.Kubelet, ""); err == nil ||
			!strings.Contains(err.Error(), "does not confirm it: the runtime does not pass the pod's UID") {
			t.Errorf("%s, without UID: %v, %v", name, got, err)
		}
	}
	if err := os.Remove(k.Checkpoint); err != nil {
		t.Fatal(err)
	}
	if got, err := askTwice(t, k, after); err == nil ||
		!strings.Contains(err.Error(), "does not confirm it: the checkpoint is missing: open "+k.Checkpoint) {
		t.Errorf("missing, and the kubelet may write it soon: %v, %v", got, err)
	}
}

// TestParsed parses checkpoints in all formats that kubelets write.
func TestParsed(t *testing.T) {
	for name, entries := range knownCheckpoints() {
		got, err := parseEntries(marshal(t, entries))
		if err != nil || len(got) != len(entries) {
			t.Errorf("%s: %v, %v", name, got, err)
		}
	}
}

// TestCheckpointNUMA checks the NUMA nodes of CheckpointDevices. The kubelet writes -1 for a device without a NUMA node.
func TestCheckpointNUMA(t *testing.T) {
	k := startServer(t, &fakeKubelet{})
	k.note(t, written{after, "app", "example.com/fast", map[int64][]string{-1: {"a"}, 1: {"b"}}, nil})
	devices, err := CheckpointDevices(k.Checkpoint)
	got := map[string][]int{}
	for _, d := range devices {
		got[d.ID] = d.NUMA
	}
	if diff := cmp.Diff(map[string][]int{"a": nil, "b": {1}}, got); err != nil || diff != "" {
		t.Errorf("%v\n%s", err, diff)
	}
}

// knownCheckpoints returns the entries of checkpoints in all formats that kubelets write.
func knownCheckpoints() map[string][]written {
	return map[string][]written{
		"none": nil, "empty": {}, "one": {fast(after, "app", "a")}, "two": {fast(before, "app", "a"), fast(after, "app", "b", "c")},
		"no NUMA node":              {{after, "app", "example.com/fast", map[int64][]string{-1: {"a"}}, []byte("\n\x0adevice?>")}},
		"two nodes, no opaque data": {{after, "app", "example.com/fast", map[int64][]string{0: {"a"}, 1: {"b"}}, []byte{}}},
		"without a device": {{after, "app", "example.com/fast", map[int64][]string{0: nil}, []byte{1}},
			{before, "app", "example.com/slow", map[int64][]string{}, []byte{}}},
	}
}

// FuzzCheckpoint checks that all entries are complete, that an error comes without entries, and that readCheckpoint and
// CheckpointDevices agree for each UID.
func FuzzCheckpoint(f *testing.F) {
	for _, entries := range knownCheckpoints() {
		f.Add(marshal(f, entries), after)
	}
	f.Add([]byte(`{"Data":{"PodDeviceEntries":[],"RegisteredDevices":{}},"Checksum":01}`), after)
	f.Add([]byte(`{"Data":{"PodDeviceEntries":[{"PodUID":"`+after+`","DeviceIDs":[]}]}}`), after)
	f.Add([]byte(`{"Data":{"PodDeviceEntries":[{"PodUID":"`+after+`","ResourceName":"r"}],"RegisteredDevices":{}},"Checksum":1}`), before)
	f.Add([]byte(`{"Data":{"PodDeviceEntries":[{"PodUID":"2222222\u0032-0000-4000-8000-000000000002","ResourceName":"r","DeviceIDs":{"0":["a"]}}],"RegisteredDevices":{}},"Checksum":1}`), after)
	f.Fuzz(func(t *testing.T, data []byte, uid string) {
		entries, err := parseEntries(data)
		if err != nil && entries != nil {
			t.Fatalf("%v, %v", entries, err)
		}
		if slices.ContainsFunc(entries, func(e checkpointEntry) bool { return e.PodUID == "" || e.ResourceName == "" || e.DeviceIDs == nil }) {
			t.Fatalf("%+v", entries)
		}
		if uid == "" {
			return
		}
		path := filepath.Join(t.TempDir(), "checkpoint")
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		notes, err := CheckpointDevices(path)
		want := slices.DeleteFunc(slices.Clone(notes), func(n poddevices.Device) bool { return n.UID != uid })
		got, err2 := readCheckpoint(path, uid)
		if !cmp.Equal(deviceSet(want), deviceSet(got)) || fmt.Sprint(err) != fmt.Sprint(err2) {
			t.Fatalf("%v, %v; Notes has %v, %v", got, err2, want, err)
		}
	})
}
