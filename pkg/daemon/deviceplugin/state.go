// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"slices"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/poddevices"
	"github.com/podlace/podlace/pkg/sriov"
)

// stateCollector collects the metrics that describe the daemon's current state.
type stateCollector struct {
	*daemon
	stateDescs
}

// newDesc returns the Prometheus description of a metric with its labels.
func newDesc(name, help string, labels ...string) *prometheus.Desc {
	return prometheus.NewDesc(prometheus.BuildFQName(metricPrefix, "", name), help, labels, nil)
}

// stateDescs contains the descriptions of the metrics about the daemon's current state.
type stateDescs struct {
	devices, info, allocated, refused, unserved, allocatable, unreadable *prometheus.Desc

	traffic []trafficMetric
}

// trafficMetric describes a traffic counter that a PF provides for each of its VFs.
type trafficMetric struct {
	*prometheus.Desc
	of func(kernel.VFStats) uint64
}

func describedMetrics() stateDescs {
	d := stateDescs{
		devices: newDesc("devices", "Devices of a resource, by NUMA node (-1: unknown) and state: free, allocated or unhealthy.", "resource",
			"numa", "state"),
		info:    newDesc("vf_info", "1 for each device that is offered.", "resource", "bdf", "pf", "vf", "numa", "driver"),
		refused: newDesc("config_refused", "1 while the configuration file is invalid and an earlier one is in use, else 0."),
		unserved: newDesc("config_unserved", "1 for each resource of the configuration that is not served because its entry is not supported.",
			"resource"),
		unreadable: newDesc("claim_records_unreadable",
			"1 while a claim's record is unreadable, so that the claim keeps its devices and cannot be prepared or unprepared; else 0."),
		allocatable: newDesc("kubelet_allocatable", "Devices of a resource that the kubelet counts as allocatable, allocated or not.", "resource"),
		allocated:   newDesc("vf_allocated", "1 for each device that a container has.", "resource", "bdf", "namespace", "pod", "container"),
	}
	for _, m := range []struct {
		name, what string
		of         func(kernel.VFStats) uint64
	}{
		{"rx_bytes", "Bytes that a VF received", func(v kernel.VFStats) uint64 { return v.RxBytes }},
		{"tx_bytes", "Bytes that a VF sent", func(v kernel.VFStats) uint64 { return v.TxBytes }},
		{"rx_packets", "Packets that a VF received", func(v kernel.VFStats) uint64 { return v.RxPackets }},
		{"tx_packets", "Packets that a VF sent", func(v kernel.VFStats) uint64 { return v.TxPackets }},
		{"rx_dropped", "Packets for a VF that were dropped", func(v kernel.VFStats) uint64 { return v.RxDropped }},
		{"tx_dropped", "Packets of a VF that were dropped", func(v kernel.VFStats) uint64 { return v.TxDropped }},
	} {
		d.traffic = append(d.traffic, trafficMetric{newDesc("vf_"+m.name+"_total", m.what+" since its creation, as counted by the PF.", "bdf",
			"pf",
			"namespace", "pod", "container"), m.of})
	}
	return d
}

// Describe sends the descriptions of all state metrics.
func (s *stateCollector) Describe(to chan<- *prometheus.Desc) {
	for _, d := range []*prometheus.Desc{s.devices, s.info, s.allocated, s.refused, s.unserved, s.allocatable, s.unreadable} {
		to <- d
	}
	for _, m := range s.traffic {
		to <- m.Desc
	}
}

// Collect sends all state metrics. It makes no request to the kubelet.
func (s *stateCollector) Collect(to chan<- prometheus.Metric) {
	offers, held, refused, damaged := s.offers()
	for resource, n := range s.kubeletCount() {
		to <- prometheus.MustNewConstMetric(s.allocatable, prometheus.GaugeValue, float64(n), resource)
	}
	holder := holdersOf(held)
	gauge := func(d *prometheus.Desc, v float64, labels ...string) {
		to <- prometheus.MustNewConstMetric(d, prometheus.GaugeValue, v, labels...)
	}
	gauge(s.refused, refused)
	gauge(s.unreadable, damaged)
	for _, resource := range s.unservedResources() {
		gauge(s.unserved, 1, resource)
	}
	for _, o := range offers {
		count := map[[2]string]int{}
		for _, d := range o.pool.Devices {
			id, numa := d.Address.String(), strconv.Itoa(d.NUMANode)
			gauge(s.info, 1, o.pool.Name, id, d.PF.String(), strconv.Itoa(d.VFIndex), numa, d.Driver)
			h, allocated := holder[id]
			switch {
			case o.faults[id] != "":
				count[[2]string{numa, "unhealthy"}]++
			case allocated:
				count[[2]string{numa, "allocated"}]++
			default:
				count[[2]string{numa, "free"}]++
			}
			if allocated && h.Resource == o.pool.Name {
				gauge(s.allocated, 1, h.Resource, id, h.Namespace, h.Pod, h.Container)
			}
		}
		for _, lost := range o.devices[len(o.pool.Devices):] {
			h := holder[lost.GetID()]
			count[lostState(o, h)]++
			if h.Resource == o.pool.Name {
				gauge(s.allocated, 1, h.Resource, lost.GetID(), h.Namespace, h.Pod, h.Container)
			}
		}
		for k, n := range count {
			gauge(s.devices, float64(n), o.pool.Name, k[0], k[1])
		}
	}
	s.collectTraffic(to, offers, holder)
}

