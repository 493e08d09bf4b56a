// SPDX-License-Identifier: Apache-2.0

// Command loopback is a CNI plugin; see its README.md.
package main

import (
	"os"

	"github.com/podlace/podlace/pkg/loopback"
)

func main() { os.Exit(loopback.Plugin().Main()) }
