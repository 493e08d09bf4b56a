// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// counters count what happened to claims.
type counters struct {
	prepares *prometheus.HistogramVec // by result
	claims   *prometheus.CounterVec   // by resource and alignment
	statuses *prometheus.CounterVec   // by result
	leading  prometheus.Gauge

	unattached prometheus.Gauge
}

func newCounters(r prometheus.Registerer) counters {
	const namespace = "podlace_sriov"
	c := counters{
		prepares: prometheus.NewHistogramVec(prometheus.HistogramOpts{Namespace: namespace, Name: "claim_prepare_seconds",
			Help:    "How long claims took to be prepared, by result: ok or error.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2.5, 12)}, []string{"result"}),
		claims: prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Name: "claims_total",
			Help: "Devices that pods got by claims, by whether the CPUs of the pod are of the device's NUMA node: yes, no or unknown."},
			[]string{"resource", "aligned"}),
		statuses: prometheus.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Name: "claim_status_writes_total",
			Help: "How often the status of a claim was written, by result: ok, error, or forbidden for a missing right."}, []string{"result"}),
		leading: prometheus.NewGauge(prometheus.GaugeOpts{Namespace: namespace, Name: "dra_leader",
			Help: "Whether this instance publishes devices and writes the status of claims: 1 or 0."}),
		unattached: prometheus.NewGauge(prometheus.GaugeOpts{Namespace: namespace, Name: "claims_unattached",
			Help: "Prepared claims with a device that no pod has had attached for two minutes, by the instance that leads."}),
	}
	if r != nil {
		r.MustRegister(c.prepares, c.claims, c.statuses, c.leading, c.unattached)
	}
	return c
}

func (c counters) prepared(took time.Duration, err error) {
	result := "ok"
	if err != nil {
		result = "error"
	}
	c.prepares.WithLabelValues(result).Observe(took.Seconds())
}
