// SPDX-License-Identifier: Apache-2.0

// Command package writes the man pages of podlace's commands into a folder.
package main

import (
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/spf13/cobra/doc"

	"github.com/podlace/podlace/pkg/cli"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "package:", err)
		os.Exit(1)
	}
}

// run writes the man pages into the folder of the first argument, with the time of the second, in seconds since 1970.
func run(args []string) error {
	if len(args) != 2 {
		return fmt.Errorf("want the folder for the man pages and the time of their date, got %q", args)
	}
	seconds, err := strconv.ParseInt(args[1], 10, 64)
	if err != nil {
		return fmt.Errorf("time %q: want seconds since 1970", args[1])
	}
	at := time.Unix(seconds, 0).UTC()
	root := cli.Command()
	root.DisableAutoGenTag = true
	return doc.GenManTree(root, &doc.GenManHeader{Title: "PODLACE", Section: "1", Source: "Podlace", Date: &at}, args[0])
}
