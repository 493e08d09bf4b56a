// SPDX-License-Identifier: Apache-2.0

package podresources

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/podlace/podlace/pkg/poddevices"
	"github.com/podlace/podlace/pkg/store"
)

// maxCheckpoint is the maximum size of a checkpoint in bytes. Hundreds of pods make some hundred thousand.
const maxCheckpoint = maxResponse

// checkpointEntry is the entry of one container and one resource, which the kubelet (1.20 and later) writes before it creates the pod's
// sandbox. The format is no public API; pkg/cli/kubelet/cm/devicemanager/checkpoint of Kubernetes defines it.
type checkpointEntry struct {
	PodUID, ContainerName, ResourceName string
	DeviceIDs                           map[string][]string // by NUMA node
}

// CheckpointDevices returns the devices of all entries in a checkpoint, those with two NUMA nodes twice. An entry has the UID of the
// pod, which may have ended, but not its name.
func CheckpointDevices(path string) (notes []poddevices.Device, err error) {
	data, err := store.ReadSmall(path, maxCheckpoint, 0)
	if err != nil {
		return nil, err
	}
	entries, err := parseEntries(data)
	for _, e := range entries {
		for node, ids := range e.DeviceIDs {
			var numa []int
			if n, err := strconv.Atoi(node); err == nil && n >= 0 { // -1 means no NUMA node
				numa = []int{n}
			}
			for _, id := range ids {
				notes = append(notes, poddevices.Device{UID: e.PodUID, Container: e.ContainerName, Resource: e.ResourceName, ID: id, NUMA: numa})
			}
		}
	}
	return notes, err
}

// readCheckpoint returns a pod's devices from the checkpoint, or an error if they are unknown.
func readCheckpoint(path, uid string) (noted []poddevices.Device, err error) {
	if uid == "" {
		return nil, poddevices.ErrNoUID
	}
	notes, err := CheckpointDevices(path)
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w: %w", poddevices.ErrNoCheckpoint, err)
	}
	for _, n := range notes {
		if n.UID == uid {
			noted = append(noted, n)
		}
	}
	return noted, err
}

// parseEntries returns all entries of a checkpoint. If the kubelet has assigned no device, the list of entries in the file is null.
func parseEntries(data []byte) ([]checkpointEntry, error) {
	var c struct {
		Data     struct{ PodDeviceEntries []checkpointEntry }
		Checksum *uint64
	}
	c.Data.PodDeviceEntries = []checkpointEntry{{}} // it stays, and fails the check below, if the key is missing
	if err := json.Unmarshal(data, &c); err != nil {
		return nil, fmt.Errorf("parse the kubelet's checkpoint: %w", err)
	}
	incomplete := func(e checkpointEntry) bool { return e.PodUID == "" || e.ResourceName == "" || e.DeviceIDs == nil }
	if c.Checksum == nil || slices.ContainsFunc(c.Data.PodDeviceEntries, incomplete) {
		return nil, errors.New("the kubelet's checkpoint lacks its checksum, or an entry lacks UID, resource or devices")
	}
	return c.Data.PodDeviceEntries, nil
}

// isConfirmed reports whether PodResources and the checkpoint agree on a pod's devices. PodResources omits init containers that are not
// restartable. If it has any device of the pod, their checkpoint entries are ignored, which is safe because the kubelet assigns a
// device to only one pod.
func isConfirmed(devices []poddevices.Device, containers []string, noted []poddevices.Device) bool {
	inits := func(d poddevices.Device) bool { return !slices.Contains(containers, d.Container) }
	if len(devices) == 0 {
		return len(noted) == 0
	}
	return maps.Equal(deviceSet(devices), deviceSet(slices.DeleteFunc(slices.Clone(noted), inits)))
}

// deviceSet returns devices without duplicates. A device with two NUMA nodes occurs twice in the checkpoint.
func deviceSet(devices []poddevices.Device) map[[3]string]bool {
	s := map[[3]string]bool{}
	for _, d := range devices {
		s[[3]string{d.Container, d.Resource, d.ID}] = true
	}
	return s
}

func list(devices []poddevices.Device) string {
	var names []string
	for key := range deviceSet(devices) {
		names = append(names, strings.Join(key[:], " "))
	}
	slices.Sort(names)
	if names == nil {
		return "no devices"
	}
	return "[" + strings.Join(names, ", ") + "]"
}
