// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"strconv"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/podlace/podlace/pkg/pci"
)

const metricPrefix = "podlace_sriov"

// eventCounters are the metrics that count events, such as allocations.
type eventCounters struct {
	allocations, registrations *prometheus.CounterVec
	preferred                  *prometheus.HistogramVec
}

func newCounters() eventCounters {
	return eventCounters{
		allocations: prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: metricPrefix, Name: "allocations_total",
			Help: "Containers that got devices, by the devices' NUMA node (or several, unknown), whether they share one known node, and whether they share one PF."},
			[]string{"resource", "policy", "numa", "aligned", "same_pf"}),
		registrations: prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: metricPrefix, Name: "kubelet_registrations_total",
			Help: "Registrations that the kubelet accepted: the first one, and one after each restart of the kubelet."}, []string{"resource"}),
		preferred: prometheus.NewHistogramVec(prometheus.HistogramOpts{Namespace: metricPrefix, Name: "preferred_allocation_seconds",
			Help: "Time to choose the devices of a container.", Buckets: prometheus.ExponentialBuckets(1e-5, 4, 8)}, []string{"resource"}),
	}
}

func (c eventCounters) registered(resource string) { c.registrations.WithLabelValues(resource).Inc() }

// countAllocated counts the allocation of one container's devices.
func (c eventCounters) countAllocated(o *resourceOffer, ids []string) {
	if len(ids) == 0 {
		return
	}
	nodes, pfs := map[int]bool{}, map[pci.Address]bool{}
	for _, id := range ids {
		if d, err := o.find(id); err == nil {
			nodes[d.NUMANode], pfs[d.PF] = true, true
		}
	}
	numa := "several"
	if nodes[pci.Unknown] {
		numa = "unknown"
	} else if len(nodes) == 1 {
		for n := range nodes {
			numa = strconv.Itoa(n)
		}
	}
	aligned := len(nodes) == 1 && !nodes[pci.Unknown]
	c.allocations.WithLabelValues(o.pool.Name, string(o.allocationPolicy()), numa, strconv.FormatBool(aligned),
		strconv.FormatBool(len(pfs) == 1)).Inc()
}
