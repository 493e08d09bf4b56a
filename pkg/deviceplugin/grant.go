// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/pool"
)

// grant is how a resource is handed over.
type grant struct {
	cdi   pool.CDI // how the device files get into a container; never auto
	files files
}

// values are what one kind of driver tells a container of a device, in the words of sriov-network-device-plugin.
type values map[string]string

// response tells a container of its devices.
func (g grant) response(resource string, devices []pool.Device) (*pluginapi.ContainerAllocateResponse, error) {
	var ids []string
	info := map[string]map[string]values{}
	var injected []string
	for _, d := range devices {
		id := d.Address.String()
		ids = append(ids, id)
		info[id] = describe(d)
		if len(deviceNodes(d)) > 0 {
			injected = append(injected, id)
		}
	}
	text, err := json.Marshal(info)
	if err != nil {
		return nil, err
	}
	name := variable(resource)
	out := &pluginapi.ContainerAllocateResponse{Envs: map[string]string{name: strings.Join(ids, ","), name + "_INFO": string(text)}}
	if err := g.files.describe(resource, devices); err != nil { // which a pod can do without
		slog.Warn("device-info files were not written", "resource", resource, "error", err)
	}
	switch {
	case len(injected) == 0:
	case g.cdi == pool.CDIOff:
		out.Devices = specs(devices...)
	case g.cdi == pool.CDIField:
		for _, id := range injected {
			out.CdiDevices = append(out.CdiDevices, &pluginapi.CDIDevice{Name: cdiName(resource, id)})
		}
	case g.cdi == pool.CDIAnnotation:
		out.Annotations = cdiAnnotations(resource, injected)
	}
	return out, nil
}

// variable is the name of a resource's environment variable: PCIDEVICE_EXAMPLE_COM_FAST of example.com/fast. Hyphens stay, as in
// sriov-network-device-plugin, although shells cannot read such names.
func variable(resource string) string {
	return "PCIDEVICE_" + strings.ToUpper(strings.NewReplacer(".", "_", "/", "_").Replace(resource))
}

const (
	vfioControl = "/dev/vfio/vfio"
	vhostNet    = "/dev/vhost-net"
	tun         = "/dev/net/tun"
)

// describe returns what a container is told of a device, by kind.
func describe(d pool.Device) map[string]values {
	out := map[string]values{"generic": {"deviceID": d.Address.String()}}
	switch {
	case d.Driver == "vfio-pci":
		out["vfio"] = values{"mount": vfioControl}
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
		out["vhost"] = values{"net-mount": vhostNet, "tun-mount": tun}
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

// rdmaNodes are the files of a device's RDMA devices, and that of the connection manager, which all share, where the node has it.
func rdmaNodes(d pci.Device) (nodes []string) {
	for _, f := range d.RDMAFiles {
		nodes = append(nodes, "/dev/"+f)
	}
	return nodes
}

// vfioGroup is the file of a device's IOMMU group as a container finds it, "" without one. The number may be another after a reboot.
func vfioGroup(d pci.Device) string {
	if d.IOMMUGroup == pci.Unknown {
		return ""
	}
	return fmt.Sprintf("/dev/vfio/%d", d.IOMMUGroup)
}

// deviceNodes are the files below /dev that a container needs for a device, in its words.
func deviceNodes(d pool.Device) (nodes []string) {
	switch {
	case d.Driver == "vfio-pci":
		nodes = append(nodes, vfioControl)
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
		nodes = append(nodes, vhostNet, tun)
	}
	return nodes
}

// specs asks the kubelet for the device files of devices, each once.
func specs(devices ...pool.Device) (out []*pluginapi.DeviceSpec) {
	onHost := map[string]string{}
	for _, d := range devices {
		for _, n := range deviceNodes(d) {
			onHost[n] = n
		}
		if d.Driver == "vfio-pci" && d.NoIOMMU && d.IOMMUGroup != pci.Unknown { // the kernel names the group otherwise; programs know both names
			onHost[vfioGroup(d.Device)] = fmt.Sprintf("/dev/vfio/noiommu-%d", d.IOMMUGroup)
		}
	}
	for _, n := range slices.Sorted(maps.Keys(onHost)) {
		out = append(out, &pluginapi.DeviceSpec{HostPath: onHost[n], ContainerPath: n, Permissions: "rw"})
	}
	return out
}
