// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/integration/pcitest"
)

const spoiledVF = "0000:3b:11.0"

// scanDamaged scans a sysfs tree after f has damaged the files of a VF in it, and returns that VF. The other devices must not change.
func scanDamaged(t *testing.T, f func(sysfs, vf string)) (Device, bool) {
	t.Helper()
	sysfs := pcitest.Extract(t, "in-pods")
	before := mustScan(t, sysfs)
	f(sysfs, pcitest.Folder(t, sysfs, spoiledVF))
	var after *Snapshot
	done := make(chan error, 1)
	go func() {
		var err error
		after, err = Scan(sysfs)
		done <- err
	}()
	select {
	case err := <-done:
		must(t, err)
	case <-time.After(time.Minute):
		t.Fatal("the scan hangs")
	}
	for _, c := range differences(before, after) {
		if c != spoiledVF {
			t.Errorf("%s has changed", c)
		}
	}
	return after.Device(address(t, spoiledVF))
}

// TestScanGarbage checks that Unreadable has the file and the reason if an attribute is invalid.
func TestScanGarbage(t *testing.T) {
	for _, c := range []struct{ file, value, want string }{
		{"numa_node", "banana", `numa_node: want a number, have "banana"`},
		{"numa_node", "99999999999999999999", `numa_node: want a number, have "99999999999999999999"`},
		{"numa_node", "-7", ""},
		{"vendor", "8086", `vendor: want a hexadecimal number of 16 bits, have "8086"`},
		{"vendor", "", `vendor: want a hexadecimal number of 16 bits, have ""`},
		{"vendor", "0x18086", `vendor: want a hexadecimal number of 16 bits, have "0x18086"`},
		{"device", "0x\x1b[31m\xff", `device: want a hexadecimal number of 16 bits, have "0x\x1b[31m\xff"`},
		{"class", "0x-20000", `class: want a hexadecimal number of 24 bits, have "0x-20000"`},
		{"acpi_index", "1 2", `acpi_index: want one word, have "1 2"`},
		{"driver", "-> nowhere", "driver: leads to an unexpected folder"},
		{"driver", "-> ..", "driver: leads to an unexpected folder"},
		{"driver", "-> ../drivers/..", "driver: leads to an unexpected folder"},
		{"driver", "-> ../../../../bus/pci/drivers/gone", ""}, // its module is being unloaded
		{"driver", "a file", "driver: leads to an unexpected folder"},
		{"iommu_group", "-> ../iommu_groups/x", `iommu_group: want a number, have "x"`},
		{"physfn", "-> ../banana", `physfn: PCI address "banana": want domain:bus:device.function, such as 0000:3b:10.2`},
		{"physfn", "-> ../0000:3b:11.0", "physfn: leads to an unexpected folder"},
		{"sriov_numvfs", "-1", `sriov_numvfs: want a number from 0, have "-1"`},
		{"aer_dev_fatal", "TOTAL_ERR_FATAL x", `aer_dev_fatal: want a number of errors, have "x"`},
		{"aer_dev_fatal", "none", `aer_dev_fatal: want a line TOTAL_ERR_*, have "none"`},
		{"virtfn0", "-> nowhere", ""},
		{"virtfn99999999999999999999", "-> ../0000:3b:11.1", ""},
		{"virtfn0", "-> ../0000:3b:11.1", ""}, // the VF's own link names another PF
		{"net", "a file", "net: not a directory"},
		{"uio", "a file", "uio: not a directory"},
		{"infiniband", "a file", "infiniband: not a directory"},
		{"net/ens1f0v0", "a file", "net/ens1f0v0: not a directory"},
		{"net/ens1f0v0/type", "x", `net/ens1f0v0: type: want a number from 0, have "x"`},
		{"net/ens1f0v0/carrier", "2", `net/ens1f0v0: carrier: want 0 or 1, have "2"`},
	} {
		t.Run(c.file+" "+c.value, func(t *testing.T) {
			d, ok := scanDamaged(t, func(sysfs, _ string) { pcitest.Set(t, sysfs, spoiledVF, c.file, c.value) })
			if !ok || d.Unreadable != c.want {
				t.Errorf("%t, unreadable: %s, want %s", ok, d.Unreadable, c.want)
			}
		})
	}
}

