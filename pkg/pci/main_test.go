// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"reflect"
	"slices"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
)

func TestMain(m *testing.M) { kerneltest.Main(m) }

func address(t testing.TB, s string) Address {
	t.Helper()
	a, err := ParseAddress(s)
	must(t, err)
	return a
}

func mustScan(t testing.TB, sysfs string) *Snapshot {
	t.Helper()
	s, err := Scan(sysfs)
	must(t, err)
	return s
}

// differences returns the addresses of the devices that differ between two snapshots, and "nodes" if their NUMA nodes differ.
func differences(from, to *Snapshot) (what []string) {
	for _, s := range [][2]*Snapshot{{from, to}, {to, from}} {
		for _, d := range s[0].Devices {
			if other, ok := s[1].Device(d.Address); !ok || !reflect.DeepEqual(d, other) {
				what = append(what, d.Address.String())
			}
		}
	}
	if !reflect.DeepEqual(from.Nodes, to.Nodes) {
		what = append(what, "nodes")
	}
	slices.Sort(what)
	return slices.Compact(what)
}

func must(t testing.TB, errs ...error) {
	t.Helper()
	for _, err := range errs {
		if err != nil {
			t.Fatal(err)
		}
	}
}