func holdersOf(held []poddevices.Device) map[string]poddevices.Device {
	if slices.ContainsFunc(held, byClaim) {
		attached, _ := sriov.Holdings() // the DRA driver logs the error
		held = nameAttachedPods(held, attached)
	}
	holder := map[string]poddevices.Device{}
	for _, h := range held {
		holder[h.ID] = h
	}
	return holder
}

// nameAttachedPods sets the pod of each claimed VF to the one that has attached it, which only the VF's journal shows if several share
// the claim. Without a journal, the pod of the claim's record stays.
func nameAttachedPods(held []poddevices.Device, attached []sriov.Holding) []poddevices.Device {
	held = slices.Clone(held)
	for i, h := range held {
		for _, a := range attached {
			if byClaim(h) && a.Claim != nil && a.Claim.UID == h.Claim.UID && a.Address.String() == h.ID {
				at := strings.LastIndex(a.Pod, "/") // -1 without a namespace
				held[i].Namespace, held[i].Pod = a.Pod[:max(at, 0)], a.Pod[at+1:]
			}
		}
	}
	return held
}

// lostState returns the NUMA node and the state of a lost device for the metrics. One that a pod has through a claim is not faulty:
// only its resource has changed from DRA to the device plugin API.
func lostState(o *resourceOffer, h poddevices.Device) [2]string {
	if a, err := pci.ParseAddress(h.ID); err == nil && byClaim(h) {
		if dev, ok := o.snapshot.Device(a); ok {
			return [2]string{strconv.Itoa(dev.NUMANode), "allocated"}
		}
	}
	return [2]string{strconv.Itoa(pci.Unknown), "unhealthy"}
}

// kubeletCount returns, for each resource of this daemon, the number of devices that the kubelet reports as allocatable.
func (s *stateCollector) kubeletCount() map[string]int {
	s.mu.Lock()
	defer s.mu.Unlock()
	count := map[string]int{}
	for resource := range s.serving {
		if n, ok := s.counted[resource]; ok {
			count[resource] = n
		}
	}
	return count
}

// unservedResources returns the configured resources that the daemon does not support.
func (s *stateCollector) unservedResources() (names []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.config.Resources {
		if len(r.Unserved) > 0 {
			names = append(names, r.FullName())
		}
	}
	return names
}

func (s *stateCollector) offers() (offers []*resourceOffer, held []poddevices.Device, refused, damaged float64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.refusal != "" {
		refused = 1
	}
	if s.damaged != nil {
		damaged = 1
	}
	for _, one := range s.serving {
		o, _ := one.current()
		offers = append(offers, o)
	}
	return append(offers, s.claimable...), s.held, refused, damaged
}

// collectTraffic reads the counters of all VFs with one netlink request for each PF, which has them even if a VF is in a pod or without
// a network driver.
func (s *stateCollector) collectTraffic(to chan<- prometheus.Metric, offers []*resourceOffer, holder map[string]poddevices.Device) {
	byPF := map[pci.Address]map[int]kernel.VFStats{}
	for _, o := range offers {
		for _, d := range o.pool.Devices {
			pf, ok := o.snapshot.Device(d.PF)
			if !ok || len(pf.Interfaces) == 0 {
				continue
			}
			stats, asked := byPF[d.PF]
			if !asked {
				stats, _ = kernel.VFStatsOf(pf.Interfaces[0]) // a PF without such counters is skipped
				byPF[d.PF] = stats
			}
			v, ok := stats[d.VFIndex]
			if !ok {
				continue
			}
			h := holder[d.Address.String()]
			for _, m := range s.traffic {
				to <- prometheus.MustNewConstMetric(m.Desc, prometheus.CounterValue, float64(m.of(v)), d.Address.String(), d.PF.String(), h.Namespace,
					h.Pod, h.Container)
			}
		}
	}
}
