// SPDX-License-Identifier: Apache-2.0

// Faults runs every test that carries the number of a fault, such as F-15, at full length, and prints a table of what was tried and
// what came of it. Nothing of the table stands here: a test carries the number in the title of a subtest, or in its comment as in
// "TestReboot (F-27): leases of an earlier boot…", and tells its figures in a line "figures: points=12 leaks=0 duplicates=0 next=12 failed=0".
//
//	go run ./integration/faults [-jobs 2] [-sample] [-run F-2]
package main

import (
	"flag"
	"fmt"
	"os"
	"regexp"
	"sync"
	"time"
)

func main() {
	jobs := flag.Int("jobs", 2, "how many tests run at the same time")
	sample := flag.Bool("sample", false, "try a sample of the points, as every test run does")
	only := flag.String("run", "F-", "run tests with a number that matches this regular expression")
	flag.Parse()
	if err := run(*jobs, *sample, *only); err != nil {
		fmt.Fprintln(os.Stderr, "faults:", err)
		os.Exit(1)
	}
}

func run(jobs int, sample bool, only string) error {
	filter, err := regexp.Compile(only)
	if err != nil {
		return err
	}
	tests, err := find(".", filter)
	if err != nil {
		return err
	}
	fmt.Printf("%d tests carry the numbers of faults; %d at a time\n", len(tests), jobs)
	start := time.Now()
	rows, failed := runAll(tests, jobs, sample)
	printTable(os.Stdout, rows)
	fmt.Printf("%d items in %.0f s\n", len(rows), time.Since(start).Seconds())
	if failed > 0 {
		return fmt.Errorf("%d tests failed", failed)
	}
	return nil
}

// runAll runs the tests and returns their rows, and how many failed.
func runAll(tests []test, jobs int, sample bool) (rows []row, failed int) {
	queue := make(chan test)
	var mutex sync.Mutex
	var workers sync.WaitGroup
	for range jobs {
		workers.Go(func() {
			for t := range queue {
				fmt.Printf("  start %s in %s\n", t.name, t.dir)
				found, output, err := t.run(sample)
				mutex.Lock()
				for _, r := range found {
					fmt.Printf("  %s\n", r.line())
				}
				if err != nil {
					failed++
					fmt.Printf("FAIL %s in %s: %v\n%s\n", t.name, t.dir, err, output)
				}
				rows = append(rows, found...)
				mutex.Unlock()
			}
		})
	}
	for _, t := range tests {
		queue <- t
	}
	close(queue)
	workers.Wait()
	return rows, failed
}
