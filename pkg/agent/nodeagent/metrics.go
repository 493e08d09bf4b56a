// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"github.com/podlace/podlace/pkg/plugin"
)

// metrics holds the agent's Prometheus metrics. None has a peer's name as a label: in a cluster of 5,000 nodes that would make 25 million
// series in total.
type metrics struct {
	registry *prometheus.Registry
	sync     prometheus.Histogram
	lag      prometheus.Histogram
	changes  *prometheus.CounterVec
	removals prometheus.Counter
	restored prometheus.Counter
	last     prometheus.Gauge // time of the last comparison

	serving sync.WaitGroup // of the HTTP server

	mu     sync.Mutex
	status Status
	routes map[bool]int // by family: true is IPv4
	held   bool         // deletions of routes are held back
	stale  bool         // the configuration in the file is rejected
}

// newMetrics returns the agent's metrics. It registers those of pods in the same registry.
func newMetrics(n *nodes, pods prometheus.Collector) *metrics {
	buckets := []float64{.01, .025, .05, .1, .2, .3, .5, 1, 2, 5, 10, 30}
	m := &metrics{
		registry: prometheus.NewRegistry(),
		sync: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "podlace_node_sync_seconds",
			Help: "How long a comparison with the kernel took.", Buckets: buckets}),
		lag: prometheus.NewHistogram(prometheus.HistogramOpts{Name: "podlace_node_route_lag_seconds",
			Help: "Delay from a cluster change, as received from the API server, to the routes in the kernel.", Buckets: buckets}),
		changes: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "podlace_node_changes_total",
			Help: "Changes of the node, by what was changed and why."}, []string{"kind", "cause"}),
		removals: prometheus.NewCounter(prometheus.CounterOpts{Name: "podlace_node_kernel_removals_total",
			Help: "Routes and nexthop objects that the kernel or another program had removed."}),
		restored: prometheus.NewCounter(prometheus.CounterOpts{Name: "podlace_node_restored_total",
			Help: "Rules, limits, links, addresses and settings of pods that other programs had removed and the agent restored."}),
		last: prometheus.NewGauge(prometheus.GaugeOpts{Name: "podlace_node_last_sync_timestamp_seconds",
			Help: "Time of the last comparison with the kernel, in seconds since 1970; 0: none."}),
	}
	age := prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "podlace_node_watch_age_seconds",
		Help: "Time since the last message of the API server."}, func() float64 { heard, _ := n.watched(); return time.Since(heard).Seconds() })
	info := prometheus.NewGauge(prometheus.GaugeOpts{Name: "podlace_node_build_info", Help: "1.",
		ConstLabels: prometheus.Labels{"version": plugin.BuildVersion()}})
	info.Set(1)
	m.registry.MustRegister(m.sync, m.lag, m.changes, m.removals, m.restored, m.last, age, info, statusGauges{m}, pods,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// statusGauges computes gauges from the agent's status at each scrape.
type statusGauges struct{ *metrics }

func describe(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc("podlace_node_"+name, help, labels, nil)
}

// Describe sends nothing, because each value of Collect has its description.
func (statusGauges) Describe(chan<- *prometheus.Desc) {}

// Collect implements prometheus.Collector.
func (g statusGauges) Collect(to chan<- prometheus.Metric) {
	g.mu.Lock()
	defer g.mu.Unlock()
	send := func(desc *prometheus.Desc, value float64, labels ...string) {
		to <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, labels...)
	}
	peers := describe("peers", "podCIDRs of other nodes, by how they are reached.", "state")
	for _, state := range states() {
		n := 0
		for _, p := range g.status.Peers {
			if p.State == state {
				n++
			}
		}
		send(peers, float64(n), string(state))
	}
	routes := describe("routes", "Routes of the agent, by family.", "family")
	send(routes, float64(g.routes[true]), "ipv4")
	send(routes, float64(g.routes[false]), "ipv6")
	send(describe("ready", "Whether pods can start on this node."), one(g.status.Ready))
	send(describe("mtu", "MTU of pods in bytes; 0: the MTU of the uplink."), float64(g.status.MTU))
	send(describe("problems", "Lines of podlace-node status that name a problem."), float64(len(g.status.Problems)))
	send(describe("deletions_held", "Whether deletions of routes are held back because the list of nodes is suspicious."), one(g.held))
	send(describe("config_refused", "Whether the configuration file is wrong and the previous configuration applies."), one(g.stale))
}

func one(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}

// set stores the status for the gauges.
func (m *metrics) set(s Status, held, stale bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.status, m.held, m.stale = s, held, stale
}

// setRoutes stores the number of routes in the kernel by family; the key is true for IPv4.
func (m *metrics) setRoutes(routes map[bool]int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.routes = routes
}

// noteSync updates the metrics after a comparison that began at began. since is the time of the first event of the API server that it
// handled, or zero.
func (m *metrics) noteSync(began, since time.Time) {
	m.sync.Observe(time.Since(began).Seconds())
	m.last.SetToCurrentTime()
	if !since.IsZero() {
		m.lag.Observe(time.Since(since).Seconds())
	}
}

// ready returns nil if pods can start on this node, or an error with the reasons. Problems of single peers do not count, and neither does
// an unreachable API server after the first comparison: otherwise all agents would become unready together, and a rolling update would
// replace them all at once.
func (m *metrics) ready() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.status.Node == "" {
		return errors.New("the first comparison is not done")
	}
	var errs []error
	for _, p := range blocked(m.status.Problems) {
		errs = append(errs, fmt.Errorf("%s: %s", p.What, p.Why))
	}
	return errors.Join(errs...)
}
