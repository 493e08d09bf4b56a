// SPDX-License-Identifier: Apache-2.0

// Command image needs neither docker nor helm. `build` creates Podlace's image, `pack` one of the given files, `manifest` the file for
// kubectl apply, and `chart` the Helm chart.
package main

import (
	"flag"
	"fmt"
	"os"
	"strings"
)

// command is one subcommand, such as `build`.
type command struct {
	name, args string
	run        func(args []string) error
}

func commands() []command {
	return []command{
		{"build", "-name REGISTRY/NAME:TAG -out FOLDER [-push] [flags]", runBuild},
		{"pack", "-name REGISTRY/NAME:TAG -out FILE.tar [flags] /PATH=FILE|/PATH=FOLDER|link:/PATH=TARGET|dir:/PATH=MODE ...", runPack},
		{"manifest", "-image REGISTRY/NAME@sha256:DIGEST [-component NAME]... [-sriov-config FILE] [-out FILE]", runManifest},
		{"chart", "-image REGISTRY/NAME@sha256:DIGEST -version VERSION -out FOLDER [-push REGISTRY/FOLDER]", runChart},
	}
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	var usage []string
	for _, c := range commands() {
		if len(args) > 0 && args[0] == c.name {
			return c.run(args[1:])
		}
		usage = append(usage, fmt.Sprintf("  image %s %s", c.name, c.args))
	}
	return fmt.Errorf("which command?\n%s", strings.Join(usage, "\n"))
}

// repeatedFlag is a command-line flag that may occur several times.
type repeatedFlag []string

func (w *repeatedFlag) String() string     { return strings.Join(*w, " ") }
func (w *repeatedFlag) Set(s string) error { *w = append(*w, s); return nil }

// newFlags returns a command's empty flag set, which answers a wrong flag with an error and all flags.
func newFlags(name string) *flag.FlagSet {
	return flag.NewFlagSet(name, flag.ContinueOnError)
}
