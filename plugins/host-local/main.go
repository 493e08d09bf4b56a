// SPDX-License-Identifier: Apache-2.0

// Command host-local is a CNI plugin; see its README.md.
package main

import (
	"os"

	"github.com/podlace/podlace/pkg/hostlocal"
)

func main() { os.Exit(hostlocal.Plugin().Main()) }
