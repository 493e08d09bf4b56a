// SPDX-License-Identifier: Apache-2.0

// Package podmetrics serves metrics of the pods' attachments on this node to Prometheus. It reads the plugins' records, the leases and the
// kernel at a scrape; the plugins write nothing for it. No metric has a label for a pod, so the number of series depends only on the
// number of networks.
package podmetrics

import (
	"log/slog"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

const (
	keepFor = 5 * time.Second // scrapes in this time share one reading
	// timeout is less than Prometheus' default timeout of a scrape, 10 seconds.
	timeout = 5 * time.Second
)

// Collector is a prometheus.Collector. Its scrapes never run two readings at once, and never wait longer than a timeout for one.
type Collector struct {
	confDir string // folder with the networks' configurations; empty: none
	log     *slog.Logger
	metrics map[name]metric
	keepFor time.Duration
	timeout time.Duration
	read    func() view // returns the current values

	mu      sync.Mutex
	values  view          // of the last reading
	at      time.Time     // end of the last reading
	running chan struct{} // closed at the end of the present reading; nil: there is none

	// These belong to the present reading.
	traffic traffic
	failed  map[string]string // the logged error of each source
}

// New returns a collector for the networks that are configured in a folder.
func New(confDir string, log *slog.Logger) *Collector {
	c := &Collector{confDir: confDir, log: log, metrics: metrics(), keepFor: keepFor, timeout: timeout, failed: map[string]string{}}
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
	for s, value := range c.current() {
		m := c.metrics[s.name]
		to <- prometheus.MustNewConstMetric(m.Desc, m.kind, value, s.labels[:m.labels]...)
	}
}

// current returns the values of a reading that ended less than keepFor ago, or of a new one. If the reading takes longer than the timeout,
// current returns only that all sources failed. The reading continues for later scrapes.
func (c *Collector) current() view {
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

// failedView returns the values if no source can be read.
func failedView() view {
	v := view{}
	for _, source := range sources() {
		v.add(success, 0, source)
	}
	return v
}
