// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"testing"
	"time"
)

func TestGathering(t *testing.T) {
	const ms = time.Millisecond
	for took, want := range map[time.Duration]time.Duration{0: 100 * ms, 25 * ms: 100 * ms, 60 * ms: 240 * ms, 3 * time.Second: 500 * ms} {
		if got := collectWindow(took); got != want {
			t.Errorf("after a comparison of %v: %v, want %v", took, got, want)
		}
	}
}
