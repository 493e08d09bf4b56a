// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"time"
)

const (
	// settling is how long after a kubelet has started its answer may lack pods that run: it answers before it knows all of them. Meanwhile
	// a pod that ends before the first answer seems to have its devices.
	settling = 15 * time.Second
	// handing is how long a device that was handed out may be missing in that answer.
	handing = time.Minute
)

// checkpointName is the file in which the kubelet remembers what it gave away, in the folder of its socket.
const checkpointName = "kubelet_internal_checkpoint"

// checkpoint is as much of the file as is needed (k8s.io/kubernetes pkg/kubelet/cm/devicemanager/checkpoint).
type checkpoint struct {
	Data struct {
		PodDeviceEntries []struct {
			PodUID, ContainerName, ResourceName string
			DeviceIDs                           map[string][]string // by NUMA node, -1 for none
		}
	}
}

// remembered returns what the kubelet remembers. It may be of pods that have ended, whose names are not in it.
func remembered(dir string) (held []Holder) {
	data, err := os.ReadFile(filepath.Join(dir, checkpointName))
	var c checkpoint
	if err != nil || json.Unmarshal(data, &c) != nil {
		return nil // the kubelet has given nothing away yet
	}
	for _, e := range c.Data.PodDeviceEntries {
		for node, ids := range e.DeviceIDs {
			var nodes []int
			if n, err := strconv.Atoi(node); err == nil && n >= 0 {
				nodes = []int{n}
			}
			for _, id := range ids {
				held = append(held, Holder{Pod: "uid " + e.PodUID, Container: e.ContainerName, Resource: e.ResourceName, Device: id, Nodes: nodes})
			}
		}
	}
	return held
}

// askPods learns which pods have devices, and tells whether that changed. A kubelet that is away, or has just started, may know less than the
// file in which it remembers: then both count, but for devices of which it has told since, which it forgets in that file later.
func (d *daemon) askPods(ctx context.Context) (changed bool) {
	id, _ := idOf(filepath.Join(d.Pods, "kubelet.sock"))
	held, err := d.pods.List(ctx, func(string) bool { return true })
	if err != nil {
		d.log.Debug("it is not known which pods have devices", "error", err)
	}
	allocatable, countErr := d.pods.Allocatable(ctx)
	if err == nil && countErr != nil {
		d.log.Debug("it is not known what the kubelet may give away", "error", countErr)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.counted = map[string]int{}
	for resource, devices := range allocatable {
		d.counted[resource] = len(devices)
	}
	now := time.Now()
	if id != d.answers {
		d.answers, d.since, d.told = id, now, map[string]bool{}
	}
	for _, h := range held {
		d.told[h.Device] = true
		if s := d.serving[h.Resource]; s != nil {
			s.listed(h.Device)
		}
	}
	if err != nil || now.Before(d.since.Add(settling)) {
		held = merge(held, slices.DeleteFunc(remembered(d.Kubelet.Plugins), func(h Holder) bool { return d.told[h.Device] }))
	}
	if err != nil {
		held = merge(held, d.held)
	}
	changed = err == nil && !d.asked || !slices.EqualFunc(held, d.held, Holder.equal)
	d.held, d.asked = held, d.asked || err == nil
	return changed
}

// merge adds those holders whose devices nobody has.
func merge(held, more []Holder) []Holder {
	for _, h := range more {
		if !slices.ContainsFunc(held, func(o Holder) bool { return o.Device == h.Device }) {
			held = append(held, h)
		}
	}
	return held
}
