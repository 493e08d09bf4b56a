// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"math"
	"os"
	"slices"
	"strings"
)

// writeTable writes a head of quoted names, which gnuplot takes for titles, and a line for each row.
func writeTable(path string, head []string, rows [][]float64) error {
	lines := []string{`"` + strings.Join(head, `" "`) + `"`}
	for _, row := range rows {
		lines = append(lines, strings.Trim(fmt.Sprintf("%.3f", row), "[]"))
	}
	return os.WriteFile(path, []byte(strings.Join(lines, "\n")+"\n"), 0o644)
}

// median of values; of an even number the lower one of the middle. That of none is what gnuplot leaves out.
func median(values []float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	return slices.Sorted(slices.Values(values))[(len(values)-1)/2]
}
