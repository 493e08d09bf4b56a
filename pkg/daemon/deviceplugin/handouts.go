// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/podlace/podlace/pkg/daemon/podresources"
	"github.com/podlace/podlace/pkg/poddevices"
)

// pendingAllocations are the allocated devices that PodResources has not listed since. It lists an init container only if that is
// restartable. The devices of other init containers are only in the kubelet's checkpoint, and a race may drop them there.
type pendingAllocations struct {
	checkpoint string // of the kubelet
	mu         sync.Mutex
	devices    map[string]pendingDevice // by device ID
}

// pendingDevice is an allocated device that PodResources has not listed yet. UID is that of the pod, from the checkpoint entry that the
// kubelet writes after the allocation.
type pendingDevice struct {
	poddevices.Device
	at     time.Time
	former []poddevices.Device // entries of the device in the checkpoint at that time, of pods that have ended
	unread bool                // the checkpoint was unreadable at that time, so a later entry may belong to a pod that has ended
}

func newAllocations(checkpoint string) *pendingAllocations {
	return &pendingAllocations{checkpoint: checkpoint, devices: map[string]pendingDevice{}}
}

// addPending adds devices before Allocate returns them. The kubelet writes the pod's checkpoint entry only after that.
func (h *pendingAllocations) addPending(o *resourceOffer, ids map[string]bool) {
	notes, err := podresources.CheckpointDevices(h.checkpoint)
	h.mu.Lock()
	defer h.mu.Unlock()
	for id := range ids {
		out := pendingDevice{Device: poddevices.Device{Resource: o.pool.Name, ID: id, NUMA: o.numaNodes(id)}, at: time.Now(), unread: err != nil}
		for _, n := range notes {
			if n.ID == id && n.Resource == out.Resource {
				out.former = append(out.former, n)
			}
		}
		h.devices[id] = out
	}
}

// learnOwners finds the pods of the pending devices in the checkpoint and the PodResources list. Both say nothing about devices that
// were allocated after `asked`, when the list was requested.
func (h *pendingAllocations) learnOwners(asked time.Time, held []poddevices.Device) {
	notes, _ := podresources.CheckpointDevices(h.checkpoint) // if the checkpoint is unreadable, no pod counts as a pod without devices
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, n := range notes {
		former := func(f poddevices.Device) bool { return f.UID == n.UID && f.Container == n.Container }
		if out, ok := h.devices[n.ID]; ok && out.Resource == n.Resource && out.at.Before(asked) && !out.unread &&
			!slices.ContainsFunc(out.former, former) {
			out.UID = n.UID
			h.devices[n.ID] = out
		}
	}
	for _, d := range held {
		if out, ok := h.devices[d.ID]; ok && out.Resource == d.Resource && out.at.Before(asked) {
			delete(h.devices, d.ID)
		}
	}
}

// possibleDevices returns the pod's devices, and those whose pod is unknown for one minute after their allocation. Later, the kubelet
// may have failed to admit the pod and freed the device without a report.
func (h *pendingAllocations) possibleDevices(uid string, resources []string) (ids []string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, out := range h.devices {
		if slices.Contains(resources, out.Resource) && (out.UID == uid || out.UID == "" && out.isRecent()) {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids
}

func (o pendingDevice) isRecent() bool { return time.Since(o.at) < maxUnlisted }

// recentDevices returns the devices allocated within the last minute. A placeholder stands for the pod's name, which may be unknown.
func (h *pendingAllocations) recentDevices() (held []poddevices.Device) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, id := range slices.Sorted(maps.Keys(h.devices)) {
		if out := h.devices[id]; out.isRecent() {
			out.Pod = "(being admitted)"
			held = append(held, out.Device)
		}
	}
	return held
}
