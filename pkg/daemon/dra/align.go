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

// countAlignment counts new attachments of claimed VFs in a metric, if they were created after the start of the collector. The metric
// distinguishes VFs on the NUMA node of their pod's CPUs from all other VFs. This metric is useful because the kubelet chooses the CPUs of
// a pod without regard to the devices of claims.
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

// isAligned returns "yes" if all CPUs belong to the NUMA node of the device. If any CPU belongs to another NUMA node, the result is "no".
// If the pod has no exclusive CPUs or the NUMA node is unknown, the result is "unknown".
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
