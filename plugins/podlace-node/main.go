// SPDX-License-Identifier: Apache-2.0

// Command podlace-node connects the pods of all nodes in a cluster; see its README.md.
package main

import (
	"os"

	"github.com/podlace/podlace/pkg/agent/nodeagent"
)

func main() { os.Exit(nodeagent.Main(os.Args[1:], os.Stdout, os.Stderr)) }
