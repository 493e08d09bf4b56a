// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/podlace/podlace/pkg/allocation"
	"github.com/podlace/podlace/pkg/podresources"
)

// handOuts are the devices that were handed out and that PodResources has not listed since. Of init containers, PodResources lists only
// those that restart; devices of the others are only in the kubelet's checkpoint, from which a race in the kubelet may drop them.
type handOuts struct {
	checkpoint string // of the kubelet
	mu         sync.Mutex
	devices    map[string]handOut // by device ID
}

// handOut is one of them. Of its pod there is the UID, by a later entry in the checkpoint.
type handOut struct {
	allocation.Device
	at     time.Time
	former []allocation.Device // the device's entries in the checkpoint at that time, of pods that have ended
	unread bool                // the checkpoint could not be read at that time: an entry may be of a pod that has ended
}

func newHandOuts(checkpoint string) *handOuts {
	return &handOuts{checkpoint: checkpoint, devices: map[string]handOut{}}
}

// add records devices of a resource before Allocate returns them. The kubelet writes the entry of their pod after that.
func (h *handOuts) add(o *offer, ids map[string]bool) {
	notes, err := podresources.Notes(h.checkpoint)
	h.mu.Lock()
	defer h.mu.Unlock()
	for id := range ids {
		out := handOut{Device: allocation.Device{Resource: o.pool.Name, ID: id, NUMA: o.nodes(id)}, at: time.Now(), unread: err != nil}
		for _, n := range notes {
			if n.ID == id && n.Resource == out.Resource {
				out.former = append(out.former, n)
			}
		}
		h.devices[id] = out
	}
}

// learnOwners learns which pods have the devices: from the checkpoint, and from what PodResources lists. Both may be as old as asked, so
// they say nothing of a device that was handed out later.
func (h *handOuts) learnOwners(asked time.Time, held []allocation.Device) {
	notes, _ := podresources.Notes(h.checkpoint) // while it cannot be read no pod is certain to have no device
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, n := range notes {
		former := func(f allocation.Device) bool { return f.UID == n.UID && f.Container == n.Container }
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

// candidates returns the devices of resources that the pod with a UID may have: its own, and for a minute those of no known pod. The
// kubelet does not say that the admission of a pod failed and the device is free again.
func (h *handOuts) candidates(uid string, resources []string) (ids []string) {
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

func (o handOut) isRecent() bool { return time.Since(o.at) < maxUnlisted }

// recent returns those of the last minute as if a container had them.
func (h *handOuts) recent() (held []allocation.Device) {
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
