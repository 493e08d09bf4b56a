// SPDX-License-Identifier: Apache-2.0

package podmetrics

import (
	"math"
	"testing"

	"github.com/podlace/podlace/pkg/kernel"
)

// TestAddDifference also covers the overflow of dropped packets, which the kernel counts in 32 bits.
func TestAddDifference(t *testing.T) {
	for name, c := range map[string]struct {
		was, is kernel.Counters
		want    counted
	}{
		"more":      {kernel.Counters{Sent: 100, Dropped: 1}, kernel.Counters{Sent: 300, Dropped: 4}, counted{200, 3}},
		"recreated": {kernel.Counters{Sent: 100, Dropped: 9}, kernel.Counters{Sent: 300, Dropped: 4}, counted{300, 4}},
		"overflow":  {kernel.Counters{Sent: 1e12, Dropped: math.MaxUint32 - 5}, kernel.Counters{Sent: 1e12 + 200, Dropped: 4}, counted{200, 10}},
	} {
		var got counted
		if got.addDifference(c.was, c.is); got != c.want {
			t.Errorf("%s: %+v, want %+v", name, got, c.want)
		}
	}
}
