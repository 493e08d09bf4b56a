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

// Names of features of Kubernetes whose fields an API server drops while they are off.
const (
	featureTaints   = "DRADeviceTaints"
	featureCounters = "DRAPartitionableDevices"
)

// verbNode is the request for the Node object; the others are for slices.
const verbNode = "get node"

// sliceMetrics count what the publisher does.
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
	gauge("dra_up", "1 while ResourceSlices are kept as they should be, else 0: the API server is away, or refuses a request.", p.up)
	gauge("dra_slices", "ResourceSlices that this node should have.", p.slices)
	gauge("dra_slices_refused", "1 while the API server refuses ResourceSlices and the former ones stay, else 0.", func() int {
		if p.refused != nil {
			return 1
		}
		return 0
	})
	return sliceMetrics{f.NewCounterVec(prometheus.CounterOpts{Namespace: "podlace_sriov", Name: "dra_writes_total",
		Help: "ResourceSlices that were written."}, []string{"verb"})}
}

// up is 1 if nothing keeps slices from being as they should.
func (p *publisher) up() int {
	if p.running && len(p.problems) == 0 && p.refused == nil {
		return 1
	}
	return 0
}

func (p *publisher) slices() int {
	if p.given == nil {
		return 0
	}
	return len(p.given.Pools[p.options.Node].Slices)
}

// wrote takes the result of a write.
func (p *publisher) wrote(ctx context.Context, verb string, err error) {
	if err == nil {
		p.count.writes.WithLabelValues(verb).Inc()
	}
	if !apierrors.IsConflict(err) && !apierrors.IsNotFound(err) && !apierrors.IsInvalid(err) { // the next comparison sees to these
		p.result(ctx, verb, err)
	}
}

// result takes the result of a request. It logs a failure once, until another reason or success.
func (p *publisher) result(ctx context.Context, verb string, err error) {
	if ctx.Err() != nil && !errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return // the daemon ends
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	former := p.problems[verb]
	if err == nil {
		if delete(p.problems, verb); former != "" {
			p.options.Log.Info("the API server answers again", "request", request(verb))
		}
		return
	}
	reason := string(apierrors.ReasonForError(err))
	if reason == "" {
		reason = "unreachable"
	}
	if p.problems[verb] = reason; former != reason {
		p.options.Log.Warn("ResourceSlices may be out of date: a request failed, it is retried", "request", request(verb), "node",
			p.options.Node, "error", err, "hint", p.hint(verb, err))
	}
}

// request names a request as RBAC does.
func request(verb string) string {
	if verb == verbNode {
		return verb
	}
	return verb + " resourceslices.resource.k8s.io"
}

// hint says what would help against an error.
func (p *publisher) hint(verb string, err error) string {
	switch {
	case apierrors.IsForbidden(err), apierrors.IsUnauthorized(err):
		return "the ClusterRole of this daemon needs the verb of the request"
	case apierrors.IsNotFound(err) && verb == verbNode:
		return "--node-name must be the name of the Node object"
	case apierrors.IsNotFound(err):
		return "Kubernetes 1.34 or newer has resource.k8s.io/v1; the device plugin API needs none of it"
	}
	return "pods that run, and the device plugin API, do not need the API server"
}

// dropped notes which features the API server has not.
func (p *publisher) dropped(disabled []string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, f := range disabled {
		if _, ok := p.off[f]; !ok {
			p.options.Log.Warn("the API server drops fields of ResourceSlices: the feature is off there", "feature", f, "consequence",
				consequence(f))
		}
		p.off[f] = time.Now().Add(featureRetry)
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
	return "none is known"
}

// features returns which features are worth a try.
func (p *publisher) features(now time.Time) features {
	p.mu.Lock()
	defer p.mu.Unlock()
	return features{taints: !p.off[featureTaints].After(now), counters: !p.off[featureCounters].After(now)}
}

// refuse notes that the API server found slices invalid. Counters of a server before 1.35 are the only known reason.
func (p *publisher) refuse(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.failing = true
	if p.refused != nil || p.syncing == nil {
		return
	}
	if _, ok := p.off[featureCounters]; !ok && p.hasCounters(p.syncing) {
		p.options.Log.Warn("the API server refuses counters beside devices of other slices: it is older than Kubernetes 1.35", "consequence",
			consequence(featureCounters), "fields", invalidFields(err))
	}
	if p.hasCounters(p.syncing) {
		p.off[featureCounters] = time.Now().Add(featureRetry)
		p.notify()
		return
	}
	p.refused = p.syncing
	p.options.Log.Error("the API server refuses ResourceSlices: the former ones stay until something changes", "node", p.options.Node,
		"fields", invalidFields(err), "error", err)
	p.notify()
}

func (p *publisher) hasCounters(r *resourceslice.DriverResources) bool {
	return slices.ContainsFunc(r.Pools[p.options.Node].Slices, func(s resourceslice.Slice) bool { return len(s.SharedCounters) > 0 })
}

// invalidFields names at most three fields that are invalid.
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

// syncBegins is for a comparison that begins.
func (p *publisher) syncBegins() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.syncing, p.failing = p.given, false
}

// synced is for a comparison that succeeded: what failed before is made up for.
func (p *publisher) synced() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.syncing != nil && !p.failing {
		p.accepted = p.syncing
	}
	for _, verb := range []string{"create", "update", "delete"} {
		delete(p.problems, verb)
	}
}
