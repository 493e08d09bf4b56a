// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"fmt"
	"slices"
	"time"
)

// quantile returns a quantile; 0.5 is the median.
func quantile(list []time.Duration, share float64) time.Duration {
	sorted := slices.Sorted(slices.Values(list))
	return sorted[min(int(share*float64(len(sorted))), len(sorted)-1)]
}

func quantiles(list []time.Duration) string {
	return fmt.Sprintf("p50 %s, p99 %s", milliseconds(quantile(list, 0.5)), milliseconds(quantile(list, 0.99)))
}

func milliseconds(d time.Duration) string { return fmt.Sprintf("%d ms", d.Milliseconds()) }
