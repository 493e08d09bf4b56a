// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// loadList is the RAM disk's list of modules in loading order.
const loadList = "modules.load"

// cpioArchive is a cpio archive in the format "newc", which the kernel can unpack
// (Documentation/driver-api/early-userspace/buffer-format.rst).
type cpioArchive struct {
	bytes.Buffer
	inode int
}

func (a *cpioArchive) add(name string, mode, major, minor int, data []byte) {
	a.inode++
	fmt.Fprintf(a, "070701%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%08x%s\x00",
		a.inode, mode, 0, 0, 1, 0, len(data), 0, 0, major, minor, len(name)+1, 0, name)
	a.align()
	a.Write(data)
	a.align()
}

func (a *cpioArchive) align() { a.Write(make([]byte, -a.Len()&3)) }

// writeInitrd writes a RAM disk with kernel modules and this program, which the kernel starts first.
func writeInitrd(folder string, names []string, out string) error {
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		return err
	}
	var a cpioArchive
	a.add("dev", 0o40755, 0, 0, nil)
	a.add("dev/console", 0o20600, 5, 1, nil)
	a.add("init", 0o100755, 0, 0, self)
	files, err := loadOrder(folder, names)
	if err != nil {
		return err
	}
	var list strings.Builder
	for _, file := range files {
		data, err := os.ReadFile(filepath.Join(folder, file))
		if err != nil {
			return err
		}
		a.add(filepath.Base(file), 0o100644, 0, 0, data)
		fmt.Fprintln(&list, filepath.Base(file))
	}
	a.add(loadList, 0o100644, 0, 0, []byte(list.String()))
	a.add("TRAILER!!!", 0, 0, 0, nil)
	return os.WriteFile(out, a.Bytes(), 0o644)
}

// loadOrder returns the files of kernel modules with each after its dependencies. A module without a file is built into the kernel.
func loadOrder(folder string, names []string) (files []string, err error) {
	data, err := os.ReadFile(filepath.Join(folder, "modules.dep"))
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		for line := range strings.Lines(string(data)) {
			file, needs, _ := strings.Cut(line, ":")
			if strings.TrimSuffix(filepath.Base(file), ".ko") != name {
				continue
			}
			order := append([]string{file}, strings.Fields(needs)...) // depmod lists the first module to load last
			slices.Reverse(order)
			for _, f := range order {
				if !slices.Contains(files, f) {
					files = append(files, f)
				}
			}
		}
	}
	return files, nil
}
