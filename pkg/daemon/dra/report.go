// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

// These constants contain the names of Kubernetes features. The API server drops the fields of each disabled feature.
const (
	featureTaints   = "DRADeviceTaints"
	featureCounters = "DRAPartitionableDevices"
)

// These constants name the requests of the publisher in the log.
const (
	requestNode  = "get node"
	requestList  = "list resourceslices.resource.k8s.io"
	requestWatch = "watch resourceslices.resource.k8s.io"
	requestWrite = "write resourceslices.resource.k8s.io"
)

// sliceMetrics collects the metrics of the publisher.
type sliceMetrics struct{ p *publisher }

// Describe describes the metrics by collecting them.
func (m sliceMetrics) Describe(out chan<- *prometheus.Desc) { prometheus.DescribeByCollect(m, out) }

// Collect returns the metrics.
func (m sliceMetrics) Collect(out chan<- prometheus.Metric) {
	p, is := m.p, map[bool]int{true: 1}
	p.mu.Lock()
	defer p.mu.Unlock()
	var desired int
	if p.submitted != nil {
		desired = len(p.submitted.Pools[p.options.Node].Slices)
	}
	gauge := func(name, help string, value int) {
		out <- prometheus.MustNewConstMetric(prometheus.NewDesc("podlace_sriov_"+name, help, nil, nil), prometheus.GaugeValue, float64(value))
	}
	gauge("dra_up", "1 while ResourceSlices are up to date; 0 while the API server is unreachable or refuses a request.",
		is[p.controller != nil && len(p.problems) == 0 && p.refused == nil])
	gauge("dra_slices", "Desired number of ResourceSlices of this node.", desired)
	gauge("dra_slices_refused", "1 while the API server refuses ResourceSlices and the former ones stay, else 0.", is[p.refused != nil])
	var done resourceslice.Stats
	if p.controller != nil {
		done = p.controller.GetStats()
	}
	writes := prometheus.NewDesc("podlace_sriov_dra_writes_total", "Writes of ResourceSlices.", []string{"verb"}, nil)
	for verb, n := range map[string]int64{"create": done.NumCreates, "update": done.NumUpdates, "delete": done.NumDeletes} {
		out <- prometheus.MustNewConstMetric(writes, prometheus.CounterValue, float64(n), verb)
	}
}

// noteResult logs the failure of a request once, and again if its reason changes. It also logs a success after a failure.
func (p *publisher) noteResult(request string, err error) {
	if errors.Is(err, context.Canceled) {
		return // the daemon is stopping
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	former, failed := p.problems[request]
	reason := apierrors.ReasonForError(err)
	switch {
	case err == nil && failed:
		delete(p.problems, request)
		p.options.Log.Info("the API server answers again", "request", request)
	case err != nil && (!failed || former != reason):
		p.problems[request] = reason
		p.options.Log.Warn("ResourceSlices may be out of date: a request failed; retrying", "request", request, "node", p.options.Node,
			"error", err, "hint", hintFor(request, err))
	}
}

// hintFor returns a hint for the log that helps an admin to repair the cause of an error.
func hintFor(request string, err error) string {
	switch {
	case apierrors.IsForbidden(err), apierrors.IsUnauthorized(err):
		return "grant the verb of the request in the ClusterRole of this daemon"
	case apierrors.IsNotFound(err) && request == requestNode:
		return "set --node-name to the name of the Node object"
	case apierrors.IsNotFound(err):
		return "resource.k8s.io/v1 needs Kubernetes 1.34 or newer; the device plugin API works without it"
	}
	return "running pods and the device plugin API work without the API server"
}

// consequence says what the publisher does without a feature of the API server.
func consequence(feature string) string {
	if feature == featureTaints {
		return "free devices with faults are left out of the slices instead of tainted"
	}
	return "PFs with offerWhole are left out of the slices"
}

// disable stops the use of a feature for a while, and logs the reason once.
func (p *publisher) disable(feature, why string, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if _, known := p.disabled[feature]; !known {
		p.options.Log.Warn(why, "feature", feature, "consequence", consequence(feature), "error", err)
	}
	p.disabled[feature] = time.Now().Add(featureRetry)
	p.change(func() {})
}

// currentFeatures returns the features that the publisher uses now.
func (p *publisher) currentFeatures(now time.Time) sliceFeatures {
	p.mu.Lock()
	defer p.mu.Unlock()
	return sliceFeatures{taints: !p.disabled[featureTaints].After(now), counters: !p.disabled[featureCounters].After(now)}
}

// noteRefusal handles the error for invalid slices. The only known cause is an API server before Kubernetes 1.35, which refuses
// counters in slices without devices.
func (p *publisher) noteRefusal(err error) {
	var refused *resourceslice.DriverResources
	var known bool // a comparison may follow before the loop in run() has gone back to the accepted slices
	p.locked(func() { refused, known = p.syncing, p.refused != nil })
	if known {
		return
	}
	if slices.ContainsFunc(refused.Pools[p.options.Node].Slices, func(s resourceslice.Slice) bool { return len(s.SharedCounters) > 0 }) {
		p.disable(featureCounters, "the API server refuses counters in slices without devices: it is older than Kubernetes 1.35", err)
		return
	}
	p.locked(func() { p.refused = refused })
	p.options.Log.Error("the API server refuses the ResourceSlices: the former slices remain until the devices change", "node", p.options.Node,
		"error", err)
	p.change(func() {})
}
