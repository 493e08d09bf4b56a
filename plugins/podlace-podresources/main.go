// SPDX-License-Identifier: Apache-2.0

// Command podlace-podresources asks the kubelet for the plugin sriov; see its README.md.
package main

import (
	"os"

	"github.com/podlace/podlace/pkg/daemon/podresources"
)

func main() { os.Exit(podresources.Main(os.Args[1:], os.Stdin, os.Stdout)) }
