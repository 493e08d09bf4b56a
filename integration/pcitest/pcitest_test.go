// SPDX-License-Identifier: Apache-2.0

package pcitest

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// Generate creates the expected number of functions with different addresses and valid links.
func TestGenerate(t *testing.T) {
	for want, m := range map[int]Machine{2 * (1 + 256): {Nodes: 2, PFs: 1, VFs: 256, Stride: 2, InPods: true},
		80 * 2: {Nodes: 2, PFs: 40, VFs: 1}, 3: {PFs: 1, VFs: 2, Driver: "vfio-pci"}} {
		sysfs := Generate(t, m)
		links, err := filepath.Glob(filepath.Join(sysfs, "bus/pci/devices/*/driver"))
		if err != nil || len(links) != want {
			t.Errorf("%+v: %d functions with drivers, want %d, %v", m, len(links), want, err)
		}
		for _, l := range links {
			if name := filepath.Base(filepath.Dir(l)); !function.MatchString(name) || filepath.Base(Folder(t, sysfs, name)) != name {
				t.Errorf("%+v: function %s", m, name)
			}
		}
	}
}

// Set can replace a file, a symlink or a folder. A concurrent reader never sees a half-written attribute.
func TestSet(t *testing.T) {
	sysfs := Extract(t, "in-pods")
	dir := Folder(t, sysfs, "0000:3b:11.0")
	done := make(chan bool)
	go func() {
		defer close(done)
		for range 200 {
			if got, err := os.ReadFile(filepath.Join(dir, "net/ens1f0v0/carrier")); len(got) != 2 || err != nil {
				t.Errorf("carrier: %q, %v", got, err)
				return
			}
		}
	}()
	for range 50 {
		Set(t, sysfs, "0000:3b:11.0", "net/ens1f0v0/carrier", "0")
	}
	<-done
	Set(t, sysfs, "0000:3b:11.0", "driver", "-> nowhere")
	Set(t, sysfs, "0000:3b:11.0", "net/ens1f0v0/statistics/rx_bytes", "7")
	for name, want := range map[string]string{"net/ens1f0v0/carrier": "0\n", "net/ens1f0v0/statistics/rx_bytes": "7\n"} {
		if got, err := os.ReadFile(filepath.Join(dir, name)); string(got) != want || err != nil {
			t.Errorf("%s: %q, %v", name, got, err)
		}
	}
	if target, err := os.Readlink(filepath.Join(dir, "driver")); target != "nowhere" || err != nil {
		t.Errorf("driver leads to %s, %v", target, err)
	}
	Set(t, sysfs, "0000:3b:11.0", "net", "a file")
	if got, err := os.ReadFile(filepath.Join(dir, "net")); string(got) != "a file\n" || err != nil {
		t.Errorf("net: %q, %v", got, err)
	}
}

// Remove of a PF also removes its VFs, and Remove of a VF the PF's link to it.
func TestRemove(t *testing.T) {
	sysfs := Extract(t, "two-sockets")
	Remove(t, sysfs, "0000:3b:10.2")
	Remove(t, sysfs, "0000:86:00.0")
	entries, err := os.ReadDir(filepath.Join(sysfs, "bus/pci/devices"))
	var names []string
	for _, e := range entries {
		if strings.HasPrefix(e.Name(), "0000:3b:") || strings.HasPrefix(e.Name(), "0000:86:") {
			names = append(names, e.Name())
		}
	}
	if got := strings.Join(names, " "); err != nil ||
		got != "0000:3b:00.0 0000:3b:00.1 0000:3b:10.0 0000:3b:10.1 0000:3b:10.3 0000:86:00.1 0000:86:10.1 0000:86:10.3" {
		t.Errorf("%s, %v", got, err)
	}
	if links, _ := filepath.Glob(filepath.Join(Folder(t, sysfs, "0000:3b:00.0"), "virtfn*")); len(links) != 1 {
		t.Errorf("links %v", links)
	}
}
