// SPDX-License-Identifier: Apache-2.0

// Command bandwidth is a CNI plugin; see its README.md.
package main

import (
	"os"

	"github.com/podlace/podlace/pkg/bandwidth"
)

func main() { os.Exit(bandwidth.Plugin().Main()) }
