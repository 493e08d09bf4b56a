// SPDX-License-Identifier: Apache-2.0

// Command podlace is the operator's command line.
package main

import (
	"os"

	"github.com/podlace/podlace/pkg/cli"
)

func main() {
	os.Exit(cli.Run(os.Args[1:], os.Stdout, os.Stderr))
}
