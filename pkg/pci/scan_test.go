// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/integration/pcitest"
)

var update = flag.Bool("update", false, "rewrite the golden files")

func TestScanGolden(t *testing.T) {
	for _, name := range pcitest.Archives() {
		t.Run(name, func(t *testing.T) {
			got, err := json.MarshalIndent(mustScan(t, pcitest.Extract(t, name)), "", "  ")
			must(t, err)
			golden := filepath.Join("testdata", name+".json")
			if *update {
				must(t, os.WriteFile(golden, append(got, '\n'), 0o644))
			}
			want, err := os.ReadFile(golden)
			must(t, err)
			if diff := cmp.Diff(string(want), string(got)+"\n"); diff != "" {
				t.Errorf("pkg/pci/%s differs from the scan: correct it, or run: go test ./pkg/pci -run '^TestScanGolden$' -update\n(-file +scan)\n%s", golden, diff)
			}
		})
	}
}

// TestScanReal scans the machine that runs the test.
func TestScanReal(t *testing.T) {
	if _, err := os.Stat(filepath.Join(Sysfs, devicesFolder)); err != nil {
		t.Skip("this machine has no PCI")
	}
	s, err := Scan(Sysfs)
	must(t, err)
	for _, d := range s.Devices {
		if d.Unreadable != "" || d.Vendor == "" || d.Root == "" {
			t.Errorf("%+v", d)
		}
	}
}

func TestScanNoTree(t *testing.T) {
	for _, sysfs := range []string{t.TempDir(), "/nowhere"} {
		if _, err := Scan(sysfs); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), sysfs) {
			t.Errorf("%s: %v", sysfs, err)
		}
	}
	empty := pcitest.Generate(t, pcitest.Machine{})
	must(t, os.MkdirAll(filepath.Join(empty, devicesFolder), 0o755))
	if s, err := Scan(empty); err != nil || len(s.Devices) > 0 || s.Devices == nil {
		t.Errorf("a machine without cards: %+v, %v", s, err)
	}
}

// TestScanMany scans a PF with 127 VFs at every second address on two buses.
func TestScanMany(t *testing.T) {
	s := mustScan(t, pcitest.Generate(t, pcitest.Machine{Nodes: 2, PFs: 1, VFs: 127, Stride: 2, InPods: true}))
	pf, ok := s.Device(address(t, "0000:15:00.0"))
	if !ok || pf.NumVFs != 127 || pf.TotalVFs != 127 || pf.NUMANode != 1 || len(s.Devices) != 256 || len(s.Nodes) != 2 {
		t.Fatalf("%d devices, PF %+v", len(s.Devices), pf)
	}
	vfs := s.VFs(pf.Address)
	for i, vf := range vfs {
		if vf.VFIndex != i || vf.PF != pf.Address || vf.NUMANode != 1 || vf.LinkType != Ether || vf.Driver != "iavf" || len(vf.Interfaces) > 0 {
			t.Errorf("VF %d: %+v", i, vf)
		}
	}
	if len(vfs) != 127 || vfs[0].Address != address(t, "0000:15:02.0") || vfs[126].Address != address(t, "0000:16:01.4") {
		t.Errorf("%d VFs: %v to %v", len(vfs), vfs[0].Address, vfs[len(vfs)-1].Address)
	}
}

// TestScanVanishes checks that Scan skips removed functions and the VFs of a removed PF.
func TestScanVanishes(t *testing.T) {
	sysfs := pcitest.Extract(t, "two-sockets")
	before := mustScan(t, sysfs)
	pcitest.Remove(t, sysfs, "0000:3b:10.2")
	pcitest.Remove(t, sysfs, "0000:86:00.0")
	// Remove only the PF and keep its VFs.
	must(t, os.Remove(filepath.Join(sysfs, devicesFolder, "0000:86:00.1")))
	after := mustScan(t, sysfs)
	if len(before.Devices) != 12 || len(after.Devices) != 5 || len(after.VFs(address(t, "0000:3b:00.0"))) != 1 {
		t.Errorf("%d devices, then %d: %+v", len(before.Devices), len(after.Devices), after.Devices)
	}
}

// TestScanGoesMeanwhile checks that Scan skips a function that disappears while its interface is read, but not one that loses only its
// interface.
func TestScanGoesMeanwhile(t *testing.T) {
	sysfs := pcitest.Extract(t, "two-sockets")
	for _, a := range []string{"0000:3b:10.0", "0000:3b:10.2"} {
		// A dangling link stands for an interface that disappears: it is listed but cannot be opened.
		pcitest.Set(t, sysfs, a, "net/gone", "-> nowhere")
	}
	must(t, os.Remove(filepath.Join(pcitest.Folder(t, sysfs, "0000:3b:10.2"), "vendor")))
	s := mustScan(t, sysfs)
	if _, ok := s.Device(address(t, "0000:3b:10.2")); ok {
		t.Error("half a function is in the snapshot")
	}
	if d, ok := s.Device(address(t, "0000:3b:10.0")); !ok || d.Unreadable != "" || fmt.Sprint(d.Interfaces) != "[ens1f0v0]" {
		t.Errorf("%+v", d)
	}
}

