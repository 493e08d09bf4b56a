// SPDX-License-Identifier: Apache-2.0

// Command plot measures what burst and latency of the bandwidth plugin are good for, and writes tables that gnuplot reads:
// scripts/plot-limits.sh draws them. It runs the real plugins, in private namespaces.
package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/podlace/podlace/pkg/sandbox"
)

type options struct {
	plugins, reference, out string
	rounds                  int
}

func main() {
	o, err := parse(os.Args[1:])
	if errors.Is(err, flag.ErrHelp) {
		return
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "plot:", err)
		os.Exit(2)
	}
	inside, code, err := sandbox.Enter()
	if err == nil && inside {
		err = o.run()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "plot:", err)
		code = 1
	}
	os.Exit(code)
}

func parse(args []string) (o options, err error) {
	flags := flag.NewFlagSet("plot", flag.ContinueOnError)
	flags.StringVar(&o.plugins, "plugins", "bin", "`folder` of the plugins")
	flags.StringVar(&o.reference, "reference", "", "`folder` of the reference plugins; without it, nothing is compared")
	flags.StringVar(&o.out, "out", "build/limits", "`folder` to write bursts.dat, latency.dat and facts.gp to")
	flags.IntVar(&o.rounds, "rounds", 3, "`rounds`, of which medians are written")
	if err := flags.Parse(args); err != nil {
		return o, err
	}
	if o.rounds < 1 || flags.NArg() > 0 {
		return o, errors.New("want -rounds of at least 1, and no arguments")
	}
	for _, folder := range []*string{&o.plugins, &o.reference} {
		if *folder == "" {
			continue
		}
		if *folder, err = filepath.Abs(*folder); err != nil {
			return o, err
		}
		if _, err := os.Stat(filepath.Join(*folder, plugin)); err != nil {
			return o, fmt.Errorf("make build reference: %w", err)
		}
	}
	return o, nil
}

// run measures in rounds, so that what disturbs one of them disturbs no figure alone.
func (o options) run() error {
	curves, points := curves(o), points(o)
	for i := range o.rounds {
		fmt.Fprintf(os.Stderr, "round %d of %d\n", i+1, o.rounds)
		for _, c := range curves {
			if err := c.measure(); err != nil {
				return fmt.Errorf("burst, %s: %w", c.title, err)
			}
		}
		for _, p := range points {
			if err := p.measure(); err != nil {
				return fmt.Errorf("latency %v: %w", p.latency, err)
			}
		}
	}
	return o.write(curves, points)
}

func (o options) write(curves []*curve, points []*point) error {
	if err := os.MkdirAll(o.out, 0o755); err != nil {
		return err
	}
	head, rows := []string{"seconds"}, [][]float64{{0}}
	for at := step; at <= shown; at += step {
		rows = append(rows, []float64{at.Seconds()})
	}
	for _, c := range curves {
		head = append(head, c.title)
		for i := range rows {
			rows[i] = append(rows[i], median(c.megabits[i]))
		}
	}
	if err := writeTable(filepath.Join(o.out, "bursts.dat"), head, rows); err != nil {
		return err
	}
	rows = nil
	for _, p := range points {
		rows = append(rows, []float64{float64(p.latency) / float64(time.Millisecond), median(p.p50), median(p.p95), median(p.lost), median(p.goodput)})
	}
	if err := writeTable(filepath.Join(o.out, "latency.dat"), []string{"latency", "median", "95th percentile", "lost", "goodput"}, rows); err != nil {
		return err
	}
	queue := "all flows in one queue"
	if points[0].fair {
		queue = "a queue for each flow"
	}
	return os.WriteFile(filepath.Join(o.out, "facts.gp"), fmt.Appendf(nil, "queue = %q\ncurves = %d\n", queue, len(curves)), 0o644)
}
