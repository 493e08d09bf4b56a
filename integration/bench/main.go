// SPDX-License-Identifier: Apache-2.0

// Command bench compares two folders of CNI plugins (plugin sets) in private namespaces. It measures the verbs, alone, on a full node and
// in parallel; the processes that they start and the sizes of the binaries; the throughput of pods with its processor time; the accuracy
// and cost of bandwidth limits, the first second under a limit, and the delay of other traffic while one flow uses all of it; and GC.
//
// Podlace and the reference plugins run alternately, so ratios are comparable between machines; absolute times are not. A missed target is
// in the report but does not change the exit status, which is 1 if a measurement did not run or a plugin gave a wrong result, such as one
// address for two pods, a leaked lease, or a GC that removed too much or too little.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/podlace/podlace/pkg/cli/sandbox"
)

type options struct {
	pluginFolders
	rounds    int
	seconds   float64
	scale     float64
	groups    []string
	format    string
	picture   string // path of the picture, "" for none
	temporary string // folder that exists during the run
}

const (
	groupChains   = "chains"
	groupDatapath = "datapath"
	groupAll      = "all"
	groupScale    = "scale" // what comes after these two
)

func (o options) scaledSize(full int) int { return max(1, int(float64(full)*o.scale)) }

func main() {
	o, err := parse(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(2)
	}
	inside, code, err := sandbox.Enter()
	if err == nil && inside {
		code, err = runBench(o, os.Stdout, os.Stderr)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		code = 1
	}
	os.Exit(code)
}

func parse(args []string) (options, error) {
	var o options
	flags := flag.NewFlagSet("bench", flag.ContinueOnError)
	flags.StringVar(&o.plugins, "plugins", "bin", "`folder` of the plugins to judge")
	flags.StringVar(&o.reference, "reference", "build/reference", "`folder` of the plugins to compare with")
	flags.IntVar(&o.rounds, "rounds", 30, "`rounds` of ADD, CHECK and DEL that count; below 10, limits are measured in short")
	flags.Float64Var(&o.seconds, "seconds", 6, "`length` of each throughput measurement, all repeats together")
	flags.Float64Var(&o.scale, "scale", 1, "`part` of the leases, pods and attachments to have beside, up to 1")
	group := flags.String("group", groupAll, "comma-separated `groups` of rows: "+strings.Join(groupNames(), ", "))
	flags.StringVar(&o.format, "o", "markdown", "output: markdown or json")
	flags.StringVar(&o.picture, "picture", "", "also write a picture of the group chains to an SVG `file`")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	o.groups = strings.Split(*group, ",")
	for _, name := range o.groups {
		if !slices.Contains(groupNames(), name) {
			return o, fmt.Errorf("group %q: want some of %s", name, strings.Join(groupNames(), ", "))
		}
	}
	if o.rounds < 1 || o.seconds <= 0 || o.scale <= 0 || o.scale > 1 || flags.NArg() > 0 || (o.format != "markdown" && o.format != "json") {
		return o, errors.New("want -rounds of at least 1, -seconds above 0, -scale above 0 and up to 1, -o markdown or json, and no arguments")
	}
	if o.picture != "" && !o.isSelected(groupChains) {
		return o, fmt.Errorf("-picture shows the group %s, which is not selected", groupChains)
	}
	for folder, hint := range map[*string]string{&o.plugins: "make build", &o.reference: "make reference"} {
		path, err := filepath.Abs(*folder)
		if err != nil {
			return o, fmt.Errorf("find %s: %w", *folder, err)
		}
		if _, err := os.Stat(filepath.Join(path, "bridge")); err != nil {
			return o, fmt.Errorf("no plugins in %s (%s makes them): %w", *folder, hint, err)
		}
		*folder = path
	}
	return o, nil
}

// runBench runs the selected measurements, writes the report, and returns 1 if one of them failed.
func runBench(o options, out, progress io.Writer) (int, error) {
	// The plugins look for iptables and nft in PATH, where an ordinary user does not have them.
	if err := os.Setenv("PATH", os.Getenv("PATH")+":/usr/sbin:/sbin"); err != nil {
		return 1, fmt.Errorf("extend PATH: %w", err)
	}
	var err error
	if o.temporary, err = os.MkdirTemp("", "podlace-bench-"); err != nil {
		return 1, err
	}
	defer func() { _ = os.RemoveAll(o.temporary) }() // best effort, because it is a temporary folder

	r := newReport(o)
	start := time.Now()
	n := nodes{}
	for _, m := range measurementGroups() {
		if o.isSelected(m.group) {
			fmt.Fprintln(progress, m.says)
			m.measure(r, o, n)
		}
	}
	r.Seconds = time.Since(start).Round(100 * time.Millisecond).Seconds()

	if err := r.write(out, o.format); err != nil {
		return 1, err
	}
	if o.picture != "" {
		if err := os.WriteFile(o.picture, []byte(r.picture()), 0o644); err != nil {
			return 1, fmt.Errorf("write the picture: %w", err)
		}
	}
	if len(r.Failed) > 0 {
		return 1, nil
	}
	return 0, nil
}
