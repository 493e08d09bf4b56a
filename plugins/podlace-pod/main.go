// SPDX-License-Identifier: Apache-2.0

// Command podlace-pod is a CNI plugin; see its README.md.
package main

import (
	"os"

	"github.com/podlace/podlace/pkg/podlacepod"
)

func main() { os.Exit(podlacepod.Plugin().Main()) }
