// SPDX-License-Identifier: Apache-2.0

// Package probestest compares a program's metrics with a list, in tests.
package probestest

import (
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
)

// CompareList returns how the metrics in a file differ from those that a collector describes, or "".
func CompareList(file string, c prometheus.Collector) (string, error) {
	text, err := os.ReadFile(file)
	return cmp.Diff(strings.Split(strings.TrimSpace(string(text)), "\n"), metricLines(c)), err
}

// metricLines returns one line for each metric that a collector describes: name, type and sorted labels. A description has no type, so the
// name's suffix determines it: _total for a counter, and _seconds for a histogram of sriov-device-plugin.
func metricLines(c prometheus.Collector) (lines []string) {
	described := make(chan *prometheus.Desc)
	go func() {
		c.Describe(described)
		close(described)
	}()
	parts := regexp.MustCompile(`fqName: "([^"]*)".*variableLabels: {([^}]*)}`)
	for desc := range described {
		match := parts.FindStringSubmatch(desc.String())
		kind := "gauge"
		switch {
		case strings.HasSuffix(match[1], "_total"):
			kind = "counter"
		case strings.HasSuffix(match[1], "_seconds"):
			kind = "histogram"
		}
		labels := strings.Split(match[2], ",")
		slices.Sort(labels)
		lines = append(lines, strings.TrimSpace(match[1]+" "+kind+" "+strings.Join(labels, ",")))
	}
	slices.Sort(lines)
	return slices.Compact(lines)
}
