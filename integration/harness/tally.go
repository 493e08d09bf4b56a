// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"fmt"
	"os"
	"testing"
)

// Exhaustive reports whether FAULTS=all is set, with which tests run every case instead of a sample.
func Exhaustive() bool { return os.Getenv("FAULTS") == "all" }

// Some returns all with FAULTS=all, and few otherwise.
func Some[T any](few, all T) T {
	if Exhaustive() {
		return all
	}
	return few
}

// OneOf returns the whole list with FAULTS=all. Otherwise it returns item i modulo the length, so that a loop over i uses each in turn.
func OneOf[T any](list []T, i int) []T {
	i %= len(list)
	return Some(list[i:i+1], list)
}

// Tally counts the results of fault tests, whose titles begin with the fault's number, such as F-11.
type Tally struct {
	Points     int // places or cases with an injected fault
	Leaks      int // number of points after which state was leaked
	Duplicates int // addresses that two pods had
	Next       int // number of further ADDs that were tried afterwards
	NextFailed int
}

// Report prints the counts.
func (y *Tally) Report(t *testing.T) {
	t.Helper()
	fmt.Fprintf(t.Output(), "figures: points=%d leaks=%d duplicates=%d next=%d failed=%d\n", y.Points, y.Leaks, y.Duplicates, y.Next,
		y.NextFailed)
}
