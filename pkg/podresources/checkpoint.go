// SPDX-License-Identifier: Apache-2.0

package podresources

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"

	"github.com/podlace/podlace/pkg/allocation"
)

// maxCheckpoint is the largest checkpoint in bytes. The checkpoint of a node with hundreds of pods has some hundred thousand bytes.
const maxCheckpoint = 64 << 20

// entry is the checkpoint's entry of one container and resource. The kubelet (1.20 and later) writes it before it creates the pod's
// sandbox. The format is not an API; its source is pkg/kubelet/cm/devicemanager/checkpoint of Kubernetes.
type entry struct {
	PodUID, ContainerName, ResourceName string
	DeviceIDs                           map[string][]string // by NUMA node
}

// CheckpointDevices returns the devices of all entries of a checkpoint. A device with two NUMA nodes appears once for each. Entries have
// the UID of the pod but not its name, and the pod may have ended. An error means that the devices are unknown.
func CheckpointDevices(path string) (notes []allocation.Device, err error) {
	data, err := ReadRegular(path)
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
				notes = append(notes, allocation.Device{UID: e.PodUID, Container: e.ContainerName, Resource: e.ResourceName, ID: id, NUMA: numa})
			}
		}
	}
	return notes, err
}

// readCheckpoint returns the checkpoint's devices of the pod with a UID. An error means that they are unknown.
func readCheckpoint(path, uid string) (noted []allocation.Device, err error) {
	if uid == "" {
		return nil, ErrNoUID
	}
	notes, err := CheckpointDevices(path)
	if errors.Is(err, fs.ErrNotExist) {
		err = fmt.Errorf("%w: %w", ErrNoCheckpoint, err)
	}
	for _, n := range notes {
		if n.UID == uid {
			noted = append(noted, n)
		}
	}
	return noted, err
}

// ReadRegular returns the content of a regular file of at most 64 MiB. It never blocks, not even on a FIFO.
func ReadRegular(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // O_NONBLOCK: opening a FIFO must not block
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxCheckpoint {
		return nil, fmt.Errorf("%s: want a regular file of at most %d bytes", path, maxCheckpoint)
	}
	data := make([]byte, info.Size())
	_, err = io.ReadFull(f, data)
	return data, err
}

// parseEntries returns the entries of a checkpoint. The entries are null if the kubelet has assigned no device.
func parseEntries(data []byte) ([]entry, error) {
	var c struct {
		Data     struct{ PodDeviceEntries []entry }
		Checksum *uint64
	}
	c.Data.PodDeviceEntries = []entry{{}} // it stays, and fails the check below, if the key is missing
	if err := json.Unmarshal(data, &c); err != nil {
		return nil, fmt.Errorf("parse the kubelet's checkpoint: %w", err)
	}
	incomplete := func(e entry) bool { return e.PodUID == "" || e.ResourceName == "" || e.DeviceIDs == nil }
	if c.Checksum == nil || slices.ContainsFunc(c.Data.PodDeviceEntries, incomplete) {
		return nil, errors.New("the kubelet's checkpoint lacks its checksum, or an entry lacks UID, resource or devices")
	}
	return c.Data.PodDeviceEntries, nil
}

// agrees reports whether PodResources and the checkpoint agree on a pod's devices. The checkpoint also lists init containers, which
// PodResources omits unless they restart. Their entries are ignored if the pod has another device, because the kubelet assigns a device
// to one pod only.
func agrees(devices []allocation.Device, containers []string, noted []allocation.Device) bool {
	inits := func(d allocation.Device) bool { return !slices.Contains(containers, d.Container) }
	if len(devices) == 0 {
		return len(noted) == 0
	}
	return maps.Equal(set(devices), set(slices.DeleteFunc(slices.Clone(noted), inits)))
}

// set removes duplicates: the checkpoint lists a device with two NUMA nodes twice.
func set(devices []allocation.Device) map[[3]string]bool {
	s := map[[3]string]bool{}
	for _, d := range devices {
		s[[3]string{d.Container, d.Resource, d.ID}] = true
	}
	return s
}

func list(devices []allocation.Device) string {
	var names []string
	for key := range set(devices) {
		names = append(names, strings.Join(key[:], " "))
	}
	slices.Sort(names)
	if names == nil {
		return "no devices"
	}
	return "[" + strings.Join(names, ", ") + "]"
}
