// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"testing"

	"github.com/podlace/podlace/pkg/kernel/kerneltest"
)

func TestMain(m *testing.M) { kerneltest.Main(m) }

func address(t testing.TB, s string) Address {
	t.Helper()
	a, err := ParseAddress(s)
	must(t, err)
	return a
}

// eight is how many channels each interface has.
func eight(string, Address) int { return 8 }

func mustScan(t testing.TB, sysfs string) *Snapshot {
	t.Helper()
	s, err := scan(sysfs, eight)
	must(t, err)
	return s
}

func must(t testing.TB, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}
