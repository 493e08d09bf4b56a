// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/poddevices"
	"github.com/podlace/podlace/pkg/podresources"
)

// answerQuestion returns the answer to a question from the sriov plugin or from the command line.
func (d *daemon) answerQuestion(ctx context.Context, q poddevices.Question) poddevices.Answer {
	a := poddevices.Answer{Devices: []poddevices.Device{}}
	if q.Pod != "" {
		devices, err := d.askPod(ctx, q)
		if err != nil {
			return poddevices.Refusal(err)
		}
		a.Devices, a.UID, a.Resources = append(a.Devices, devices...), q.UID, q.Resources
		claimed, err := d.gate.claims.Find(claim.Pod{Namespace: q.Namespace, Name: q.Pod, UID: q.UID})
		if err != nil {
			return poddevices.Refusal(err)
		}
		claimed, others := claim.Split(claimed, q.Resources)
		if !q.Claims { // an older plugin would start the pod without them
			if i := slices.IndexFunc(claimed, func(c poddevices.Device) bool { return !c.Claim.Admin }); i >= 0 {
				return poddevices.Answer{Error: fmt.Sprintf("pod %s/%s has %s by claim %s: the sriov plugin on this node does not support claims: update it",
					q.Namespace, q.Pod, claimed[i].ID, claimed[i].Claim.Name)}
			}
			return a
		}
		a.Devices, a.Others, a.Claims = append(a.Devices, claimed...), others, true
		return a
	}
	held, err := podresources.List(ctx, d.kubelet())
	if err != nil {
		return poddevices.Answer{Error: err.Error()}
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

// resourceNames returns the names of the resources that this daemon serves. resourceNames never returns nil.
func (d *daemon) resourceNames() []string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.AppendSeq([]string{}, maps.Keys(d.serving))
}

// hasDevice reports whether the ID belongs to a device of this node. hasDevice is also true for a device that another device plugin
// assigns.
func (d *daemon) hasDevice(id string) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	a, err := pci.ParseAddress(id)
	_, ok := d.snapshot.Device(a)
	return err == nil && ok
}
