// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	cdi "tags.cncf.io/container-device-interface/specs-go"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/devicefiles"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/store"
)

const cdiKind = "podlace.io/vf"

func cdiFile(uid string) string { return claim.Driver + "-" + uid + ".json" }

// cdiDevice returns the name of a request's CDI device, without the slash of a subrequest, which CDI does not allow.
func cdiDevice(uid, request string) string { return uid + "-" + strings.ReplaceAll(request, "/", ".") }

// cdiName returns the qualified name of a request's CDI device.
func cdiName(uid, request string) string { return cdiKind + "=" + cdiDevice(uid, request) }

// cdiSpecification returns the CDI specification of a claim, with one CDI device for each request. Devices with administrative access
// are listed without their files.
func cdiSpecification(p claimPlan) (cdi.Spec, error) {
	spec := cdi.Spec{Version: devicefiles.CDIVersion, Kind: cdiKind}
	var requests []string
	for _, dev := range p.devices {
		if !slices.Contains(requests, dev.Request) {
			requests = append(requests, dev.Request)
		}
	}
	for _, request := range requests {
		edits, err := editsOf(p, request)
		if err != nil {
			return cdi.Spec{}, err
		}
		spec.Devices = append(spec.Devices, cdi.Device{Name: cdiDevice(p.devices[0].UID, request), ContainerEdits: edits})
	}
	return spec, nil
}

// editsOf returns the container edits of a request: its device files, and environment variables with the devices of all requests of the
// claim. They are the same in all its CDI devices, because the runtime uses the last value of a variable.
func editsOf(p claimPlan, request string) (cdi.ContainerEdits, error) {
	of, files := map[string][]pool.Device{}, []pool.Device{} // by resource
	for _, dev := range p.devices {
		if dev.Request != request {
			continue
		}
		of[dev.resource] = nil
		if !dev.Admin {
			files = append(files, dev.Device)
		}
	}
	for _, dev := range p.devices {
		if _, has := of[dev.resource]; has {
			of[dev.resource] = append(of[dev.resource], dev.Device)
		}
	}
	edits := devicefiles.Edits(files...)
	for _, resource := range slices.Sorted(maps.Keys(of)) {
		variables, err := devicefiles.Variables(resource, of[resource])
		if err != nil {
			return edits, err
		}
		for _, name := range slices.Sorted(maps.Keys(variables)) {
			edits.Env = append(edits.Env, name+"="+variables[name])
		}
	}
	return edits, nil
}

// writeCDI writes the CDI specification of a claim if it has changed. The file stays until the claim ends, because the kubelet does not
// prepare the claim again when a container restarts.
func (d *Driver) writeCDI(p claimPlan) error {
	if d.options.CDI == "" {
		return nil
	}
	spec, err := cdiSpecification(p)
	if err != nil {
		return err
	}
	dir, err := store.Make(d.options.CDI, 0o755)
	if err != nil {
		return fmt.Errorf("CDI: %w", err)
	}
	defer dir.Close()
	return devicefiles.WriteSpec(dir, cdiFile(p.devices[0].UID), spec)
}

// removeCDI deletes the CDI specification of a claim. It has no effect if the specification does not exist.
func (d *Driver) removeCDI(uid string) error {
	if d.options.CDI == "" {
		return nil
	}
	if err := os.Remove(filepath.Join(d.options.CDI, cdiFile(uid))); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
