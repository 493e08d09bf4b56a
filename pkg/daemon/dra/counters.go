// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

type claimCounters struct {
	prepares *prometheus.HistogramVec // by result
	claims   *prometheus.CounterVec   // by resource and alignment
	statuses *prometheus.CounterVec   // by result
	leading  prometheus.Gauge

	unattached prometheus.Gauge
}

func newCounters(r prometheus.Registerer) claimCounters {
	const namespace = "podlace_sriov"
	f := promauto.With(r)
	return claimCounters{
		prepares: f.NewHistogramVec(prometheus.HistogramOpts{Namespace: namespace, Name: "claim_prepare_seconds",
			Help:    "Time to prepare a claim, by result: ok or error.",
			Buckets: prometheus.ExponentialBuckets(0.001, 2.5, 12)}, []string{"result"}),
		claims: f.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Name: "claims_total",
			Help: "Devices that pods got by claims, by whether the CPUs of the pod belong to the device's NUMA node: yes, no or unknown."},
			[]string{"resource", "aligned"}),
		statuses: f.NewCounterVec(prometheus.CounterOpts{Namespace: namespace, Name: "claim_status_writes_total",
			Help: "Writes of the status of claims, by result: ok, error, or forbidden for a missing permission."}, []string{"result"}),
		leading: f.NewGauge(prometheus.GaugeOpts{Namespace: namespace, Name: "dra_leader",
			Help: "1 if this instance publishes devices and writes the status of claims, else 0."}),
		unattached: f.NewGauge(prometheus.GaugeOpts{Namespace: namespace, Name: "claims_unattached",
			Help: "Prepared claims with a device that no pod has attached for two minutes; only the leading instance counts them."}),
	}
}

func (c claimCounters) prepared(took time.Duration, err error) {
	result := "ok"
	if err != nil {
		result = "error"
	}
	c.prepares.WithLabelValues(result).Observe(took.Seconds())
}
