// SPDX-License-Identifier: Apache-2.0

// Command vm is the first process of the virtual machine in which tests run (make vm). The guest has no disk. The root of the guest is an
// overlay: a writable RAM disk over the read-only file system of the host. A test binary and the tools of the host therefore have the same
// paths in the guest. On the host, vm writes an initial RAM disk that contains the program vm:
//
//	vm -modules lib/modules/6.12 -load 9p,overlay -out initrd
package main

import (
	"flag"
	"fmt"
	"os"
	"strings"
)

func main() {
	if os.Getpid() == 1 {
		bootGuest()
		return
	}
	modules := flag.String("modules", "", "folder of the kernel's modules, with modules.dep")
	load := flag.String("load", "", "modules to load before the file system of the host is mounted")
	out := flag.String("out", "", "file to write")
	flag.Parse()
	if err := writeInitrd(*modules, strings.Split(*load, ","), *out); err != nil {
		fmt.Fprintln(os.Stderr, "vm:", err)
		os.Exit(1)
	}
}
