// SPDX-License-Identifier: Apache-2.0

// Package podmetrics serves Prometheus metrics about the attachments of pods on this node. A scrape reads the plugins' records, the leases
// and the kernel's state; plugins write nothing for it. No metric has a label for a pod, so the number of series depends only on the
// networks.
package podmetrics

import (
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

const (
	keepFor = 5 * time.Second // scrapes in this time share one reading
	// readTimeout is below Prometheus' default scrape timeout of 10 seconds.
	readTimeout = 5 * time.Second
)

// Collector is a prometheus.Collector. It never reads its sources twice at the same time, and no scrape waits longer than the timeout.
type Collector struct {
	confDir string // folder with the networks' configurations; empty: none
	log     *slog.Logger
	metrics map[metricName]metricInfo
	keepFor time.Duration
	timeout time.Duration
	read    func() metricValues // returns the current values

	mu      sync.Mutex
	values  metricValues  // of the last reading
	at      time.Time     // end of the last reading
	running chan struct{} // closed at the end of the present reading; nil: there is none

	// Only the reading goroutine uses these.
	traffic trafficSums
	failed  map[string]string // the logged error of each source
}

// New returns a collector for the networks whose configurations are in a folder.
func New(confDir string, log *slog.Logger) *Collector {
	c := &Collector{confDir: confDir, log: log, metrics: metrics(), keepFor: keepFor, timeout: readTimeout, failed: map[string]string{}}
	c.read = c.readAll
	return c
}

// Describe implements prometheus.Collector.
func (c *Collector) Describe(to chan<- *prometheus.Desc) {
	for _, m := range c.metrics {
		to <- m.Desc
	}
}

// Collect implements prometheus.Collector.
func (c *Collector) Collect(to chan<- prometheus.Metric) {
	for s, value := range c.currentValues() {
		m := c.metrics[s.name]
		to <- prometheus.MustNewConstMetric(m.Desc, m.kind, value, s.labels[:m.labels]...)
	}
}

// currentValues returns the stored values if they are younger than keepFor, or else waits for new ones. After the timeout it returns that
// all sources failed; the reading continues in the background, for later scrapes.
func (c *Collector) currentValues() metricValues {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.running == nil && (c.values == nil || time.Since(c.at) >= c.keepFor) {
		c.running = make(chan struct{})
		go c.refresh(c.running)
	}
	if running := c.running; running != nil {
		c.mu.Unlock()
		inTime := true
		select {
		case <-running:
		case <-time.After(c.timeout):
			inTime = false
		}
		c.mu.Lock()
		if !inTime {
			return failedView()
		}
	}
	return c.values
}

func (c *Collector) refresh(running chan struct{}) {
	values := c.read()
	c.mu.Lock()
	c.values, c.at, c.running = values, time.Now(), nil
	c.mu.Unlock()
	close(running)
}

// failedView returns the values for a scrape during which no source could be read.
func failedView() metricValues {
	v := metricValues{}
	for _, source := range sources() {
		v.add(success, 0, source)
	}
	return v
}
