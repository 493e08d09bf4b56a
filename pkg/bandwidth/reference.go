// SPDX-License-Identifier: Apache-2.0

package bandwidth

import (
	"errors"
	"slices"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// delReference deletes the device of an attachment without a record, which the reference plugin made. The limits on the veth pair go
// with the pair. Most pods have no limits and so no record: prevResult, when there is one, says which have a device.
func delReference(r *plugin.Request) error {
	var devices []string
	for _, hash := range attachment.KeyOf(r).ReferenceHashes(r.Plugin) {
		if name := "bwp" + hash[:12]; r.Prev == nil || slices.ContainsFunc(r.Prev.Interfaces, func(i *types100.Interface) bool { return i.Name == name }) {
			devices = append(devices, name)
		}
	}
	if len(devices) == 0 {
		return nil
	}
	host, err := kernel.Host()
	if err != nil {
		return err
	}
	defer host.Close()
	var errs []error
	for _, name := range devices {
		link, ok, err := host.Link(name)
		if err == nil && ok && link.Kind == "ifb" {
			err = host.DelLink(name)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