func TestIsRepresentor(t *testing.T) {
	for port, want := range map[string]bool{
		"": false, "p0": false, "p1s2": false, "pf0vf3": true, "pf0": true, "c1pf0vf3": true, "pf0sf88": true, "7": true, "nic1": true,
	} {
		if got := isRepresentor("b8cef603007a1d24", port); got != want {
			t.Errorf("port %q of a switch: %t", port, got)
		}
		// On cards without a switch, a PF's port name can be any text.
		if got := isRepresentor("", port); got != (want && strings.Contains(port, "pf")) {
			t.Errorf("port %q: %t", port, got)
		}
	}
	for _, port := range []string{"pf0vf3sf4", "pf", "pfvf3", "pf0vf", "cpf0", "c1", "p0s", "p0s1s2", "xpf0"} {
		if !isRepresentor("b8cef603007a1d24", port) || isRepresentor("", port) {
			t.Errorf("port %q is taken for one of those that have a name", port)
		}
	}
}

func TestParseVF(t *testing.T) {
	for name, want := range map[string]int{"virtfn0": 0, "virtfn255": 255, "virtfn": -1, "virtfn01": -1, "virtfn+1": -1, "virtfn-1": -1,
		"virtfn65536": -1, "physfn": -1, "0": -1} {
		if got, ok := parseVF(name); got != want || ok != (want >= 0) {
			t.Errorf("%s: got %d, %t", name, got, ok)
		}
	}
}

func BenchmarkScan1024(b *testing.B) {
	for name, m := range map[string]pcitest.Machine{"pods": {Nodes: 2, PFs: 4, VFs: 128, InPods: true},
		"interfaces": {Nodes: 2, PFs: 4, VFs: 128}} {
		b.Run(name, func(b *testing.B) {
			sysfs := pcitest.Generate(b, m)
			b.ReportAllocs()
			for b.Loop() {
				if s, err := Scan(sysfs); err != nil || len(s.Devices) != 1032 {
					b.Fatal(len(s.Devices), err)
				}
			}
		})
	}
}

// TestScanUncountedVFs checks that NumVFs counts the existing VFs, even if sriov_numvfs or the PF's links are wrong.
func TestScanUncountedVFs(t *testing.T) {
	for name, change := range map[string]func(sysfs, pf string){
		"not counted yet": func(sysfs, _ string) { pcitest.Set(t, sysfs, firstPF, "sriov_numvfs", "0") },
		"no count":        func(_, pf string) { must(t, os.Remove(filepath.Join(pf, "sriov_numvfs"))) },
		"no links of the PF": func(sysfs, pf string) {
			pcitest.Set(t, sysfs, firstPF, "sriov_numvfs", "0")
			must(t, os.Remove(filepath.Join(pf, "virtfn0")), os.Remove(filepath.Join(pf, "virtfn1")))
		},
		"only links of the PF": func(sysfs, pf string) {
			pcitest.Set(t, sysfs, firstPF, "sriov_numvfs", "0")
			for _, link := range []string{"virtfn0", "virtfn1"} {
				vf, err := os.Readlink(filepath.Join(pf, link))
				must(t, err, os.Remove(filepath.Join(sysfs, devicesFolder, filepath.Base(vf))))
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			sysfs := pcitest.Generate(t, pcitest.Machine{Nodes: 1, PFs: 2, VFs: 2})
			change(sysfs, pcitest.Folder(t, sysfs, firstPF))
			if pf, ok := mustScan(t, sysfs).Device(address(t, firstPF)); !ok || pf.NumVFs != 2 {
				t.Errorf("%+v", pf)
			}
		})
	}
}

// TestScanLegacyMode: a PF without representors is in legacy mode, even if its driver reports phys_switch_id.
func TestScanLegacyMode(t *testing.T) {
	sysfs := pcitest.Extract(t, "switchdev")
	for _, name := range []string{"eth4", "eth5", "eth6"} {
		must(t, os.RemoveAll(filepath.Join(sysfs, "devices/pci0000:17/0000:17:00.0/0000:18:00.0/net", name)))
	}
	vf, _ := ParseAddress("0000:18:00.2")
	if _, pf, err := Read(sysfs, vf); err != nil || pf.Switchdev || pf.SwitchID == "" {
		t.Errorf("%+v, %v", pf, err)
	}
}

func TestScanRDMAMode(t *testing.T) {
	sysfs := pcitest.Extract(t, "rdma")
	if mustScan(t, sysfs).ExclusiveRDMA {
		t.Error("exclusive without the module")
	}
	for mode, exclusive := range map[string]bool{"N\n": true, "Y\n": false} {
		at := filepath.Join(sysfs, sharedRDMA)
		must(t, os.MkdirAll(filepath.Dir(at), 0o755), os.WriteFile(at, []byte(mode), 0o600))
		if mustScan(t, sysfs).ExclusiveRDMA != exclusive {
			t.Errorf("netns_mode %q", mode)
		}
	}
}

// TestScanWithoutBus: a machine may have no PCI bus, but a folder that is no sysfs is an error.
func TestScanWithoutBus(t *testing.T) {
	sysfs := t.TempDir()
	if _, err := Scan(sysfs); err == nil {
		t.Error("no sysfs")
	}
	must(t, os.Mkdir(filepath.Join(sysfs, "bus"), 0o755))
	if s := mustScan(t, sysfs); !s.NoBus || len(s.Devices) > 0 {
		t.Errorf("%+v", s)
	}
}
