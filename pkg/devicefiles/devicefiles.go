// SPDX-License-Identifier: Apache-2.0

// Package devicefiles returns the files below /dev that a container needs for its devices, in the forms of the Container Device
// Interface (CDI) and of the kubelet, and the environment variables of sriov-network-device-plugin. It does no I/O.
package devicefiles

import (
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	cdi "tags.cncf.io/container-device-interface/specs-go"

	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/pool"
)

// CDIVersion is the oldest version of the CDI specification with all fields used here.
const CDIVersion = "0.5.0"

// The files that several devices share.
const (
	VFIOControl = "/dev/vfio/vfio"
	VhostNet    = "/dev/vhost-net"
	TUN         = "/dev/net/tun"
)

// File is a device file on the node and its path in the container.
type File struct{ Host, Container string }

// values are the facts about a device for one kind of driver, with the names of sriov-network-device-plugin.
type values map[string]string

// Variables returns the environment variables of a container with devices of a resource: PCIDEVICE_EXAMPLE_COM_FAST with their
// addresses and PCIDEVICE_EXAMPLE_COM_FAST_INFO with their files.
func Variables(resource string, devices []pool.Device) (map[string]string, error) {
	var ids []string
	info := map[string]map[string]values{}
	for _, d := range devices {
		ids = append(ids, d.Address.String())
		info[d.Address.String()] = describe(d)
	}
	text, err := json.Marshal(info)
	if err != nil {
		return nil, err
	}
	name := variable(resource)
	return map[string]string{name: strings.Join(ids, ","), name + "_INFO": string(text)}, nil
}

// variable returns the name of a resource's environment variable: PCIDEVICE_EXAMPLE_COM_FAST for example.com/fast. It keeps hyphens,
// as sriov-network-device-plugin does, although shells cannot read such names.
func variable(resource string) string {
	return "PCIDEVICE_" + strings.ToUpper(strings.NewReplacer(".", "_", "/", "_").Replace(resource))
}

// describe returns the facts about a device by kind of driver.
func describe(d pool.Device) map[string]values {
	out := map[string]values{"generic": {"deviceID": d.Address.String()}}
	switch {
	case d.Driver == "vfio-pci":
		out["vfio"] = values{"mount": VFIOControl}
		if group := vfioGroup(d.Device); group != "" {
			out["vfio"]["dev-mount"] = group
		}
	case len(d.UIO) > 0:
		out["uio"] = values{"mount": "/dev/" + d.UIO[0]}
	}
	if d.RDMA {
		out["rdma"] = rdmaValues(d.Device)
	}
	if d.VhostNet {
		out["vhost"] = values{"net-mount": VhostNet, "tun-mount": TUN}
	}
	if len(d.Info) > 0 {
		out["extra"] = d.Info
	}
	return out
}

func rdmaValues(d pci.Device) values {
	v := values{}
	for _, node := range rdmaNodes(d) {
		for _, kind := range []string{"uverbs", "umad", "issm", "rdma_cm"} {
			if strings.Contains(node, kind) {
				v[kind] = node
			}
		}
	}
	if len(d.RDMA) > 0 {
		v["rdma_dev"] = d.RDMA[0]
	}
	return v
}

// rdmaNodes returns the files of a device's RDMA devices, and the shared file of the connection manager if the node has it.
func rdmaNodes(d pci.Device) (nodes []string) {
	for _, f := range d.RDMAFiles {
		nodes = append(nodes, "/dev/"+f)
	}
	return nodes
}

// vfioGroup returns the file of a device's IOMMU group in the container, or "". The number may change at a reboot.
func vfioGroup(d pci.Device) string {
	if d.IOMMUGroup == pci.Unknown {
		return ""
	}
	return fmt.Sprintf("/dev/vfio/%d", d.IOMMUGroup)
}

// Nodes returns the files that a container needs for a device, by their paths in the container.
func Nodes(d pool.Device) (nodes []string) {
	switch {
	case d.Driver == "vfio-pci":
		nodes = append(nodes, VFIOControl)
		if group := vfioGroup(d.Device); group != "" {
			nodes = append(nodes, group)
		}
	case len(d.UIO) > 0:
		nodes = append(nodes, "/dev/"+d.UIO[0])
	}
	if d.RDMA {
		nodes = append(nodes, rdmaNodes(d.Device)...)
	}
	if d.VhostNet {
		nodes = append(nodes, VhostNet, TUN)
	}
	return nodes
}

// Files returns the files that a container needs for devices, without duplicates, sorted by their paths in the container.
func Files(devices ...pool.Device) (out []File) {
	onHost := map[string]string{}
	for _, d := range devices {
		for _, n := range Nodes(d) {
			onHost[n] = n
		}
		if d.Driver == "vfio-pci" && d.NoIOMMU && d.IOMMUGroup != pci.Unknown { // the kernel uses another name for the group; programs know both
			onHost[vfioGroup(d.Device)] = fmt.Sprintf("/dev/vfio/noiommu-%d", d.IOMMUGroup)
		}
	}
	for _, n := range slices.Sorted(maps.Keys(onHost)) {
		out = append(out, File{Host: onHost[n], Container: n})
	}
	return out
}

// Edits returns the CDI changes for a container with devices.
func Edits(devices ...pool.Device) (edits cdi.ContainerEdits) {
	for _, f := range Files(devices...) {
		node := &cdi.DeviceNode{Path: f.Container, Permissions: "rw"}
		if f.Host != f.Container {
			node.HostPath = f.Host
		}
		edits.DeviceNodes = append(edits.DeviceNodes, node)
	}
	return edits
}
