// SPDX-License-Identifier: Apache-2.0

// Command bridge is a CNI plugin; see its README.md.
package main

import (
	"os"

	"github.com/podlace/podlace/pkg/bridge"
	"github.com/podlace/podlace/pkg/hostlocal"
)

func main() { os.Exit(bridge.Plugin(hostlocal.Plugin()).Main()) }
