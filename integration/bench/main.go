// SPDX-License-Identifier: Apache-2.0

// Command bench compares two folders of CNI plugins side by side, in one run and in private namespaces: times of
// ADD, CHECK and DEL, processes started, binary sizes, what pods move and what that costs, and what a limited pod
// receives in its first second. A floor program makes exactly the needed kernel calls in as many processes and
// shows how far down the times could go.
//
// Both folders run on the same machine at the same time, so ratios hold where times do not. A missed target is
// reported and is no failure; the exit status is 1 when something did not run.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"time"

	"github.com/podlace/podlace/pkg/sandbox"
)

type options struct {
	folders
	rounds  int
	seconds float64
	format  string
}

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
		code, err = run(o, os.Stdout, os.Stderr)
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
	flags.IntVar(&o.rounds, "rounds", 30, "`rounds` of ADD, CHECK and DEL that count")
	flags.Float64Var(&o.seconds, "seconds", 6, "`length` of each throughput measurement, all repeats together")
	flags.StringVar(&o.format, "o", "markdown", "output: markdown or json")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	if o.rounds < 1 || o.seconds <= 0 || flags.NArg() > 0 || (o.format != "markdown" && o.format != "json") {
		return o, errors.New("want -rounds of at least 1, -seconds above 0, -o markdown or json, and no arguments")
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

// run measures everything and writes the report. It gives 1 when something could not be measured.
func run(o options, out, progress io.Writer) (int, error) {
	// The plugins look for iptables and nft in PATH, which lacks these folders for ordinary users.
	if err := os.Setenv("PATH", os.Getenv("PATH")+":/usr/sbin:/sbin"); err != nil {
		return 1, fmt.Errorf("extend PATH: %w", err)
	}
	temporary, err := os.MkdirTemp("", "podlace-bench-")
	if err != nil {
		return 1, fmt.Errorf("make a folder for the floor: %w", err)
	}
	defer func() { _ = os.RemoveAll(temporary) }() // a leftover in the temporary folder harms nobody

	r := newReport(o)
	start := time.Now()
	fmt.Fprintln(progress, "building the floor programs")
	r.skip(o.buildFloors(temporary)...)
	n := nodes{}
	for _, s := range scenarios() {
		fmt.Fprintf(progress, "%s: %d rounds\n", s.name, o.rounds)
		r.measureChain(o, n, s)
	}
	r.addSizes(o.folders)
	fmt.Fprintln(progress, "throughput")
	r.measureDatapath(o, n)
	fmt.Fprintln(progress, "first second of a limited pod")
	r.measureFirstSecond(o, n)
	r.Seconds = time.Since(start).Round(100 * time.Millisecond).Seconds()

	if err := r.write(out, o.format); err != nil {
		return 1, err
	}
	if len(r.Failed) > 0 {
		return 1, nil
	}
	return 0, nil
}
