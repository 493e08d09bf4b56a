// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"
)

// TestSimulation simulates a small cluster. There is a row for each size and claim, and ResourceSlices have at most 500 bytes per VF.
func TestSimulation(t *testing.T) {
	o, err := parseFlags([]string{"-nodes", "20", "-rounds", "10"}, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if err := runSimulation(t.Context(), o, &out); err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(out.String(), "\n| 16 | ") + strings.Count(out.String(), "\n| 64 | "); n != 2+2*3*2 {
		t.Errorf("%d rows:\n%s", n, out.String())
	}
	for _, vfs := range o.vfs {
		c, err := simulatedCluster(o, vfs)
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range c.slices {
			if per := devicesSize(s) / len(s.Spec.Devices); per > 500 {
				t.Errorf("%d VFs: %d bytes for each VF of slice %s", vfs, per, s.Name)
			}
		}
	}
	for _, args := range [][]string{{"-nodes", "0"}, {"-full", "1"}, {"-rounds", "0"}} {
		if _, err := parseFlags(args, t.Output()); err == nil {
			t.Errorf("%q: no error", args)
		}
	}
}
