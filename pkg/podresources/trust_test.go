// SPDX-License-Identifier: Apache-2.0

package podresources

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestTrust: nobody is asked about a pod of which nothing is noted, where the checkpoint was seen to be right, and of this kubelet alone.
func TestTrust(t *testing.T) {
	path := filepath.Join(t.TempDir(), "sriov.sock"+TrustSuffix)
	root, err := os.MkdirTemp("", "kl") // the path of a socket is short
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(root) })
	k := At(root)
	for _, path := range []string{k.Socket, k.Checkpoint} {
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	listen := func() {
		t.Helper()
		l, err := net.Listen("unix", k.Socket)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
	}
	note := func(text string) {
		t.Helper()
		if err := os.WriteFile(k.Checkpoint, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	told := []string{"shop/web-0", "shop2/web"}
	trust := func() {
		t.Helper()
		mark, err := k.Mark()
		info, err2 := os.Stat(k.Checkpoint)
		if err = errors.Join(err, err2); err == nil {
			err = os.WriteFile(path, Trust(mark, versionOf(info), told), 0o600)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	expect := func(what, uid string, want bool) {
		t.Helper()
		if got := NoneNoted(path, k, "shop", "web", uid); got != want {
			t.Errorf("%s: %t", what, got)
		}
	}
	two := string(marshal(t, []written{fast(before, "app", "a"), fast(before, "app2", "b")}))
	noted := string(marshal(t, []written{fast(before, "app", "a")}))
	listen()
	note(noted)
	expect("nobody has looked", after, false)
	trust()
	expect("nothing is noted", after, true)
	for _, pod := range []string{"shop/web-0", "shop2/web"} {
		if namespace, name, _ := strings.Cut(pod, "/"); NoneNoted(path, k, namespace, name, after) {
			t.Errorf("the kubelet told of devices of %s, and it has none", pod)
		}
	}
	expect("a device is noted", before, false)
	expect("no UID", "", false)
	wanted := k
	wanted.Wanted = func(resource string) bool { return resource == "example.com/slow" }
	if !NoneNoted(path, wanted, "shop", "web", before) {
		t.Error("a device of another resource counts")
	}
	wanted.Wanted = func(resource string) bool { return resource == "example.com/fast" }
	if NoneNoted(path, wanted, "shop", "web", before) {
		t.Error("a device of the resource does not count")
	}
	note(noted)
	expect("another version of the file", after, false)
	for _, devices := range []string{`{}`, `{"0":null}`, `{"0":["a"],"0":[]}`} {
		note(strings.Replace(noted, `{"0":["a"]}`, devices, 1))
		trust()
		expect("an entry with "+devices, before, false)
		expect("another pod's with "+devices, after, true)
	}
	note(`{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{"example.com/fast":["a"]}},"Checksum":7}`)
	trust()
	expect("nobody has a device", before, true)
	first := strings.Index(two, `,{"PodUID"`)
	for what, text := range map[string]string{"none": "", "half": "{", "empty": `{"Data":{}}`, "without sum": strings.Replace(noted, "Checksum", "Sum", 1), "null": `{"Data":{"PodDeviceEntries":null}}`,
		"of another form": strings.Replace(noted, "PodDeviceEntries", "Entries", 1), "with other entries": strings.ReplaceAll(noted, "PodUID", "UID"),
		"with one other entry": two[:first] + strings.Replace(two[first:], `{"PodUID"`, `{"Z":1,"PodUID"`, 1), "with another key": strings.ReplaceAll(noted, "DeviceIDs", "Devices"), "with null": strings.ReplaceAll(noted, `"DeviceIDs":{"0":["a"]}`, `"DeviceIDs":null`),
		"with a key in lower case": two[:first] + strings.Replace(two[first:], "PodUID", "podUID", 1), "with a space": two[:first] + strings.Replace(two[first:], `"PodUID"`, `"PodUID" `, 1),
		"with an escape": two[:first] + strings.Replace(two[first:], `"PodUID":"1`, `"PodUID":"\u0031`, 1), "with NUL": two[:first+3] + "\x00\x00\x00" + two[first+6:],
		"glued": two[:first] + `,{"Pod,"Checksum":1}`, "null, and another list": `{"Data":{"PodDeviceEntries":null,"RegisteredDevices":{},"PodDeviceEntries":[` + noted[strings.Index(noted, "{\"PodUID"):],
		"torn at the end": noted[:len(noted)-1], "torn behind an entry": two[:first]} {
		note(text)
		trust()
		expect("a checkpoint "+what, after, false)
	}
	for _, what := range []string{`,"ContainerName":`, `,"ResourceName":`, `,"DeviceIDs":`, `,"AllocResp":`, `:["a"]`, `"}]`, `]`, `,"RegisteredDevices":`, `},"Checksum":`, "2715623478"} {
		note(strings.Replace(noted, what, "", 1))
		trust()
		expect("a checkpoint without "+what, after, false)
	}
	for _, what := range []string{"\t", "\xff", "\x7f"} {
		note(strings.Replace(noted, `"app"`, `"app`+what+`"`, 1))
		trust()
		expect(fmt.Sprintf("a checkpoint with %q", what), after, false)
	}
	for _, sum := range []string{"07", "18446744073709551616", "-1", "7}", "7\n"} {
		note(strings.Replace(noted, "2715623478", sum, 1))
		trust()
		expect("a checkpoint with the sum "+sum, after, false)
	}
	note(noted)
	trust()
	if err := os.Remove(k.Checkpoint); err != nil {
		t.Fatal(err)
	}
	expect("no checkpoint", after, false)
	if err := syscall.Mkfifo(k.Checkpoint, 0o600); err != nil {
		t.Fatal(err)
	}
	expect("a FIFO for a checkpoint", after, false)
	if err := os.Remove(k.Checkpoint); err != nil {
		t.Fatal(err)
	}
	note(noted)
	trust()
	expect("it is there again", after, true)

	old := time.Now().Add(-2 * maxTrust)
	for _, at := range []time.Time{old, time.Now().Add(maxTrust)} {
		if err := os.Chtimes(path, at, at); err != nil {
			t.Fatal(err)
		}
		expect("nobody looks any more", after, false)
	}
	trust()
	expect("somebody does", after, true)
	if err := os.Chtimes(k.Checkpoint, old, old); err != nil {
		t.Fatal(err)
	}
	expect("the file was touched", after, false)
	trust()

	if err := os.Rename(k.Socket, k.Socket+".old"); err != nil {
		t.Fatal(err)
	}
	expect("no kubelet", after, false)
	if mark, err := k.Mark(); err == nil {
		t.Errorf("no kubelet: %s", mark)
	}
	listen()
	expect("another kubelet", after, false)
	trust()
	expect("another kubelet, seen", after, true)
	if err := os.WriteFile(path, []byte("\x00\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	expect("a mark of something else", after, false)
	if err := errors.Join(os.Remove(k.Socket), os.WriteFile(k.Socket, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	if mark, err := k.Mark(); err == nil {
		t.Errorf("no socket: %s", mark)
	}
}
