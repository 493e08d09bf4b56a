// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
)

// badNamespaces returns paths, by description, that are no network namespace of a pod.
func badNamespaces(t *testing.T) map[string]string {
	t.Helper()
	dir := t.TempDir()
	file, fifo, link := filepath.Join(dir, "file"), filepath.Join(dir, "fifo"), filepath.Join(dir, "link")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("/proc/self/ns/uts", link); err != nil {
		t.Fatal(err)
	}
	return map[string]string{
		"missing": filepath.Join(dir, "missing"), "plain file": file, "fifo": fifo, "folder": dir, "device": "/dev/null",
		"other kind": "/proc/self/ns/uts", "link to other kind": link, "own": "/proc/self/ns/net", "too long": "/" + string(make([]byte, 5000)),
	}
}

func TestBadNamespace(t *testing.T) {
	for what, path := range badNamespaces(t) {
		for _, verb := range []string{"ADD", "CHECK"} {
			rec := &recorder{}
			run(rec.plugin(), newEnv(verb).with("CNI_NETNS", path), config(`"prevResult":{}`)).mustFail(t, CodeNetns)
			if len(rec.requests) > 0 {
				t.Errorf("%s with %s reached the plugin", verb, what)
			}
		}
		rec := &recorder{}
		run(rec.plugin(), newEnv("DEL").with("CNI_NETNS", path), config("")).mustSucceed(t, "")
		if len(rec.requests) != 1 || rec.requests[0].Netns != nil {
			t.Errorf("DEL with %s: want it to arrive, without a namespace", what)
		}
	}
}

func TestNamespace(t *testing.T) {
	pod := kerneltest.NewPod(t)
	for _, verb := range []string{"ADD", "CHECK", "DEL"} {
		seen := false
		see := func(r *Request) error {
			var st unix.Statfs_t
			seen = r.Netns != nil && unix.Fstatfs(int(r.Netns.Fd()), &st) == nil && st.Type == unix.NSFS_MAGIC
			return nil
		}
		p := Plugin{Name: "x", Del: see, Check: see, Add: (&recorder{}).plugin().Add}
		if verb == "ADD" {
			seen = true
		}
		if o := run(p, newEnv(verb).with("CNI_NETNS", pod.Path), config(`"prevResult":{}`)); o.exit != 0 || !seen {
			t.Errorf("%s: %+v, open %t", verb, o, seen)
		}
	}
}

func TestOwnNamespace(t *testing.T) {
	for value, ok := range map[string]bool{"1": true, "true": true, "TRUE": true, "": false, "0": false, "yes": false} {
		rec := &recorder{}
		o := run(rec.plugin(), newEnv("CHECK").with("CNI_NETNS", "/proc/self/ns/net", "CNI_NETNS_OVERRIDE", value), config(`"prevResult":{}`))
		if (o.exit == 0) != ok || len(rec.requests) == 1 != ok {
			t.Errorf("override %q: exit %d, want ok %t", value, o.exit, ok)
		}
	}
}
