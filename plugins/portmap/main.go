// SPDX-License-Identifier: Apache-2.0

// Command portmap is a CNI plugin; see its README.md.
package main

import (
	"os"

	"github.com/podlace/podlace/pkg/portmap"
)

func main() { os.Exit(portmap.Plugin().Main()) }
