// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"errors"
	"maps"
	"slices"
	"strings"

	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/podlace/podlace/pkg/daemon/probes"
)

// serveHTTP serves health probes and metrics until ctx is done.
func (d *daemon) serveHTTP(ctx context.Context) error {
	d.registry.MustRegister(d.count.allocations, d.count.registrations, d.count.preferred, &stateCollector{d, describedMetrics()},
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	ready := func() error {
		if missing := d.unreadyResources(); len(missing) > 0 {
			return errors.New("the kubelet does not watch " + strings.Join(missing, ", "))
		}
		return nil
	}
	return probes.Server{Ready: ready, Metrics: d.registry, Log: d.log}.Start(ctx, d.HTTP, &d.running)
}

// unreadyResources returns the resources from which pods cannot get devices yet.
func (d *daemon) unreadyResources() (missing []string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.refreshed { // still asking the kubelet for the devices of pods
		return []string{"any resource yet"}
	}
	for _, name := range slices.Sorted(maps.Keys(d.serving)) {
		if !d.serving[name].isReady() {
			missing = append(missing, name)
		}
	}
	if err := d.unreadyDRA(); err != nil {
		missing = append(missing, err.Error())
	}
	return missing
}
