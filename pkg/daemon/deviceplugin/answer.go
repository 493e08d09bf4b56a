// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"cmp"
	"context"
	"maps"
	"slices"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/podresources"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/poddevices"
)

// answerQuestion answers the sriov plugin or the command line.
func (d *daemon) answerQuestion(ctx context.Context, q poddevices.Question) poddevices.Answer {
	a := poddevices.Answer{Devices: []poddevices.Device{}}
	if q.Pod != "" {
		devices, err := d.askPod(ctx, q)
		claimed, err2 := d.gate.claims.Find(claim.Pod{Namespace: q.Namespace, Name: q.Pod, UID: q.UID})
		if err := cmp.Or(err, err2); err != nil {
			return poddevices.Refusal(err)
		}
		a.Devices, a.Others = claim.Split(claimed, q.Resources)
		a.Devices = slices.Concat(devices, a.Devices)
		return a
	}
	if q.Node {
		node, err := podresources.Node(ctx, d.kubelet())
		if err != nil {
			return poddevices.Refusal(err)
		}
		return poddevices.Answer{Node: node}
	}
	held, err := podresources.List(ctx, d.kubelet())
	if err != nil {
		return poddevices.Refusal(err)
	}
	ours := d.resourceNames()
	for _, h := range held {
		if slices.Contains(ours, h.Resource) || d.hasDevice(h.ID) {
			a.Devices = append(a.Devices, h)
		}
	}
	a.Faults = d.reportedFaults()
	if q.Published {
		a.Published = d.publishedDevices()
	}
	return a
}

// resourceNames returns the resources that this daemon serves, never nil.
func (d *daemon) resourceNames() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.AppendSeq([]string{}, maps.Keys(d.serving))
}

// hasDevice reports whether this node has the device, even if another device plugin assigns it.
func (d *daemon) hasDevice(id string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	a, err := pci.ParseAddress(id)
	_, ok := d.snapshot.Device(a)
	return err == nil && ok
}
