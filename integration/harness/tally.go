// SPDX-License-Identifier: Apache-2.0

package harness

import (
	"fmt"
	"os"
	"testing"
)

// Exhaustive reports whether FAULTS=all is set. With this setting, the tests run every case. Otherwise the tests run only a sample of the
// cases.
func Exhaustive() bool { return os.Getenv("FAULTS") == "all" }

// Some returns its second argument if FAULTS=all is set, and its first argument otherwise.
func Some[T any](few, all T) T {
	if Exhaustive() {
		return all
	}
	return few
}

// Tally counts the results of fault tests. The titles of these tests begin with the number of the fault.
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
