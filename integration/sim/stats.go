// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"math"
)

// meanInterval is a mean and half the width of its confidence interval.
type meanInterval struct{ mean, half float64 }

// confidenceInterval returns the runs' mean with its 95 % confidence interval by Student's t distribution, which fits because runs are
// independent and each value is a mean over many pods.
func confidenceInterval(runs []float64) meanInterval {
	n := float64(len(runs))
	var sum, squares float64
	for _, v := range runs {
		sum += v
	}
	mean := sum / n
	for _, v := range runs {
		squares += (v - mean) * (v - mean)
	}
	return meanInterval{mean, studentQuantile(len(runs)-1) * math.Sqrt(squares/(n-1)/n)}
}

// studentQuantile returns the 97.5 % quantile of the t distribution: from a table for up to 10 degrees of freedom, and else by the
// Cornish-Fisher series, which is then accurate to three digits.
func studentQuantile(freedom int) float64 {
	table := []float64{12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228}
	if freedom <= len(table) {
		return table[freedom-1]
	}
	const z = 1.959964
	n := float64(freedom)
	return z + (z*z*z+z)/(4*n) + (5*math.Pow(z, 5)+16*z*z*z+3*z)/(96*n*n) +
		(3*math.Pow(z, 7)+19*math.Pow(z, 5)+17*z*z*z-15*z)/(384*n*n*n)
}

func (i meanInterval) cell(digits int) string {
	return fmt.Sprintf("%.*f ± %.*f", digits, i.mean, digits, i.half)
}
