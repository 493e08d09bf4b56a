// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/podlace/podlace/pkg/probes/probestest"
)

// TestMetricsListed: the list of metrics against which the dashboard, the alerts and the README are checked has exactly those of
// Dynamic Resource Allocation.
func TestMetricsListed(t *testing.T) {
	text, err := os.ReadFile("../../integration/monitoring/testdata/sriov-dra.txt")
	if err != nil {
		t.Fatal(err)
	}
	registry := prometheus.NewRegistry()
	newCounters(registry)
	newSliceMetrics(registry, &publisher{})
	if diff := cmp.Diff(strings.Split(strings.TrimSpace(string(text)), "\n"), probestest.Metrics(registry)); diff != "" {
		t.Error(diff)
	}
}
