// SPDX-License-Identifier: Apache-2.0

// Command sriov-device-plugin gives the VFs of a node to its pods; see the README beside it.
package main

import (
	"os"

	"github.com/podlace/podlace/pkg/deviceplugin"
)

func main() { os.Exit(deviceplugin.Main(os.Args[1:], os.Stderr)) }
