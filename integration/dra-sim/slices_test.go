// SPDX-License-Identifier: Apache-2.0

package main

import (
	"math/rand/v2"
	"testing"

	"github.com/podlace/podlace/pkg/daemon/dra"
)

// machineCount is the number of random machines in a test.
const machineCount = 500

// The API server accepts the slices of healthy machines and of those with each kind of fault.
func TestSlicesValid(t *testing.T) {
	c, err := parseDefaultConfig()
	if err != nil {
		t.Fatal(err)
	}
	server := newAPIServer()
	for seed := range uint64(machineCount) {
		r := rand.New(rand.NewPCG(seed, 1))
		m := randomMachine(r)
		i := m.inventory(c)
		for _, d := range i.Snapshot.Devices {
			switch id := d.Address.String(); r.IntN(8) {
			case 0:
				i.Faults[id] = dra.Fault{Kind: dra.LinkDown, Text: "the link is down"}
			case 1:
				i.Faults[id] = dra.Fault{Kind: "no-driver", Text: "it has no driver"}
			case 2:
				i.Held[id] = "pod shop/web-0"
			}
		}
		devices := 0
		for _, s := range publishedSlices(m.name, i) {
			devices += len(s.Spec.Devices)
			if err := server.validateNew(s); err != nil {
				t.Errorf("seed %d, %+v: slice %s: %v", seed, m, s.Name, err)
			}
			if size := s.Size(); size > 500*len(s.Spec.Devices)+2000 {
				t.Errorf("seed %d, %+v: slice %s: %d bytes for %d devices", seed, m, s.Name, size, len(s.Spec.Devices))
			}
		}
		if want := m.pfs*m.vfs - countHeld(i); devices != want {
			t.Errorf("seed %d, %+v: %d devices, want %d", seed, m, devices, want)
		}
	}
}

// countHeld returns the number of VFs that pods use without a claim.
func countHeld(i dra.Inventory) (n int) {
	for _, d := range i.Snapshot.Devices {
		if d.IsVF() && i.Held[d.Address.String()] != "" {
			n++
		}
	}
	return n
}
