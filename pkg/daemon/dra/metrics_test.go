// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/podlace/podlace/integration/probestest"
)

// TestMetricsListed: the list has exactly the daemon's DRA metrics. Another test compares the dashboard, the alerts and the README with
// it.
func TestMetricsListed(t *testing.T) {
	registry := prometheus.NewRegistry()
	newCounters(registry)
	registry.MustRegister(sliceMetrics{&publisher{}})
	diff, err := probestest.CompareList("../../../integration/monitoring/testdata/sriov-dra.txt", registry)
	if err != nil {
		t.Fatal(err)
	}
	if diff != "" {
		t.Errorf("integration/monitoring/testdata/sriov-dra.txt is not what the daemon serves: remove its lines with -, add the lines with +\n%s", diff)
	}
}
