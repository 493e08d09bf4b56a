// SPDX-License-Identifier: Apache-2.0

package podmetrics

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// name is the name of a metric.
type name string

// Names of the metrics.
const (
	attachments name = "podlace_attachments"
	orphaned    name = "podlace_orphaned_attachments"
	unreadable  name = "podlace_unreadable_records"
	addresses   name = "podlace_ipam_addresses"
	hostPorts   name = "podlace_hostports"
	limits      name = "podlace_bandwidth_limits"
	limitRate   name = "podlace_bandwidth_limit_bytes_per_second"
	missing     name = "podlace_bandwidth_missing_limits"
	backlog     name = "podlace_bandwidth_backlog_bytes"
	sent        name = "podlace_bandwidth_sent_bytes_total"
	dropped     name = "podlace_bandwidth_dropped_packets_total"
	success     name = "podlace_node_collector_success"
	duration    name = "podlace_node_collector_duration_seconds"
)

// metric is a metric with the number of its labels.
type metric struct {
	*prometheus.Desc
	kind   prometheus.ValueType
	labels int
}

func metrics() map[name]metric {
	const gauge, counter = prometheus.GaugeValue, prometheus.CounterValue
	all := map[name]metric{}
	add := func(n name, kind prometheus.ValueType, help string, labels ...string) {
		all[n] = metric{prometheus.NewDesc(string(n), help, labels, nil), kind, len(labels)}
	}
	add(attachments, gauge, "Attachments of pods, by records and leases.", "network")
	add(orphaned, gauge, "Attachments whose network namespace is gone, or whose lease is of an earlier boot.", "network")
	add(unreadable, gauge, "Records that cannot be read: they are damaged, or of a newer version.", "network")
	add(addresses, gauge, "Addresses of a range set, by state: leased or free.", "network", "family", "set", "state")
	add(hostPorts, gauge, "Ports of the node that lead to pods.", "protocol")
	add(limits, gauge, "Recorded bandwidth limits of live pods. Ingress is what a pod receives.", "network", "direction")
	add(limitRate, gauge, "Sum of the recorded bandwidth limits of live pods.", "network", "direction")
	add(missing, gauge, "Bandwidth limits of live pods that the kernel lacks.", "network", "direction")
	add(backlog, gauge, "Bytes that wait in the queues of bandwidth limits.", "network", "direction")
	add(sent, counter, "Bytes that passed bandwidth limits, since the start of podlace-node.", "network", "direction")
	add(dropped, counter, "Packets that bandwidth limits dropped, since the start of podlace-node.", "network", "direction")
	add(success, gauge, "Whether the last reading of a source of metrics succeeded.", "collector")
	add(duration, gauge, "Duration of the last reading of a source of metrics.", "collector")
	return all
}

// series is one time series: a metric and the values of its labels.
type series struct {
	name   name
	labels [4]string
}

// view has the values of all series at one time.
type view map[series]float64

// add adds to the value of a series. With 0 it makes the series exist.
func (v view) add(n name, value float64, labels ...string) {
	s := series{name: n}
	for i, label := range labels {
		s.labels[i] = strings.ToValidUTF8(label, "?") // the name of a folder may have any bytes
	}
	v[s] += value
}
