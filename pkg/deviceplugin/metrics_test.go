// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/podlace/podlace/pkg/probes/probestest"
)

// TestMetricsListed: the list of metrics against which the dashboard, the alerts and the README are checked has exactly the daemon's.
func TestMetricsListed(t *testing.T) {
	c, registry := newCounters(), prometheus.NewRegistry()
	registry.MustRegister(c.allocations, c.registrations, c.preferred, &state{nil, describedMetrics()})
	if diff, err := probestest.CompareList("../../integration/monitoring/testdata/sriov-device-plugin.txt", registry); err != nil || diff != "" {
		t.Error(diff, err)
	}
}
