// SPDX-License-Identifier: Apache-2.0

package podmetrics

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

type metricName string

// Names of the metrics.
const (
	attachments metricName = "podlace_attachments"
	orphaned    metricName = "podlace_orphaned_attachments"
	unreadable  metricName = "podlace_unreadable_records"
	addresses   metricName = "podlace_ipam_addresses"
	hostPorts   metricName = "podlace_hostports"
	limits      metricName = "podlace_bandwidth_limits"
	limitRate   metricName = "podlace_bandwidth_limit_bytes_per_second"
	missing     metricName = "podlace_bandwidth_missing_limits"
	backlog     metricName = "podlace_bandwidth_backlog_bytes"
	sent        metricName = "podlace_bandwidth_sent_bytes_total"
	dropped     metricName = "podlace_bandwidth_dropped_packets_total"
	success     metricName = "podlace_node_collector_success"
	duration    metricName = "podlace_node_collector_duration_seconds"
)

type metricInfo struct {
	*prometheus.Desc
	kind   prometheus.ValueType
	labels int
}

func metrics() map[metricName]metricInfo {
	const gauge, counter = prometheus.GaugeValue, prometheus.CounterValue
	all := map[metricName]metricInfo{}
	add := func(n metricName, kind prometheus.ValueType, help string, labels ...string) {
		all[n] = metricInfo{prometheus.NewDesc(string(n), help, labels, nil), kind, len(labels)}
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

// seriesKey identifies one time series: a metric and the values of its labels.
type seriesKey struct {
	name   metricName
	labels [4]string
}

// metricValues holds the values of all series at one time.
type metricValues map[seriesKey]float64

// add increases the value of a series, or only creates it if value is 0.
func (v metricValues) add(n metricName, value float64, labels ...string) {
	s := seriesKey{name: n}
	for i, label := range labels {
		s.labels[i] = strings.ToValidUTF8(label, "?") // the name of a folder may have any bytes
	}
	v[s] += value
}
