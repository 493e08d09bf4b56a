// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"fmt"
	"os"
	"testing"
)

// Exhaustive reports whether every case is wanted, and not a sample.
func Exhaustive() bool { return os.Getenv("FAULTS") == "all" }

// Some returns how many rounds of a fault to try: few in every run, or all.
func Some[T any](few, all T) T {
	if Exhaustive() {
		return all
	}
	return few
}

// Tally counts what the tests of faults tried and found. The titles of these tests begin
// with the number of the fault.
type Tally struct {
	Points     int // places or cases in which the fault came
	Leaks      int // after how many of them something was left
	Duplicates int // addresses that two pods had
	Next       int // how often another ADD was tried afterwards
	NextFailed int
}

// Report prints the figures.
func (y *Tally) Report(t *testing.T) {
	t.Helper()
	fmt.Fprintf(t.Output(), "figures: points=%d leaks=%d duplicates=%d next=%d failed=%d\n", y.Points, y.Leaks, y.Duplicates, y.Next,
		y.NextFailed)
}
