// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"slices"
	"time"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/podresources"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/sriov"
)

// alignAfter is the time from a pod's ADD until the kubelet certainly lists the CPUs of the pod.
const alignAfter = 5 * time.Second

// countedVF identifies an attachment that the NUMA alignment metric already includes.
type countedVF struct {
	address   pci.Address
	container string
}

// countAlignment counts new attachments of claimed VFs since the start of the collector, by whether the VF is on the NUMA node of its
// pod's CPUs. The kubelet chooses CPUs without regard to the devices of claims.
func (c *collector) countAlignment(ctx context.Context, now time.Time) {
	held, err := sriov.Holdings()
	if err != nil {
		return // collect() logs the error
	}
	var cpus map[string][]int64
	counted := map[countedVF]bool{}
	for _, h := range held {
		key := countedVF{h.Address, h.Owner.ContainerID}
		if h.Claim == nil || h.Since.Before(c.began) || now.Sub(h.Since) < alignAfter {
			continue
		}
		if !c.counted[key] {
			if cpus == nil {
				if cpus, err = podresources.CPUs(ctx, podresources.At(c.options.Kubelet)); err != nil {
					c.options.Log.Debug("could not list the CPUs of pods", "error", err)
					return
				}
			}
			c.countAligned(h, cpus[h.Pod])
		}
		counted[key] = true
	}
	c.counted = counted
}

func (d *Driver) countAligned(h sriov.Holding, cpus []int64) {
	r, err := claim.Read(d.options.Claims, h.Claim.UID)
	dev, ok := recordedDevice(&r, h.Claim.Device, h.Claim.Request)
	if err != nil || !ok {
		return // the claim has ended
	}
	d.count.claims.WithLabelValues(dev.Resource, d.latestInventory().isAligned(h.Address, cpus)).Inc()
}

// isAligned returns "yes" if all CPUs belong to the device's NUMA node, "no" if any does not, and "unknown" without exclusive CPUs or a
// known NUMA node.
func (i Inventory) isAligned(a pci.Address, cpus []int64) string {
	if len(cpus) == 0 {
		return "unknown"
	}
	device, ok := i.Snapshot.Device(a)
	n := slices.IndexFunc(i.Snapshot.Nodes, func(n pci.Node) bool { return n.ID == device.NUMANode })
	if !ok || n < 0 {
		return "unknown"
	}
	near := i.Snapshot.Nodes[n].CPUList()
	for _, cpu := range cpus {
		if !slices.Contains(near, int(cpu)) {
			return "no"
		}
	}
	return "yes"
}
