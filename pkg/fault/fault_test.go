// SPDX-License-Identifier: Apache-2.0

//go:build !podlace_fault

package fault

import "testing"

// TestProduction: without the tag no environment makes anything fail.
func TestProduction(t *testing.T) {
	t.Setenv("PODLACE_FAIL_AT", "1")
	for range 3 {
		if err := Point("x"); err != nil {
			t.Error(err)
		}
	}
}
