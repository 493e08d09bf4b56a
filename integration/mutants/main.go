// SPDX-License-Identifier: Apache-2.0

// Command mutants measures how many wrong changes of the source the tests of a package notice.
//
// A mutant is one wrong change: a condition is always true or never true, a comparison gains or loses its limit, a statement is left out,
// an error is lost, a sum is its first term. All mutants of a package are compiled into one test program, and a file selects the active
// one. Each test first runs without a mutant and records those that it reaches: those whose value or statement would differ from the
// source. A sample of them is then tried: the tests that reach a mutant run until one of them fails or exceeds a time limit, which kills
// the mutant.
//
// A sample depends only on the seed, the names of functions and the changed texts, so an edit elsewhere draws the same mutants. The tests
// run in a sandbox with a read-only root file system, because a mutant may delete files that the source would keep.
//
// The result is compared with the committed table: see row.worse.
package main

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// module is the path of the main module with a slash.
const module = "github.com/podlace/podlace/"

type options struct {
	packages, seed, rates string
	sample                int
	update                bool
}

func main() {
	var o options
	flag.StringVar(&o.packages, "packages", "./pkg/...", "`packages`, separated by commas")
	flag.StringVar(&o.rates, "rates", "integration/mutants/rates.tsv", "committed `table`")
	flag.StringVar(&o.seed, "seed", "1", "`seed` of the sample; the committed table has seed 1")
	flag.IntVar(&o.sample, "sample", 0, "`mutants` to try in each package; 0 for as many as in the committed table, or 24")
	flag.BoolVar(&o.update, "update", false, "write the results into the committed table")
	flag.Parse()
	code, err := enter(o)
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		code = 1
	}
	os.Exit(code)
}

// enter lists the packages and runs the rest in a sandbox.
func enter(o options) (int, error) {
	if flag.NArg() > 0 {
		return 1, fmt.Errorf("unexpected argument %s: want -packages %[1]s", flag.Arg(0))
	}
	packages, err := list(strings.Split(o.packages, ","))
	if err != nil {
		return 1, err
	}
	inside, code, err := sandbox.Enter()
	if err != nil || !inside {
		return code, err
	}
	if err := protect(filepath.Dir(o.rates)); err != nil {
		return 1, err
	}
	return 0, runAll(o, packages)
}

// list returns the packages. Outside the sandbox, it also downloads what their tests import.
func list(patterns []string) (packages []goPackage, err error) {
	if out, err := exec.Command("go", append([]string{"list", "-deps", "-test"}, patterns...)...).CombinedOutput(); err != nil {
		return nil, fmt.Errorf("go list: %w\n%s", err, out)
	}
	out, err := exec.Command("go", append([]string{"list", "-json=Dir,ImportPath,Name,GoFiles,TestGoFiles,XTestGoFiles"}, patterns...)...).Output()
	for decoder := json.NewDecoder(bytes.NewReader(out)); err == nil; {
		var p goPackage
		if err = decoder.Decode(&p); err == nil {
			packages = append(packages, p)
		}
	}
	if !errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("go list: %w", err)
	}
	return packages, nil
}

// runAll prints a row for each package. It goes on after an error.
func runAll(o options, packages []goPackage) error {
	rates, err := readRates(o.rates)
	if err != nil {
		return err
	}
	var errs []error
	fmt.Print(header)
	for _, p := range packages {
		name := strings.TrimPrefix(p.ImportPath, module)
		committed, known := rates[name]
		if len(p.TestGoFiles)+len(p.XTestGoFiles) == 0 {
			if known {
				errs = append(errs, fmt.Errorf("%s: has no tests, but a row in %s", name, o.rates))
			}
			continue
		}
		r, err := runPackage(p, o.seed, cmp.Or(o.sample, committed.tried, 24))
		switch {
		case err != nil:
			errs = append(errs, fmt.Errorf("%s: %w", name, err))
		case o.update:
			errs = append(errs, updateRates(o.rates, r))
		case !known:
			errs = append(errs, fmt.Errorf("%s: no row in %s: add it with ARGS='-packages ./%s -update'", name, o.rates, name))
		default:
			errs = append(errs, r.worse(committed))
		}
	}
	return errors.Join(errs...)
}

// runPackage tries a sample of the mutants of a package, and prints the row and the survivors.
func runPackage(p goPackage, seed string, sample int) (row, error) {
	began := time.Now()
	t, err := newTrial(p, seed)
	if err != nil {
		return row{}, err
	}
	reached := t.reached()
	r := row{pkg: t.pkg, mutants: len(t.mutants), reached: len(reached)}
	hash := sha256.New()
	var survivors []string
	for _, m := range reached[:min(sample, len(reached))] {
		r.tried++
		fmt.Fprintln(hash, m.order)
		if v := t.try(m.id); v == survived {
			survivors = append(survivors, fmt.Sprintf("  survived: %s: %s\n", m.place, m.change))
		} else {
			r.killed++
		}
	}
	r.sample = fmt.Sprintf("%x", hash.Sum(nil))[:8]
	r.seconds = int(time.Since(began).Seconds())
	fmt.Print(r, strings.Join(survivors, ""))
	return r, nil
}
