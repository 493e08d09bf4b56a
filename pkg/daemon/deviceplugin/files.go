// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"path/filepath"
	"slices"
	"strings"

	cdi "tags.cncf.io/container-device-interface/specs-go"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/devicefiles"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/poddevices"
	"github.com/podlace/podlace/pkg/store"
)

// deviceFolders are the folders in which other programs look for the daemon's files about devices.
type deviceFolders struct {
	info string // device-info files (Network Plumbing Working Group), for programs that attach the device, such as Multus
	cdi  string // CDI specifications, for the runtime
}

// infoName returns the name of a device-info file: resource and device ID with hyphens, as the device-info specification requires.
func infoName(resource, id string) string {
	return strings.ReplaceAll(resource, "/", "-") + "-" + id + "-device.json"
}

// writeInfo writes the device-info files of devices, before the daemon allocates them.
func (f deviceFolders) writeInfo(resource string, devices []pool.Device) error {
	if f.info == "" || len(devices) == 0 {
		return nil
	}
	dir, err := store.Make(f.info, 0o755)
	if err != nil {
		return fmt.Errorf("device-info files: %w", err)
	}
	defer dir.Close()
	for _, d := range devices {
		net := ""
		if d.VhostNet {
			net = devicefiles.VhostNet
		}
		if err := dir.Write(infoName(resource, d.Address.String()), d.Device.Info(net), 0o644); err != nil {
			return fmt.Errorf("device-info files: %w", err)
		}
	}
	return nil
}

// cdiClass is the CDI class of all devices, the same as in sriov-network-device-plugin.
const cdiClass = "net-pci"

// cdiKind returns the CDI kind of a resource. Resources with the same prefix share it, but no device name, because each device belongs
// to one resource.
func cdiKind(resource string) string {
	prefix, _, _ := strings.Cut(resource, "/")
	return prefix + "/" + cdiClass
}

func cdiName(resource, id string) string { return cdiKind(resource) + "=" + id }

// cdiAnnotations returns the annotation that passes the devices to the runtime (CDI specification, "Annotations"). Its key is unique
// because it contains the ID of the first device; the key's name part may have at most 63 characters.
func cdiAnnotations(resource string, ids []string) map[string]string {
	var names []string
	for _, id := range ids {
		names = append(names, cdiName(resource, id))
	}
	return map[string]string{"cdi.k8s.io/podlace_" + strings.ReplaceAll(ids[0], ":", "-"): strings.Join(names, ",")}
}

const cdiPrefix = "podlace-"

// cdiFile returns the file of a resource's CDI specification. It is the same for all instances of the daemon, so that the runtime never
// finds a device in two files.
func cdiFile(resource string) string {
	return cdiPrefix + strings.ReplaceAll(resource, "/", "_") + ".json"
}

// publish writes the CDI specifications of pools and deletes those of removed resources. It keeps the entries of lost devices, which
// the runtime needs to restart their containers.
func (f deviceFolders) publish(pools []pool.Pool, lost map[string][]poddevices.Device) error {
	if f.cdi == "" {
		return nil
	}
	dir, err := store.Make(f.cdi, 0o755)
	if err != nil {
		return fmt.Errorf("CDI: %w", err)
	}
	defer dir.Close()
	wanted := map[string]cdi.Spec{}
	var errs []error
	for _, p := range pools {
		name := cdiFile(p.Name)
		written := readSpec(dir, name)
		spec := cdi.Spec{Version: devicefiles.CDIVersion, Kind: cdiKind(p.Name), Devices: cdiDevices(p.Devices)}
		for _, h := range lost[p.Name] {
			spec.Devices = append(spec.Devices, findByName(written, h.ID)...)
		}
		if len(spec.Devices) == 0 {
			continue // CDI does not allow a specification without devices
		}
		wanted[name] = spec
		// Devices that move to another resource first leave the old file, so that none is ever in two.
		less := written
		less.Devices = slices.DeleteFunc(slices.Clone(written.Devices), func(d cdi.Device) bool { return len(findByName(spec, d.Name)) == 0 })
		if len(less.Devices) < len(written.Devices) && len(less.Devices) > 0 {
			errs = append(errs, devicefiles.WriteSpec(dir, name, less))
		} else if len(less.Devices) < len(written.Devices) {
			errs = append(errs, dir.Remove(name))
		}
	}
	names, err := dir.List()
	errs = append(errs, err)
	for _, name := range names {
		if _, ok := wanted[name]; !ok && strings.HasPrefix(name, cdiPrefix) && strings.HasSuffix(name, ".json") {
			errs = append(errs, dir.Remove(name))
		}
	}
	for _, name := range slices.Sorted(maps.Keys(wanted)) {
		errs = append(errs, devicefiles.WriteSpec(dir, name, wanted[name]))
	}
	return errors.Join(errs...)
}

// readSpec reads a CDI specification, empty if the file is unreadable.
func readSpec(dir *store.Dir, name string) (spec cdi.Spec) {
	data, err := dir.Read(name)
	if err != nil || json.Unmarshal(data, &spec) != nil {
		return cdi.Spec{}
	}
	return spec
}

// findByName returns the device of this name in a CDI specification as a list of one, or an empty list.
func findByName(spec cdi.Spec, name string) []cdi.Device {
	i := slices.IndexFunc(spec.Devices, func(d cdi.Device) bool { return d.Name == name })
	if i < 0 {
		return nil
	}
	return spec.Devices[i : i+1]
}

// cdiDevices returns the CDI entries for those devices of a pool that have device files.
func cdiDevices(devices []pool.Device) (list []cdi.Device) {
	for _, d := range devices {
		if edits := devicefiles.Edits(d); len(edits.DeviceNodes) > 0 {
			list = append(list, cdi.Device{Name: d.Address.String(), ContainerEdits: edits})
		}
	}
	return list
}

// hasCDI reports whether another program has written CDI specifications on the node, which suggests that the runtime reads them.
func (f deviceFolders) hasCDI() bool {
	for _, kind := range []string{"*.json", "*.yaml"} {
		names, _ := filepath.Glob(filepath.Join(f.cdi, kind))
		if slices.ContainsFunc(names, func(path string) bool {
			name := filepath.Base(path)
			return !strings.HasPrefix(name, ".") && !strings.HasPrefix(name, cdiPrefix) && !strings.HasPrefix(name, claim.Driver)
		}) {
			return true
		}
	}
	return false
}
