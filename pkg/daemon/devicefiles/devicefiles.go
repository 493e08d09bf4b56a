// SPDX-License-Identifier: Apache-2.0

// Package devicefiles returns the files in /dev that a container needs for its devices, in the formats of the Container Device
// Interface (CDI) and of the kubelet, and the environment variables that sriov-network-device-plugin sets. Only WriteSpec does I/O.
package devicefiles

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	cdi "tags.cncf.io/container-device-interface/specs-go"

	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/store"
)

// CDIVersion is the oldest version of the CDI specification with all fields used here.
const CDIVersion = "0.5.0"

// Device files that several devices share.
const (
	VFIOControl = "/dev/vfio/vfio"
	VhostNet    = "/dev/vhost-net"
	TUN         = "/dev/net/tun"
)

// File is a device file's path on the node and in the container.
type File struct{ Host, Container string }

// driverInfo is the properties of a device for one kind of driver, under the keys of sriov-network-device-plugin.
type driverInfo map[string]string

// Variables returns the environment variables for a container with devices of a resource: PCIDEVICE_EXAMPLE_COM_FAST has their PCI
// addresses, PCIDEVICE_EXAMPLE_COM_FAST_INFO their device files.
func Variables(resource string, devices []pool.Device) (map[string]string, error) {
	var ids []string
	info := map[string]map[string]driverInfo{}
	for _, d := range devices {
		ids = append(ids, d.Address.String())
		info[d.Address.String()] = infoOf(d)
	}
	text, err := json.Marshal(info)
	if err != nil {
		return nil, err
	}
	name := variableName(resource)
	return map[string]string{name: strings.Join(ids, ","), name + "_INFO": string(text)}, nil
}

// variableName returns the environment variable of a resource: PCIDEVICE_EXAMPLE_COM_FAST for example.com/fast. Hyphens stay as in
// sriov-network-device-plugin, although a shell cannot read such a variable.
func variableName(resource string) string {
	return "PCIDEVICE_" + strings.ToUpper(strings.NewReplacer(".", "_", "/", "_").Replace(resource))
}

// infoOf returns the properties of a device, grouped by kind of driver.
func infoOf(d pool.Device) map[string]driverInfo {
	out := map[string]driverInfo{"generic": {"deviceID": d.Address.String()}}
	switch {
	case d.Driver == "vfio-pci":
		out["vfio"] = driverInfo{"mount": VFIOControl}
		if group := vfioGroup(d.Device); group != "" {
			out["vfio"]["dev-mount"] = group
		}
	case len(d.UIO) > 0:
		out["uio"] = driverInfo{"mount": "/dev/" + d.UIO[0]}
	}
	if d.RDMA {
		out["rdma"] = rdmaValues(d.Device)
	}
	if d.VhostNet {
		out["vhost"] = driverInfo{"net-mount": VhostNet, "tun-mount": TUN}
	}
	if len(d.Info) > 0 {
		out["extra"] = d.Info
	}
	return out
}

func rdmaValues(d pci.Device) driverInfo {
	v := driverInfo{}
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

// rdmaNodes returns the files of a device's RDMA devices, and that of the RDMA connection manager, which they share, if the node has
// one.
func rdmaNodes(d pci.Device) (nodes []string) {
	for _, f := range d.RDMAFiles {
		nodes = append(nodes, "/dev/"+f)
	}
	return nodes
}

// vfioGroup returns the file of the device's IOMMU group in the container, or "" for none. The group's number may change when the node
// reboots.
func vfioGroup(d pci.Device) string {
	if d.IOMMUGroup == pci.Unknown {
		return ""
	}
	return fmt.Sprintf("/dev/vfio/%d", d.IOMMUGroup)
}

// Nodes returns the device files that a container needs for one device, by their paths in the container.
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

// Files returns the device files that a container needs for devices, without duplicates and sorted by the path in the container.
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

// Edits returns the changes, as CDI, that the runtime makes to a container with the devices.
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

// WriteSpec writes a CDI specification only if its content has changed, because the runtime reads all specifications again after each
// write.
func WriteSpec(dir *store.Dir, name string, spec cdi.Spec) error {
	data, err := json.MarshalIndent(spec, "", "  ")
	if err != nil {
		return err
	}
	if now, err := dir.Read(name); err == nil && bytes.Equal(now, data) {
		return nil
	}
	return dir.Write(name, data, 0o644)
}