// TestScanOddFiles checks that Scan rejects an attribute that is no file, does not block on a FIFO in place of a folder, and does not
// follow a symlink out of the tree.
func TestScanOddFiles(t *testing.T) {
	outside := filepath.Join(t.TempDir(), "secret")
	must(t, os.WriteFile(outside, []byte("0x8086\n"), 0o600))
	put := func(f func(path string) error) func(sysfs, vf string) {
		return func(_, vf string) {
			path := filepath.Join(vf, "vendor")
			must(t, os.Remove(path), f(path))
		}
	}
	for name, c := range map[string]struct {
		f    func(sysfs, vf string)
		want string
	}{
		"folder":       {put(func(path string) error { return os.Mkdir(path, 0o700) }), "vendor: is a directory"},
		"loop":         {put(func(path string) error { return os.Symlink("vendor", path) }), "vendor: too many levels of symbolic links"},
		"link outside": {put(func(path string) error { return os.Symlink(outside, path) }), "vendor: path escapes from parent"},
		"a page":       {put(func(path string) error { return os.WriteFile(path, []byte(strings.Repeat(" ", 4090)+"0x8086"), 0o600) }), ""},
		"folder FIFO": {func(_, vf string) {
			must(t, os.RemoveAll(filepath.Join(vf, "net")), syscall.Mkfifo(filepath.Join(vf, "net"), 0o600))
		}, "net: not a directory"},
		"interface FIFO": {func(_, vf string) {
			must(t, syscall.Mkfifo(filepath.Join(vf, "net/fifo"), 0o600))
		}, "net/fifo: not a directory"},
	} {
		t.Run(name, func(t *testing.T) {
			if d, ok := scanDamaged(t, c.f); !ok || d.Unreadable != c.want {
				t.Errorf("%t, unreadable: %s, want %s", ok, d.Unreadable, c.want)
			}
		})
	}
}

// TestScanOddDevices checks that Scan skips a function whose entry is not a folder.
func TestScanOddDevices(t *testing.T) {
	for name, f := range map[string]func(path string) error{
		"nowhere": func(path string) error { return os.Symlink("../../../devices/pci0000:ff/0000:ff:00.0", path) },
		"outside": func(path string) error { return os.Symlink("/", path) },
		"loop":    func(path string) error { return os.Symlink(filepath.Base(path), path) },
		"FIFO":    func(path string) error { return syscall.Mkfifo(path, 0o600) },
		"file":    func(path string) error { return os.WriteFile(path, nil, 0o600) },
		"empty":   func(path string) error { return os.Mkdir(path, 0o700) },
		"no class": func(path string) error {
			return os.CopyFS(path, os.DirFS(filepath.Join(filepath.Dir(path), "../../../devices/system/node/node0")))
		},
	} {
		t.Run(name, func(t *testing.T) {
			_, ok := scanDamaged(t, func(sysfs, _ string) {
				path := filepath.Join(sysfs, devicesFolder, spoiledVF)
				must(t, os.Remove(path), f(path))
			})
			if ok {
				t.Error("it is in the snapshot")
			}
		})
	}
}

// TestScanIOError checks that Unreadable has a read error, and that Scan still reads the device's other files.
func TestScanIOError(t *testing.T) {
	d, ok := scanDamaged(t, func(_, vf string) {
		// A read of /proc/self/mem, which the bind mount puts in place of the file, fails with EIO because nothing is mapped at address
		// 0.
		path := filepath.Join(vf, "numa_node")
		must(t, syscall.Mount("/proc/self/mem", path, "", syscall.MS_BIND, ""))
		t.Cleanup(func() { must(t, syscall.Unmount(path, 0)) })
	})
	if want := "numa_node: input/output error"; !ok || d.Unreadable != want || d.Driver != "iavf" {
		t.Errorf("%t, %+v", ok, d)
	}
}

// TestFolderFail checks that noteError keeps the first error, and ignores those that only mean that a value is missing.
func TestFolderFail(t *testing.T) {
	for err, want := range map[error]string{
		syscall.EIO: "numa_node: input/output error", syscall.EACCES: "numa_node: permission denied",
		syscall.EINVAL: "", syscall.EOPNOTSUPP: "", syscall.ENODEV: "", syscall.ENOENT: "", nil: "",
	} {
		var f folder
		f.noteError("numa_node", &os.PathError{Op: "read", Path: "/sys/numa_node", Err: err})
		if err == nil {
			f = folder{}
			f.noteError("numa_node", nil)
		}
		got := ""
		if f.err != nil {
			got = f.err.Error()
		}
		if got != want {
			t.Errorf("%v: %s, want %s", err, got, want)
		}
		if f.noteError("vendor", syscall.EPERM); want != "" && f.err.Error() != want {
			t.Errorf("%v: the second error, %v, took the place of the first", err, f.err)
		}
	}
}

