// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/podlace/podlace/pkg/probes/probestest"
)

// TestMetricsListed checks that the list of metrics contains exactly the metrics of the daemon. The dashboard, the alerts and the README
// are checked against this list.
func TestMetricsListed(t *testing.T) {
	c, registry := newCounters(), prometheus.NewRegistry()
	registry.MustRegister(c.allocations, c.registrations, c.preferred, &stateCollector{nil, describedMetrics()})
	if diff, err := probestest.CompareList("../../integration/monitoring/testdata/sriov-device-plugin.txt", registry); err != nil || diff != "" {
		t.Error(diff, err)
	}
}
