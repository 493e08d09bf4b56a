// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"fmt"
	"path/filepath"
	"slices"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/bandwidth"
	"github.com/podlace/podlace/pkg/bridge"
	"github.com/podlace/podlace/pkg/hostlocal"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/portmap"
	"github.com/podlace/podlace/pkg/sriov"
)

// Objects returns a line for each kernel object in a plugin's record of an attachment.
func Objects(rec attachment.Record) ([]string, error) {
	switch rec.Plugin {
	case "bridge":
		return bridge.Objects(rec)
	case "portmap":
		return portmap.Objects(rec)
	case "bandwidth":
		return bandwidth.Objects(rec)
	case "sriov":
		return sriov.Objects(rec)
	}
	return nil, nil
}

// LeaseFiles returns a line for each host-local lease of an attachment, from the same folders as List.
func LeaseFiles(networks []Network, key attachment.Key) (lines []string, err error) {
	for path := range leaseFolders(networks) {
		if filepath.Base(path) != key.Network {
			continue
		}
		leases, err := hostlocal.Leases(path)
		if err != nil {
			return nil, err
		}
		for _, a := range leases[plugin.Attachment{ContainerID: key.ContainerID, IfName: key.IfName}].Addresses {
			lines = append(lines, fmt.Sprintf("lease %s", filepath.Join(path, a.String())))
		}
	}
	slices.Sort(lines)
	return lines, nil
}