func TestScanOddNodes(t *testing.T) {
	near := []Node{{ID: 0, CPUs: "0-15,32-47", Distance: []int{10, 21}}, {ID: 1, CPUs: "16-31,48-63", Distance: []int{21, 10}}}
	sysfs := pcitest.Extract(t, "two-sockets")
	unknown := []Node{{ID: 0, CPUs: "0-15,32-47"}, {ID: 1, CPUs: "16-31,48-63"}}
	for _, c := range []struct {
		file, text string
		want       []Node
	}{
		{"online", "0-1", near},
		{"online", "0", unknown[:1]},
		{"online", "0-1,5", unknown}, // node 5 goes offline during the scan, so there are three distances
		{"online", "0,2", unknown[:1]},
		{"online", "0-4294967295", []Node{}},
		{"online", "0-2000", []Node{}},
		{"online", "1-0", []Node{}},
		{"online", "0,0", []Node{}},
		{"online", "", []Node{}},
		{"node0/distance", "10", []Node{unknown[0], near[1]}},
		{"node0/distance", "10 x", []Node{unknown[0], near[1]}},
		{"node0/cpulist", "all of them", []Node{{Distance: []int{10, 21}}, near[1]}},
		{"node0/cpulist", "", []Node{{Distance: []int{10, 21}}, near[1]}}, // a node with only memory
	} {
		path := filepath.Join(sysfs, nodesFolder, c.file)
		was, err := os.ReadFile(path)
		must(t, err, os.WriteFile(path, []byte(c.text+"\n"), 0o600))
		if diff := cmp.Diff(c.want, mustScan(t, sysfs).Nodes); diff != "" {
			t.Errorf("%s %q: %s", c.file, c.text, diff)
		}
		must(t, os.WriteFile(path, was, 0o600))
	}
	must(t, os.RemoveAll(filepath.Join(sysfs, nodesFolder)))
	if nodes := mustScan(t, sysfs).Nodes; len(nodes) != 0 {
		t.Errorf("without NUMA: %+v", nodes)
	}
}

// FuzzParse checks that each parser returns a plausible value or an error of one line of ASCII text.
func FuzzParse(f *testing.F) {
	for _, s := range []string{"0x8086", "0x020000", "-1", "0", "1", "0-1,4", "10 21", "0-15,32-47", "TOTAL_ERR_FATAL 3\n", "pf0vf3",
		"virtfn12", "../../../devices/pci0000:3a/0000:3a:00.0/0000:3b:00.0", "\xff\x00", ""} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		check := func(what string, good bool, err error) {
			if err == nil && !good {
				t.Fatalf("%s of %q", what, s)
			}
			if err != nil && (strings.ContainsFunc(err.Error(), func(r rune) bool { return r < ' ' || r > '~' }) || len(err.Error()) > 600) {
				t.Fatalf("%s of %q: error %q", what, s, err)
			}
		}
		id, err := parseID(s)
		check("ID", len(id) == 4, err)
		class, err := parseClass(s)
		check("class", class < 1<<24, err)
		node, err := parseNode(s)
		check("node", node >= Unknown, err)
		count, err := parseCount(s)
		check("count", count >= 0, err)
		kind, err := parseLinkType(s)
		check("type", kind == "" || kind == Ether || kind == InfiniBand, err)
		_, err = parseErrors(s)
		check("errors", true, err)
		_, err = parseCarrier(s)
		check("carrier", true, err)
		distances, err := parseDistances(s)
		check("distances", len(distances) <= maxNodes, err)
		nodes, err := parseList(s, maxNodes)
		check("nodes", len(nodes) > 0 && len(nodes) <= maxNodes && nodes[len(nodes)-1]-nodes[0] >= len(nodes)-1, err)
		_, err = parseWord(s)
		check("word", len(s) <= maxWord, err)
		if index, ok := parseVF(s); ok && (index < 0 || index > 99999) {
			t.Fatalf("VF of %q: %d", s, index)
		}
		if root := parseRoot(s); root != "" && !strings.Contains(s, "/"+root+"/") {
			t.Fatalf("root of %q: %q", s, root)
		}
		isRepresentor(s, s)
	})
}

func TestCPUList(t *testing.T) {
	for text, want := range map[string][]int{"0-2,32": {0, 1, 2, 32}, "3": {3}, "": nil, "x-2": nil, "0-x": nil, "0-999999": nil, "2,1": nil} {
		if got := (Node{CPUs: text}).CPUList(); !slices.Equal(got, want) {
			t.Errorf("%q: %v", text, got)
		}
	}
}
