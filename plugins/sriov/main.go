// SPDX-License-Identifier: Apache-2.0

// Command sriov is a CNI plugin; see its README.md.
package main

import (
	"os"

	"github.com/podlace/podlace/pkg/hostlocal"
	"github.com/podlace/podlace/pkg/sriov"
)

func main() { os.Exit(sriov.Plugin(hostlocal.Plugin()).Main()) }
