// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"fmt"
	"os"
	"testing"
)

// exhaustive tells whether every case is wanted, and not a sample.
func exhaustive() bool { return os.Getenv("FAULTS") == "all" }

// some is how many rounds of a fault to try: few in every run, or all.
func some[T any](few, all T) T {
	if exhaustive() {
		return all
	}
	return few
}

// tally counts what the tests of faults tried and found. The titles of these tests begin
// with the number of the fault.
type tally struct {
	points     int // places or cases in which the fault came
	leaks      int // after how many of them something was left
	duplicates int // addresses that two pods had
	next       int // how often another ADD was tried afterwards
	nextFailed int
}

func (y *tally) report(t *testing.T) {
	t.Helper()
	fmt.Fprintf(t.Output(), "figures: points=%d leaks=%d duplicates=%d next=%d failed=%d\n", y.points, y.leaks, y.duplicates, y.next, y.nextFailed)
}
