// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/podresources"
	"github.com/podlace/podlace/pkg/daemon/probes"
	"github.com/podlace/podlace/pkg/poddevices"
)

const (
	// settlingTime is how long the kubelet's list of pods may be incomplete after its start, because it answers before it has found all
	// running pods. The devices of a pod that ends before the first answer stay reserved as long.
	settlingTime = 15 * time.Second
	// maxUnlisted is the maximum time from the allocation of a device until the kubelet lists it.
	maxUnlisted = time.Minute
	// sharedInterval is the minimum time between two shared requests to the kubelet: a tenth of its rate limit.
	sharedInterval = 100 * time.Millisecond
)

const checkpointName = "kubelet_internal_checkpoint"

// askPod returns the devices of a pod. The list is empty only if the pod certainly has none. To be certain, the daemon must know the pods
// of all devices allocated within the last minute.
func (d *daemon) askPod(ctx context.Context, q poddevices.Question) ([]poddevices.Device, error) {
	ctx, cancel := context.WithTimeout(ctx, poddevices.AnswerTimeout)
	defer cancel()
	kubelet := d.kubelet()
	if kubelet.Resources = q.Resources; len(q.Resources) == 0 { // empty Resources would make the kubelet list devices of other plugins
		kubelet.Resources = d.resourceNames()
	}
	for asked := false; ; asked = true {
		if len(d.gate.allocations.possibleDevices(q.UID, kubelet.Resources)) > 0 {
			d.learnOwners(ctx)
		}
		ids := d.gate.allocations.possibleDevices(q.UID, kubelet.Resources)
		uncertain := fmt.Errorf("pod %s/%s may have %s: %w", q.Namespace, q.Pod, strings.Join(ids, ", "), poddevices.ErrUncertain)
		if !asked || len(ids) == 0 {
			devices, err := podresources.Ask(ctx, kubelet, q.Namespace, q.Pod, q.UID)
			if err != nil && len(ids) > 0 {
				err = fmt.Errorf("%w; %w", uncertain, err)
			}
			if err != nil || len(devices) > 0 || len(ids) == 0 {
				return devices, err
			}
		}
		if ctx.Err() != nil {
			return nil, uncertain
		}
	}
}

// learnOwners asks the kubelet for the pods of allocated devices. Concurrent callers share one request, and a pause precedes the next,
// because of the kubelet's rate limit.
func (d *daemon) learnOwners(ctx context.Context) {
	done := d.owners.DoChan("", func() (any, error) {
		time.Sleep(time.Until(d.ownersAsked.Add(sharedInterval)))
		d.ownersAsked = time.Now()
		_, err := d.listPods(ctx)
		return nil, err
	})
	select {
	case <-done:
	case <-ctx.Done():
	}
}

// listPods returns the devices of all pods as the kubelet lists them, and updates the owners of allocated devices.
func (d *daemon) listPods(ctx context.Context) ([]poddevices.Device, error) {
	asked := time.Now()
	held, err := podresources.List(ctx, d.kubelet())
	if err != nil {
		d.log.Debug("could not list the devices of pods", "error", err)
	}
	d.gate.allocations.learnOwners(asked, held)
	return held, err
}

func (d *daemon) kubelet() podresources.Kubelet {
	return podresources.Kubelet{Socket: filepath.Join(d.Pods, "kubelet.sock"), Checkpoint: d.checkpointPath(), Claims: claim.InUse(d.Claims)}
}

// askPods updates the list of devices that pods have. If the kubelet does not answer or has just started, it adds those in the
// kubelet's checkpoint, except devices that the kubelet has listed before: it may have freed them, and removes freed ones from the
// checkpoint only after a delay.
func (d *daemon) askPods(ctx context.Context) {
	id, _ := probes.SocketAt(d.kubelet().Socket)
	remembered, _ := podresources.CheckpointDevices(d.checkpointPath()) // without a checkpoint the kubelet has not assigned a device yet
	remembered = slices.DeleteFunc(remembered, func(n poddevices.Device) bool { return hasEnded(d.Root, n.UID) })
	for i, n := range remembered {
		remembered[i].Pod = "uid " + n.UID // the checkpoint has no name, and the pod may have ended
	}
	now := time.Now()
	held, err := d.listPods(ctx)
	allocatable, _, countErr := podresources.Allocatable(ctx, d.kubelet())
	if err == nil && countErr != nil {
		d.log.Debug("could not list the allocatable devices of the kubelet", "error", countErr)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.counted = map[string]int{}
	for _, a := range allocatable {
		d.counted[a.Resource]++
	}
	if id != d.answeredBy {
		d.answeredBy, d.since, d.listed = id, now, map[string]bool{}
	}
	for _, h := range held {
		d.listed[h.ID] = true
	}
	if err != nil || now.Before(d.since.Add(settlingTime)) {
		held = mergeDevices(held, slices.DeleteFunc(remembered, func(h poddevices.Device) bool { return d.listed[h.ID] }))
	}
	kept := d.held
	if err == nil { // the kubelet lists all devices except those of claims
		kept = slices.DeleteFunc(slices.Clone(kept), func(h poddevices.Device) bool { return !byClaim(h) })
	}
	d.held, d.answered = mergeDevices(held, kept), d.answered || err == nil
	d.mergeUnlisted()
}

// hasEnded reports whether the kubelet has removed the folder of a pod, whose devices may stay in the checkpoint until another pod gets
// one. It returns false if the folder of all pods is missing.
func hasEnded(root, uid string) bool {
	pods := filepath.Join(root, "pods")
	if _, err := os.Stat(pods); err != nil || uid == "" || uid != filepath.Base(uid) {
		return false
	}
	_, err := os.Stat(filepath.Join(pods, uid))
	return errors.Is(err, fs.ErrNotExist)
}

// podText returns the pod of a device for messages, without a namespace if only its UID is known.
func podText(h poddevices.Device) string {
	return "pod " + strings.TrimPrefix(h.Namespace+"/"+h.Pod, "/")
}

// mergeDevices returns the first list with those of the second that it lacks.
func mergeDevices(held, more []poddevices.Device) []poddevices.Device {
	for _, h := range more {
		if !slices.ContainsFunc(held, func(o poddevices.Device) bool { return o.ID == h.ID }) {
			held = append(held, h)
		}
	}
	return held
}
