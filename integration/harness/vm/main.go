// SPDX-License-Identifier: Apache-2.0

// Vm is the first process of the virtual machine that tests run in (make vm). The guest has no disk: it sees the file system of its
// host, read-only beneath a RAM disk, so that a test binary and the tools of the host are there under their own names. Started by hand
// it writes the initial RAM disk that holds itself:
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
		boot()
		return
	}
	modules := flag.String("modules", "", "folder of the kernel's modules, with modules.dep")
	load := flag.String("load", "", "modules to load before the file system of the host is mounted")
	out := flag.String("out", "", "file to write")
	flag.Parse()
	if err := pack(*modules, strings.Split(*load, ","), *out); err != nil {
		fmt.Fprintln(os.Stderr, "vm:", err)
		os.Exit(1)
	}
}
