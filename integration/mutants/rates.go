// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"maps"
	"math"
	"os"
	"slices"
	"strings"
)

// A row is the result of one package.
type row struct {
	pkg     string
	mutants int // mutants of the package
	reached int // of these, those that change what a test computes
	tried   int // of these, the sample
	killed  int
	sample  string // hash of the sample
	seconds int
}

const header = "package\tmutants\treached\ttried\tkilled\trate\tsample\tseconds\n"

func (r row) String() string {
	return fmt.Sprintf("%s\t%d\t%d\t%d\t%d\t%.0f%%\t%s\t%d\n",
		r.pkg, r.mutants, r.reached, r.tried, r.killed, 100*r.rate(), r.sample, r.seconds)
}

func (r row) rate() float64 { return share(r.killed, r.tried) }

func share(part, whole int) float64 { return float64(part) / float64(max(1, whole)) }

func readRates(file string) (map[string]row, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	rows := map[string]row{}
	for line := range strings.Lines(strings.TrimPrefix(string(text), header)) {
		var r row
		var rate string
		if _, err := fmt.Sscan(line, &r.pkg, &r.mutants, &r.reached, &r.tried, &r.killed, &rate, &r.sample, &r.seconds); err != nil {
			return nil, fmt.Errorf("%s: %q: %w", file, line, err)
		}
		rows[r.pkg] = r
	}
	return rows, nil
}

// updateRates replaces or adds one row of the table, which another run may have changed since this run began.
func updateRates(file string, r row) error {
	rows, err := readRates(file)
	if err != nil {
		return err
	}
	rows[r.pkg] = r
	text := header
	for _, pkg := range slices.Sorted(maps.Keys(rows)) {
		text += rows[pkg].String()
	}
	return os.WriteFile(file, []byte(text), 0o644)
}

// reachTolerance is how far the share of reached mutants may fall, because tests of time and traffic take different paths in each run.
const reachTolerance = 0.01

// worse returns an error if a package's tests are weaker than the committed row. With the same sample, each mutant that is no longer killed
// counts; another may differ by two standard errors of the committed rate.
func (r row) worse(committed row) error {
	tolerance := 0.0
	if r.sample != committed.sample {
		p := float64(committed.killed+1) / float64(committed.tried+2) // of few, all may be killed by chance
		tolerance = 2 * math.Sqrt(p*(1-p)/float64(max(1, r.tried)))
	}
	was, is := share(committed.reached, committed.mutants), share(r.reached, r.mutants)
	switch {
	case is < was-reachTolerance:
		return fmt.Errorf("%s: the tests reach %.1f%% of the mutants, before %.1f%%", r.pkg, 100*is, 100*was)
	case r.rate() < committed.rate()-tolerance:
		return fmt.Errorf("%s: the tests kill %d of %d mutants, before %d of %d", r.pkg, r.killed, r.tried, committed.killed, committed.tried)
	}
	return nil
}
