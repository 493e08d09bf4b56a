// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/podlace/podlace/integration/probestest"
)

// TestMetricsListed checks that sriov-device-plugin.txt lists exactly the daemon's metrics. Other tests compare the dashboard, the
// alerts and the README with it.
func TestMetricsListed(t *testing.T) {
	c, registry := newCounters(), prometheus.NewRegistry()
	registry.MustRegister(c.allocations, c.registrations, c.preferred, &stateCollector{nil, describedMetrics()})
	diff, err := probestest.CompareList("../../../integration/monitoring/testdata/sriov-device-plugin.txt", registry)
	if err != nil {
		t.Fatal(err)
	}
	if diff != "" {
		t.Errorf("integration/monitoring/testdata/sriov-device-plugin.txt is not what the daemon serves: remove its lines with -, add the lines with +\n%s", diff)
	}
}
