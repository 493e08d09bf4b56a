// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/podlace/podlace/integration/probestest"
)

// TestMetricsListed: the list of metrics contains exactly the DRA metrics of the daemon. Another test compares the dashboard, the alerts
// and the README with this list of metrics.
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
