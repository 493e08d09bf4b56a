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

// maxCheckpoint is how many bytes the checkpoint may have; that of a node with hundreds of pods has some hundred thousand.
const maxCheckpoint = 64 << 20

// entry is what kubelets since 1.20 write for a container and a resource, before the sandbox of the pod is made. It is no API; the source
// is pkg/kubelet/cm/devicemanager/checkpoint of Kubernetes.
type entry struct {
	PodUID, ContainerName, ResourceName string
	DeviceIDs                           map[string][]string // by NUMA node
}

// Notes returns the devices of all entries of a checkpoint, a device of two NUMA nodes once for each. The pods, which may have ended, have
// a UID and no name there. An error means that nothing can be said.
func Notes(path string) (notes []allocation.Device, err error) {
	data, err := ReadRegular(path)
	if err != nil {
		return nil, err
	}
	entries, err := parseEntries(data)
	for _, e := range entries {
		for node, ids := range e.DeviceIDs {
			var numa []int
			if n, err := strconv.Atoi(node); err == nil && n >= 0 { // -1 stands for none
				numa = []int{n}
			}
			for _, id := range ids {
				notes = append(notes, allocation.Device{UID: e.PodUID, Container: e.ContainerName, Resource: e.ResourceName, ID: id, NUMA: numa})
			}
		}
	}
	return notes, err
}

// readCheckpoint returns what is written down for a UID. An error means that nothing can be said.
func readCheckpoint(path, uid string) (noted []allocation.Device, err error) {
	if uid == "" {
		return nil, ErrNoUID
	}
	notes, err := Notes(path)
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

// ReadRegular returns a file of the kubelet, of at most 64 MiB. It never blocks.
func ReadRegular(path string) ([]byte, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a FIFO must not block
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxCheckpoint {
		return nil, fmt.Errorf("%s: want a file of at most %d bytes", path, maxCheckpoint)
	}
	data := make([]byte, info.Size())
	_, err = io.ReadFull(f, data)
	return data, err
}

// parseEntries returns the entries of a checkpoint. A kubelet that has given nothing away writes null for them.
func parseEntries(data []byte) ([]entry, error) {
	var c struct {
		Data     struct{ PodDeviceEntries []entry }
		Checksum *uint64
	}
	c.Data.PodDeviceEntries = []entry{{}} // an incomplete entry stays where the key is missing
	if err := json.Unmarshal(data, &c); err != nil {
		return nil, fmt.Errorf("read the kubelet's checkpoint: %w", err)
	}
	incomplete := func(e entry) bool { return e.PodUID == "" || e.ResourceName == "" || e.DeviceIDs == nil }
	if c.Checksum == nil || slices.ContainsFunc(c.Data.PodDeviceEntries, incomplete) {
		return nil, errors.New("the kubelet's checkpoint has no checksum, or no entries with UID, resource and devices")
	}
	return c.Data.PodDeviceEntries, nil
}

// confirmed reports whether PodResources and the checkpoint agree on a pod's devices. The checkpoint also has those of init containers,
// which PodResources leaves out unless they restart: they are ignored if the pod has another device, since no two pods have the same.
func confirmed(devices []allocation.Device, containers []string, noted []allocation.Device) bool {
	inits := func(d allocation.Device) bool { return !slices.Contains(containers, d.Container) }
	if len(devices) == 0 {
		return len(noted) == 0
	}
	return maps.Equal(set(devices), set(slices.DeleteFunc(slices.Clone(noted), inits)))
}

// set leaves out what is there twice: a device of two NUMA nodes is written down for each.
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
