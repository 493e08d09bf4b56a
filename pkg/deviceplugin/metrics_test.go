// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/podlace/podlace/pkg/probes/probestest"
)

// TestMetricsListed: the list of metrics against which the dashboard, the alerts and the README are checked has exactly the daemon's.
func TestMetricsListed(t *testing.T) {
	text, err := os.ReadFile("../../integration/monitoring/testdata/sriov-device-plugin.txt")
	if err != nil {
		t.Fatal(err)
	}
	c, registry := newCounters(), prometheus.NewRegistry()
	registry.MustRegister(c.allocations, c.registrations, c.preferred, &state{nil, describedMetrics()})
	if diff := cmp.Diff(strings.Split(strings.TrimSpace(string(text)), "\n"), probestest.Metrics(registry)); diff != "" {
		t.Error(diff)
	}
}
