// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

// These constants contain the names of Kubernetes features. The API server drops the fields of each disabled feature.
const (
	featureTaints   = "DRADeviceTaints"
	featureCounters = "DRAPartitionableDevices"
)

// The constant verbNode stands for the verb of requests for the Node object. All other verbs, such as "update", belong to requests for
// ResourceSlices.
const verbNode = "get node"

// sliceMetrics contains the metrics of the publisher.
type sliceMetrics struct{ writes *prometheus.CounterVec }

func newSliceMetrics(r prometheus.Registerer, p *publisher) sliceMetrics {
	f := promauto.With(r)
	gauge := func(name, help string, value func() int) {
		f.NewGaugeFunc(prometheus.GaugeOpts{Namespace: "podlace_sriov", Name: name, Help: help}, func() float64 {
			p.mu.Lock()
			defer p.mu.Unlock()
			return float64(value())
		})
	}
	gauge("dra_up", "1 while ResourceSlices are up to date; 0 while the API server is unreachable or refuses a request.", p.upMetric)
	gauge("dra_slices", "Desired number of ResourceSlices of this node.", p.slices)
	gauge("dra_slices_refused", "1 while the API server refuses ResourceSlices and the former ones stay, else 0.", func() int {
		if p.refused != nil {
			return 1
		}
		return 0
	})
	return sliceMetrics{f.NewCounterVec(prometheus.CounterOpts{Namespace: "podlace_sriov", Name: "dra_writes_total",
		Help: "Writes of ResourceSlices."}, []string{"verb"})}
}

// upMetric returns 1 if the slices are up to date, and 0 otherwise.
func (p *publisher) upMetric() int {
	if p.running && len(p.problems) == 0 && p.refused == nil {
		return 1
	}
	return 0
}

func (p *publisher) slices() int {
	if p.submitted == nil {
		return 0
	}
	return len(p.submitted.Pools[p.options.Node].Slices)
}

// noteWrite handles the result of a write request.
func (p *publisher) noteWrite(ctx context.Context, verb string, err error) {
	if err == nil {
		p.count.writes.WithLabelValues(verb).Inc()
	}
	if !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) && !apierrors.IsInvalid(err) { // the next comparison handles these
		p.noteResult(ctx, verb, err)
	}
}

// noteResult handles the result of a request. noteResult logs a failure once. noteResult logs again if the reason of the failure changes,
// and when a request succeeds after a failure.
func (p *publisher) noteResult(ctx context.Context, verb string, err error) {
	if ctx.Err() != nil && !errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return // the daemon is stopping
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	former := p.problems[verb]
	if err == nil {
		if delete(p.problems, verb); former != "" {
			p.options.Log.Info("the API server answers again", "request", requestName(verb))
		}
		return
	}
	reason := string(apierrors.ReasonForError(err))
	if reason == "" {
		reason = "unreachable"
	}
	if p.problems[verb] = reason; former != reason {
		p.options.Log.Warn("ResourceSlices may be out of date: a request failed; retrying", "request", requestName(verb), "node",
			p.options.Node, "error", err, "hint", p.hintFor(verb, err))
	}
}

// requestName returns the RBAC verb and the resource of a request.
func requestName(verb string) string {
	if verb == verbNode {
		return verb
	}
	return verb + " resourceslices.resource.k8s.io"
}

// hintFor returns a hint for the log that helps an admin to repair the cause of an error.
func (p *publisher) hintFor(verb string, err error) string {
	switch {
	case apierrors.IsForbidden(err), apierrors.IsUnauthorized(err):
		return "grant the verb of the request in the ClusterRole of this daemon"
	case apierrors.IsNotFound(err) && verb == verbNode:
		return "set --node-name to the name of the Node object"
	case apierrors.IsNotFound(err):
		return "resource.k8s.io/v1 needs Kubernetes 1.34 or newer; the device plugin API works without it"
	}
	return "running pods and the device plugin API work without the API server"
}

// noteDropped records the features that the API server has disabled.
func (p *publisher) noteDropped(disabled []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, f := range disabled {
		if _, ok := p.disabled[f]; !ok {
			p.options.Log.Warn("the API server drops fields of ResourceSlices: it has disabled a feature", "feature", f, "consequence",
				consequence(f))
		}
		p.disabled[f] = time.Now().Add(featureRetry)
	}
	p.notify()
}

func consequence(feature string) string {
	switch feature {
	case featureTaints:
		return "free devices with faults are left out of the slices instead of tainted"
	case featureCounters:
		return "PFs with offerWhole are left out of the slices"
	}
	return "no known consequence"
}

// currentFeatures returns the features that the publisher uses now.
func (p *publisher) currentFeatures(now time.Time) sliceFeatures {
	p.mu.Lock()
	defer p.mu.Unlock()
	return sliceFeatures{taints: !p.disabled[featureTaints].After(now), counters: !p.disabled[featureCounters].After(now)}
}

// noteRefusal handles the error that the API server returns for invalid slices. The only known cause is an API server before Kubernetes
// 1.35, which refuses counters in slices without devices.
func (p *publisher) noteRefusal(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.failing = true
	if p.refused != nil || p.syncing == nil {
		return
	}
	if _, ok := p.disabled[featureCounters]; !ok && p.hasCounters(p.syncing) {
		p.options.Log.Warn("the API server refuses counters in slices without devices: it is older than Kubernetes 1.35", "consequence",
			consequence(featureCounters), "fields", invalidFields(err))
	}
	if p.hasCounters(p.syncing) {
		p.disabled[featureCounters] = time.Now().Add(featureRetry)
		p.notify()
		return
	}
	p.refused = p.syncing
	p.options.Log.Error("the API server refuses the ResourceSlices: the former slices remain until the devices change", "node", p.options.Node,
		"fields", invalidFields(err), "error", err)
	p.notify()
}

func (p *publisher) hasCounters(r *resourceslice.DriverResources) bool {
	return slices.ContainsFunc(r.Pools[p.options.Node].Slices, func(s resourceslice.Slice) bool { return len(s.SharedCounters) > 0 })
}

// invalidFields returns the names of at most three invalid fields.
func invalidFields(err error) string {
	var status apierrors.APIStatus
	if !errors.As(err, &status) || status.Status().Details == nil {
		return ""
	}
	var names []string
	for _, c := range status.Status().Details.Causes {
		if !slices.Contains(names, c.Field) && len(names) < 3 {
			names = append(names, c.Field)
		}
	}
	return strings.Join(names, ", ")
}

// noteSyncStart records that a comparison of slices has started.
func (p *publisher) noteSyncStart() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.syncing, p.failing = p.submitted, false
}

// noteSynced records that a comparison of slices has succeeded. After a successful comparison, earlier write failures no longer count as
// problems.
func (p *publisher) noteSynced() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.syncing != nil && !p.failing {
		p.accepted = p.syncing
	}
	for _, verb := range []string{"create", "update", "delete"} {
		delete(p.problems, verb)
	}
}
