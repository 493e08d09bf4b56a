// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"fmt"
	"maps"
	"slices"

	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/sriov"
	"github.com/podlace/podlace/pkg/strict"
)

// Refused describes the devices of a pool that the plugin sriov refuses, once for each reason.
func (p Pool) Refused(s *pci.Snapshot) (texts []string) {
	refused := map[string][]Device{}
	for _, d := range p.Devices {
		pf, _ := s.Device(d.PF)
		if why, remedy := sriov.Refusal(d.Device, pf); why != "" {
			refused[why+": "+remedy] = append(refused[why+": "+remedy], d)
		}
	}
	for _, why := range slices.Sorted(maps.Keys(refused)) {
		texts = append(texts, fmt.Sprintf("resource %s: the plugin sriov refuses %s, first %s: %s", p.Name,
			plural(len(refused[why]), "device", "devices"), refused[why][0].Address, why))
	}
	return texts
}

// reportRefused reports the devices of a resource that the plugin sriov refuses, except what noteInfiniBand has reported.
func (f *findings) reportRefused(i int) {
	r := &f.c.Resources[i]
	p := Pool{Name: r.FullName()}
	for _, v := range f.verdicts {
		d := f.subjects[v.device].Device
		if v.resource == i && (d.LinkType != pci.InfiniBand || !r.wants(v.selector, "linkTypes")) {
			p.Devices = append(p.Devices, Device{Device: d})
		}
	}
	for _, text := range p.Refused(f.Snapshot) {
		f.Note(r.Place, "%s", text)
	}
}

// wants reports whether a selector of the resource, or none if it is -1, has a condition with this key.
func (r *Resource) wants(selector int, key string) bool {
	return selector >= 0 && slices.ContainsFunc(r.Selectors[selector].Conditions, func(c condition) bool { return c.Name == key })
}

// noteInfiniBand reports a selector that names InfiniBand.
func (r *reader) noteInfiniBand(v strict.Value, types []string) {
	if slices.Contains(types, pci.InfiniBand) {
		why, remedy := sriov.Refusal(pci.Device{LinkType: pci.InfiniBand}, pci.Device{})
		r.Note(v.Place, "the plugin sriov refuses these VFs: %s: %s", why, remedy)
	}
}

// withExclusiveRDMA returns a warning for each isRdma, for a node whose RDMA subsystem is in exclusive mode.
func (c *Config) withExclusiveRDMA() []strict.Problem {
	var r strict.Report
	for _, res := range c.Resources {
		for _, s := range res.Selectors {
			for _, condition := range s.Conditions {
				if condition.Name == "isRdma" {
					r.Note(condition.Place, "pods cannot use the RDMA devices, which stay on the node in exclusive mode of the RDMA subsystem: "+
						"write 'options ib_core netns_mode=1' into /etc/modprobe.d and reboot, or move them with rdma-cni under Multus")
				}
			}
		}
	}
	return r.Notes
}
