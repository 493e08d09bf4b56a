// SPDX-License-Identifier: Apache-2.0

// Command sriov-device-plugin offers the VFs of a node to pods; see its README.md.
package main

import (
	"os"

	"github.com/podlace/podlace/pkg/daemon/claimcheck"
	"github.com/podlace/podlace/pkg/daemon/deviceplugin"
)

func main() { os.Exit(claimcheck.Main(os.Args[1:], deviceplugin.Main)) }
