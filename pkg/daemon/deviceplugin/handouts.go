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

// pendingAllocations holds the allocated devices that the kubelet's PodResources API has not listed since their allocation. PodResources
// lists an init container only if the container is restartable. The devices of init containers that are not restartable are only in the
// kubelet's checkpoint. Because of a race in the kubelet, the devices of an init container may also be missing from the checkpoint.
type pendingAllocations struct {
	checkpoint string // of the kubelet
	mu         sync.Mutex
	devices    map[string]pendingDevice // by device ID
}

// pendingDevice is an allocated device that PodResources has not listed yet. The field UID contains the pod's UID from the checkpoint entry
// that the kubelet writes after the allocation.
type pendingDevice struct {
	poddevices.Device
	at     time.Time
	former []poddevices.Device // entries of the device in the checkpoint at that time, of pods that have ended
	unread bool                // the checkpoint was unreadable at that time, so a later entry may belong to a pod that has ended
}

func newAllocations(checkpoint string) *pendingAllocations {
	return &pendingAllocations{checkpoint: checkpoint, devices: map[string]pendingDevice{}}
}

// addPending adds devices to the pending allocations. The daemon calls addPending before Allocate returns the devices. The kubelet writes
// the pod's entry to its checkpoint after Allocate.
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

// learnOwners finds out which pods have the pending devices, from the checkpoint and from the list of PodResources. The argument `asked` is
// the time at which the daemon requested the list. For devices that were allocated later, learnOwners ignores the checkpoint and the list.
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

// possibleDevices returns the devices that a pod may have: the devices of this pod, and the devices whose pod is unknown. A device whose
// pod is unknown is included only for one minute after its allocation. The time limit is needed because the kubelet may have failed to
// admit the pod, and may have freed the device without a report.
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

// recentDevices returns the devices that were allocated within the last minute. recentDevices uses a placeholder for the pod's name,
// because the pod may be unknown.
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
