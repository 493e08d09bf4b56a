// SPDX-License-Identifier: Apache-2.0

// Package probestest compares the metrics of a program with a list of metrics. Package probestest is for tests only.
package probestest

import (
	"os"
	"regexp"
	"slices"
	"strings"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
)

// CompareList returns the difference between the metrics in a file and the metrics that a collector describes. If the metrics are equal,
// CompareList returns "".
func CompareList(file string, c prometheus.Collector) (string, error) {
	text, err := os.ReadFile(file)
	return cmp.Diff(strings.Split(strings.TrimSpace(string(text)), "\n"), metricLines(c)), err
}

// metricLines returns one line for each metric that a collector describes, even if the collector describes it several times: its name, its
// type and its sorted labels. The collector's description of a metric contains no type. The suffix of the metric's name therefore
// determines its type. The name of a counter ends in _total, and the name of a histogram of sriov-device-plugin ends in _seconds.
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
