// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"math"
)

// interval is a mean and half the width of its confidence interval.
type interval struct{ mean, half float64 }

// confidence returns the mean of runs and the 95 % interval by Student's t. Runs are independent, and each is a mean over many pods.
func confidence(runs []float64) interval {
	n := float64(len(runs))
	var sum, squares float64
	for _, v := range runs {
		sum += v
	}
	mean := sum / n
	for _, v := range runs {
		squares += (v - mean) * (v - mean)
	}
	return interval{mean, student(len(runs)-1) * math.Sqrt(squares/(n-1)/n)}
}

// student returns the 97.5 % quantile of the t distribution from a table. Above the table it uses the series of Cornish and Fisher,
// which is accurate to three digits there.
func student(freedom int) float64 {
	table := []float64{12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228}
	if freedom <= len(table) {
		return table[freedom-1]
	}
	const z = 1.959964
	n := float64(freedom)
	return z + (z*z*z+z)/(4*n) + (5*math.Pow(z, 5)+16*z*z*z+3*z)/(96*n*n) +
		(3*math.Pow(z, 7)+19*math.Pow(z, 5)+17*z*z*z-15*z)/(384*n*n*n)
}

func (i interval) cell(digits int) string {
	return fmt.Sprintf("%.*f ± %.*f", digits, i.mean, digits, i.half)
}
