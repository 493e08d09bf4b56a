// SPDX-License-Identifier: Apache-2.0

package podresources

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/podlace/podlace/pkg/poddevices"
)

// The messages are defined in k8s.io/kubelet/pkg/apis/podresources/v1/api.proto. The encoding of protobuf messages is described in
// protobuf.dev/programming-guides/encoding. Package podresources does not use protowire, because protowire reads the program's own
// executable at every start.
const (
	varint          = 0
	fixed64         = 1
	lengthDelimited = 2 // length-delimited: strings, messages and packed numbers
	fixed32         = 5
	maxField        = 1<<29 - 1
)

var errMessage = errors.New("the kubelet's response is not a valid PodResources message")

// The type messageField is one field of a protobuf message. The value of a field is a number or a sequence of bytes.
type messageField struct {
	id, kind int
	number   uint64
	bytes    []byte
}

// cutField returns the first field of a message, and the bytes that follow this field.
func cutField(message []byte) (f messageField, rest []byte, err error) {
	tag, n := binary.Uvarint(message)
	if n <= 0 || tag>>3 < 1 || tag>>3 > maxField {
		return f, nil, fmt.Errorf("%w: tag %d", errMessage, tag)
	}
	f, rest = messageField{id: int(tag >> 3), kind: int(tag & 7)}, message[n:]
	length := uint64(0)
	switch f.kind {
	case varint, lengthDelimited:
		if f.number, n = binary.Uvarint(rest); n <= 0 {
			return f, nil, fmt.Errorf("%w: number of field %d", errMessage, f.id)
		}
		if rest = rest[n:]; f.kind == lengthDelimited {
			length = f.number
		}
	case fixed64:
		length = 8
	case fixed32:
		length = 4
	default: // groups exist only in protobuf 2
		return f, nil, fmt.Errorf("%w: field %d of type %d", errMessage, f.id, f.kind)
	}
	if length > uint64(len(rest)) {
		return f, nil, fmt.Errorf("%w: field %d of %d bytes", errMessage, f.id, length)
	}
	f.bytes = rest[:length]
	return f, rest[length:], nil
}

// eachField calls take() for each field of a message. eachField stops when take() returns an error.
func eachField(message []byte, take func(messageField) error) (err error) {
	var f messageField
	for len(message) > 0 && err == nil {
		if f, message, err = cutField(message); err == nil {
			err = take(f)
		}
	}
	return err
}

// podMessage is a PodResources message. The containers of the pod stay encoded until decodeContainers decodes them. A List response
// contains all pods, and decoding only the wanted pod saves time.
type podMessage struct {
	namespace, name string
	containers      [][]byte
}

// decodePods decodes a GetPodResourcesResponse or a ListPodResourcesResponse. In both messages, field 1 contains pods: one pod in the
// response of Get, and all pods in the response of List.
func decodePods(answer []byte) (pods []podMessage, err error) {
	err = eachField(answer, func(f messageField) error {
		if f.id != 1 || f.kind != lengthDelimited {
			return nil
		}
		var p podMessage
		err := eachField(f.bytes, p.setField)
		pods = append(pods, p)
		return err
	})
	return pods, err
}

func (p *podMessage) setField(f messageField) error {
	switch {
	case f.kind != lengthDelimited:
	case f.id == 1:
		p.name = string(f.bytes)
	case f.id == 2:
		p.namespace = string(f.bytes)
	case f.id == 3:
		p.containers = append(p.containers, f.bytes)
	}
	return nil
}

// decodeContainers returns the devices of a pod, and the names of all containers of the pod.
func (p podMessage) decodeContainers() (devices []poddevices.Device, names []string, err error) {
	for i, message := range p.containers {
		var c containerMessage
		if err := eachField(message, c.setField); err != nil {
			return nil, nil, err
		}
		names = append(names, c.name)
		for _, d := range c.devices {
			d.Namespace, d.Pod, d.Container, d.Index, d.CPUs = p.namespace, p.name, c.name, i, c.cpus
			devices = append(devices, d)
		}
	}
	return devices, names, nil
}

// containerMessage is a ContainerResources message.
type containerMessage struct {
	name    string
	devices []poddevices.Device // with resource, ID and NUMA nodes
	cpus    []int64
}

func (c *containerMessage) setField(f messageField) error {
	switch {
	case f.id == 1 && f.kind == lengthDelimited:
		c.name = string(f.bytes)
	case f.id == 2 && f.kind == lengthDelimited:
		devices, err := decodeDevices(f.bytes)
		c.devices = append(c.devices, devices...)
		return err
	case f.id == 3:
		var err error
		c.cpus, err = appendCPUs(c.cpus, f)
		return err
	}
	return nil
}

// appendCPUs decodes one CPU number or a packed list of CPU numbers.
func appendCPUs(cpus []int64, f messageField) ([]int64, error) {
	switch f.kind {
	case varint:
		cpus = append(cpus, int64(f.number))
	case lengthDelimited:
		for packed := f.bytes; len(packed) > 0; {
			cpu, n := binary.Uvarint(packed)
			if n <= 0 {
				return cpus, fmt.Errorf("%w: list of CPUs", errMessage)
			}
			cpus, packed = append(cpus, int64(cpu)), packed[n:]
		}
	}
	return cpus, nil
}

// decodeDevices decodes a ContainerDevices message. A ContainerDevices message contains the devices of one resource that have the same NUMA
// nodes.
func decodeDevices(message []byte) (devices []poddevices.Device, err error) {
	var resource string
	var ids []string
	var nodes []int
	err = eachField(message, func(f messageField) (err error) {
		switch {
		case f.kind != lengthDelimited:
		case f.id == 1:
			resource = string(f.bytes)
		case f.id == 2:
			ids = append(ids, string(f.bytes))
		case f.id == 3:
			nodes, err = appendNodes(nodes, f.bytes)
		}
		return err
	})
	for _, id := range ids {
		devices = append(devices, poddevices.Device{Resource: resource, ID: id, NUMA: nodes})
	}
	return devices, err
}

// appendNodes decodes a TopologyInfo message. Protobuf encoders omit a number with the value 0. In a protobuf message, a missing number
// stands for 0. A NUMA node without an ID in the message is therefore NUMA node 0.
func appendNodes(nodes []int, message []byte) ([]int, error) {
	err := eachField(message, func(f messageField) error {
		if f.id != 1 || f.kind != lengthDelimited {
			return nil
		}
		id := 0
		err := eachField(f.bytes, func(f messageField) error {
			if f.id == 1 && f.kind == varint {
				id = int(f.number)
			}
			return nil
		})
		nodes = append(nodes, id)
		return err
	})
	return nodes, err
}

// decodeAllocatable decodes an AllocatableResourcesResponse message.
func decodeAllocatable(answer []byte) (all []poddevices.Device, cpus []int64, err error) {
	err = eachField(answer, func(f messageField) (err error) {
		switch {
		case f.id == 1 && f.kind == lengthDelimited:
			var devices []poddevices.Device
			devices, err = decodeDevices(f.bytes)
			all = append(all, devices...)
		case f.id == 2:
			cpus, err = appendCPUs(cpus, f)
		}
		return err
	})
	return all, cpus, err
}

// appendString appends a string field to a message.
func appendString(message []byte, id byte, s string) []byte {
	message = binary.AppendUvarint(append(message, id<<3|lengthDelimited), uint64(len(s)))
	return append(message, s...)
}
