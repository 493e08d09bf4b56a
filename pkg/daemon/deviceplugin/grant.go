// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"log/slog"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/podlace/podlace/pkg/daemon/devicefiles"
	"github.com/podlace/podlace/pkg/daemon/pool"
)

// deviceGrant is how containers get the devices of a resource: through CDI or the kubelet.
type deviceGrant struct {
	cdi   pool.CDI // how containers get device files; never CDIAuto
	files deviceFolders
}

// containerResponse returns the environment variables, device files and CDI devices that a container needs.
func (g deviceGrant) containerResponse(resource string, devices []pool.Device) (*pluginapi.ContainerAllocateResponse, error) {
	var injected []string
	for _, d := range devices {
		if len(devicefiles.Nodes(d)) > 0 {
			injected = append(injected, d.Address.String())
		}
	}
	variables, err := devicefiles.Variables(resource, devices)
	if err != nil {
		return nil, err
	}
	out := &pluginapi.ContainerAllocateResponse{Envs: variables}
	if err := g.files.writeInfo(resource, devices); err != nil { // the pod works without them
		slog.Warn("could not write device-info files: the pod starts, but programs that read them do not see its devices", "resource", resource, "error", err)
	}
	switch {
	case len(injected) == 0:
	case g.cdi == pool.CDIOff:
		out.Devices = deviceSpecs(devices...)
	case g.cdi == pool.CDIField:
		for _, id := range injected {
			out.CdiDevices = append(out.CdiDevices, &pluginapi.CDIDevice{Name: cdiName(resource, id)})
		}
	case g.cdi == pool.CDIAnnotation:
		out.Annotations = cdiAnnotations(resource, injected)
	}
	return out, nil
}

// deviceSpecs returns device files in the kubelet's format, without duplicates.
func deviceSpecs(devices ...pool.Device) (out []*pluginapi.DeviceSpec) {
	for _, f := range devicefiles.Files(devices...) {
		out = append(out, &pluginapi.DeviceSpec{HostPath: f.Host, ContainerPath: f.Container, Permissions: "rw"})
	}
	return out
}
