// SPDX-License-Identifier: Apache-2.0

package podresources

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/allocation"
)

// maxCheckpoint is how many bytes the checkpoint may have; that of a node with hundreds of pods has some hundred thousand.
const maxCheckpoint = 64 << 20

// entry is what kubelets since 1.20 write for a container and a resource, before the sandbox of the pod is made. It is no API; the source is
// pkg/kubelet/cm/devicemanager/checkpoint of Kubernetes.
type entry struct {
	PodUID, ContainerName, ResourceName string
	DeviceIDs                           map[string][]string // by NUMA node
}

// readCheckpoint returns what is written down for a UID. An error means that nothing can be said.
func readCheckpoint(path, uid string) (noted []allocation.Device, err error) {
	if uid == "" {
		return nil, errors.New("the runtime does not say the pod's UID")
	}
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxCheckpoint {
		return nil, fmt.Errorf("%s: want a file of at most %d bytes", path, maxCheckpoint)
	}
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	return parseCheckpoint(data, uid)
}

func parseCheckpoint(data []byte, uid string) (noted []allocation.Device, err error) {
	entries, err := entriesOf(data, uid)
	for _, e := range entries {
		for _, ids := range e.DeviceIDs {
			for _, id := range ids {
				noted = append(noted, allocation.Device{Container: e.ContainerName, Resource: e.ResourceName, ID: id})
			}
		}
	}
	return noted, err
}

// entriesOf reads only the entries of one UID, where the file is as kubelets write it: to read all of a hundred pods takes milliseconds.
func entriesOf(data []byte, uid string) (found []entry, err error) {
	const first, next = `{"Data":{"PodDeviceEntries":[`, `{"PodUID":"`
	if !bytes.HasPrefix(data, []byte(first+next)) {
		return entriesOfAny(data, uid)
	}
	mark := []byte(next + uid + `"`) // nowhere else, for in strings the quotes are escaped
	for at := bytes.Index(data, mark); at >= 0; at = bytes.Index(data, mark) {
		var e entry
		if err := json.NewDecoder(bytes.NewReader(data[at:])).Decode(&e); err != nil {
			return nil, fmt.Errorf("read the kubelet's checkpoint: %w", err)
		}
		found, data = append(found, e), data[at+len(mark):]
	}
	return found, nil
}

func entriesOfAny(data []byte, uid string) ([]entry, error) {
	var c struct {
		Data struct{ PodDeviceEntries []entry }
	}
	if err := json.Unmarshal(data, &c); err != nil {
		return nil, fmt.Errorf("read the kubelet's checkpoint: %w", err)
	}
	if c.Data.PodDeviceEntries == nil { // nobody has devices, or another format
		return nil, errors.New("the kubelet's checkpoint has no entries")
	}
	return slices.DeleteFunc(c.Data.PodDeviceEntries, func(e entry) bool { return e.PodUID != uid }), nil
}

// Confirms tells whether devices of a pod, which somebody was told by its name, may be those of the pod with a UID. Without a checkpoint they may.
func (k Kubelet) Confirms(uid string, devices []allocation.Device) bool {
	noted, err := readCheckpoint(k.Checkpoint, uid)
	if err != nil {
		return true
	}
	var containers []string
	for _, d := range devices {
		containers = append(containers, d.Container)
	}
	return confirmed(devices, containers, k.wanted(noted))
}

// confirmed tells whether a pod has just what is written down for it. Init containers are written down and not told of, unless they restart;
// that they are what a name stands for is believed when the pod has another device, for no two pods have the same.
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
