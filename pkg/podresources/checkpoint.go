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

// entry is what kubelets since 1.20 write for a container and a resource, before the sandbox of the pod is made. It is no API; the source is
// pkg/kubelet/cm/devicemanager/checkpoint of Kubernetes.
type entry struct {
	PodUID, ContainerName, ResourceName string
	DeviceIDs                           map[string][]string // by NUMA node
}

// Note is a device that a container was given, as the checkpoint has it: without the names of the pod, which may have ended.
type Note struct {
	allocation.Device
	UID  string // of the pod
	Node int    // NUMA node of the device, -1 for none
}

// Notes returns all that a checkpoint has, and which version of the file that is; "" for one that has another form than NoneNoted takes.
func Notes(path string) (notes []Note, version string, err error) {
	data, info, err := readRegular(path)
	if err != nil {
		return nil, "", err
	}
	if entries, isKnown := walk(data, func([]byte) bool { return true }); isKnown {
		return notesOf(entries), versionOf(info), nil
	}
	entries, err := entriesOfAny(data)
	return notesOf(entries), "", err
}

func notesOf(entries []entry) (notes []Note) {
	for _, e := range entries {
		for node, ids := range e.DeviceIDs {
			n, err := strconv.Atoi(node)
			if err != nil || n < 0 {
				n = -1
			}
			for _, id := range ids {
				notes = append(notes, Note{allocation.Device{Container: e.ContainerName, Resource: e.ResourceName, ID: id}, e.PodUID, n})
			}
		}
	}
	return notes
}

// readCheckpoint returns what is written down for a UID. An error means that nothing can be said.
func readCheckpoint(path, uid string) ([]allocation.Device, error) {
	if uid == "" {
		return nil, errors.New("the runtime does not say the pod's UID")
	}
	data, _, err := readRegular(path)
	if err != nil {
		return nil, err
	}
	return parseCheckpoint(data, uid)
}

// readRegular returns a file.
func readRegular(path string) ([]byte, fs.FileInfo, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0) // a FIFO must not block
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, nil, err
	}
	if !info.Mode().IsRegular() || info.Size() > maxCheckpoint {
		return nil, nil, fmt.Errorf("%s: want a file of at most %d bytes", path, maxCheckpoint)
	}
	data := make([]byte, info.Size())
	_, err = io.ReadFull(f, data)
	return data, info, err
}

func parseCheckpoint(data []byte, uid string) (noted []allocation.Device, err error) {
	entries, err := entriesOf(data, uid)
	return devicesOf(entries), err
}

func devicesOf(entries []entry) (devices []allocation.Device) {
	for _, n := range notesOf(entries) {
		devices = append(devices, n.Device)
	}
	return devices
}

// entriesOf reads only the entries of one UID, where the file is as kubelets write it: to read all of a hundred pods takes milliseconds.
func entriesOf(data []byte, uid string) (found []entry, err error) {
	isIts := func(of []byte) bool { return string(of) == uid }
	if found, isKnown := walk(data, isIts); isKnown {
		return found, nil
	}
	entries, err := entriesOfAny(data)
	return slices.DeleteFunc(entries, func(e entry) bool { return e.PodUID != uid }), err
}

func entriesOfAny(data []byte) ([]entry, error) {
	var c struct {
		Data struct{ PodDeviceEntries []entry }
	}
	if err := json.Unmarshal(data, &c); err != nil {
		return nil, fmt.Errorf("read the kubelet's checkpoint: %w", err)
	}
	if c.Data.PodDeviceEntries == nil { // another format
		return nil, errors.New("the kubelet's checkpoint has no entries")
	}
	if slices.ContainsFunc(c.Data.PodDeviceEntries, func(e entry) bool { return e.PodUID == "" || e.ResourceName == "" || e.DeviceIDs == nil }) {
		return nil, errors.New("the kubelet's checkpoint has entries without UID, resource or devices")
	}
	return c.Data.PodDeviceEntries, nil
}

// Confirms tells whether devices of a pod, which somebody was told by its name, are those of the pod with a UID.
func (k Kubelet) Confirms(uid string, devices []allocation.Device) bool {
	noted, err := readCheckpoint(k.Checkpoint, uid)
	if err != nil {
		return false
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
