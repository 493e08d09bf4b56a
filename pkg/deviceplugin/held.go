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

	"github.com/podlace/podlace/pkg/allocation"
	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/podresources"
	"github.com/podlace/podlace/pkg/probes"
)

const (
	// settling is how long after a kubelet has started its answer may lack pods that run: it answers before it knows all of them. Meanwhile
	// a pod that ends before the first answer seems to have its devices.
	settling = 15 * time.Second
	// maxUnlisted is how long a device that was handed out may be missing in that answer.
	maxUnlisted = time.Minute
)

const checkpointName = "kubelet_internal_checkpoint"

// askPod returns the devices of a pod. No device is certain once the owner of each device that was handed out within a minute is known.
func (d *daemon) askPod(ctx context.Context, q allocation.Question) ([]allocation.Device, error) {
	ctx, cancel := context.WithTimeout(ctx, allocation.Within)
	defer cancel()
	kubelet := d.kubelet()
	if kubelet.Resources = q.Resources; len(q.Resources) == 0 { // else the kubelet also lists devices of other plugins
		kubelet.Resources = d.resources()
	}
	for asked := false; ; asked = true {
		if len(d.gate.handOuts.candidates(q.UID, kubelet.Resources)) > 0 {
			d.learnOwners(ctx)
		}
		ids := d.gate.handOuts.candidates(q.UID, kubelet.Resources)
		uncertain := fmt.Errorf("pod %s/%s may have %s: %w", q.Namespace, q.Pod, strings.Join(ids, ", "), allocation.ErrUncertain)
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

// learnOwners asks the kubelet which pods have the devices that were handed out. Callers that need the answer at the same time share one
// question, so that they leave the kubelet's rate limit to others.
func (d *daemon) learnOwners(ctx context.Context) {
	if d.owners.begin(ctx) {
		_, _ = d.listPods(ctx)
		d.owners.end()
	}
}

// listPods asks the kubelet which pods have devices, and learns from that which pods have those that were handed out.
func (d *daemon) listPods(ctx context.Context) ([]allocation.Device, error) {
	asked := time.Now()
	held, err := podresources.List(ctx, d.kubelet())
	if err != nil {
		d.log.Debug("it is not known which pods have devices", "error", err)
	}
	d.gate.handOuts.learnOwners(asked, held)
	return held, err
}

func (d *daemon) kubelet() podresources.Kubelet {
	return podresources.Kubelet{Socket: filepath.Join(d.Pods, "kubelet.sock"), Checkpoint: d.checkpoint(), Claims: claim.InUse(d.Claims)}
}

// askPods learns which pods have devices. A kubelet that is away, or has just started, may know less than the file in which it remembers:
// then both count, but for devices of which it has told since, which it forgets in that file later.
func (d *daemon) askPods(ctx context.Context) {
	id, _ := probes.SocketAt(d.kubelet().Socket)
	remembered, _ := podresources.Notes(d.checkpoint()) // without it the kubelet has given nothing away yet
	remembered = slices.DeleteFunc(remembered, func(n allocation.Device) bool { return hasEnded(d.Root, n.UID) })
	for i, n := range remembered {
		remembered[i].Pod = "uid " + n.UID // it may have ended, and its name is not noted
	}
	now := time.Now()
	held, err := d.listPods(ctx)
	allocatable, countErr := podresources.Allocatable(ctx, d.kubelet())
	if err == nil && countErr != nil {
		d.log.Debug("it is not known what the kubelet may give away", "error", countErr)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.counted = map[string]int{}
	for _, a := range allocatable {
		d.counted[a.Resource]++
	}
	if id != d.answers {
		d.answers, d.since, d.told = id, now, map[string]bool{}
	}
	for _, h := range held {
		d.told[h.ID] = true
	}
	if err != nil || now.Before(d.since.Add(settling)) {
		held = merge(held, slices.DeleteFunc(remembered, func(h allocation.Device) bool { return d.told[h.ID] }))
	}
	if err != nil {
		held = merge(held, d.held)
	}
	d.held, d.asked = held, d.asked || err == nil
}

// hasEnded reports whether the kubelet has removed the folder of a pod. Its checkpoint has the devices of pods that have ended until it
// gives another pod one. Without a folder of pods nothing is known.
func hasEnded(root, uid string) bool {
	pods := filepath.Join(root, "pods")
	if _, err := os.Stat(pods); err != nil || uid == "" || uid != filepath.Base(uid) {
		return false
	}
	_, err := os.Stat(filepath.Join(pods, uid))
	return errors.Is(err, fs.ErrNotExist)
}

// merge adds those devices that are not there yet.
func merge(held, more []allocation.Device) []allocation.Device {
	for _, h := range more {
		if !slices.ContainsFunc(held, func(o allocation.Device) bool { return o.ID == h.ID }) {
			held = append(held, h)
		}
	}
	return held
}
