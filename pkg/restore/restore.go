// SPDX-License-Identifier: Apache-2.0

// Package restore brings back what other programs removed from the pods' network, such as flushed rules, from the records of all
// attachments. All compares once, for 'podlace reload'; Watch compares whenever the kernel reports a removal, for 'podlace reload --watch'
// and podlace-node.
package restore

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/bandwidth"
	"github.com/podlace/podlace/pkg/bridge"
	"github.com/podlace/podlace/pkg/hostlocal"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/portmap"
)

// All restores what is missing of all attachments: first the rules that protect pods and node. It waits for the locks of running plugins.
// An error does not stop the rest. It changes nothing if the process cannot see the pods' namespaces, because all pods would look dead.
func All(log *slog.Logger) error {
	records, _, err := attachment.Scan()
	if err != nil {
		return err
	}
	for _, rec := range records {
		if !plugin.NetnsVisible(rec.Netns) {
			return fmt.Errorf("nothing is restored: this container does not see the namespace %s of %s", rec.Netns, cmp.Or(rec.Pod, rec.ContainerID))
		}
	}
	host, err := kernel.Host()
	if err != nil {
		return err
	}
	defer host.Close()
	unrecorded, err := bridge.UnrecordedPorts(host)
	if err == nil && len(unrecorded) > 0 {
		err = fmt.Errorf("the rules and limits of %d pods cannot be restored, because their records below /run/podlace are lost: "+
			"delete these pods, so that their controllers create new ones (podlace doctor ports names their interfaces)", len(unrecorded))
	}
	return errors.Join(err, bridge.RenewClusterCIDRs(log), bridge.Restore(host, log, attachment.Waiting), portmap.Restore(host, log),
		bandwidth.Restore(host, log), hostlocal.Restore(log))
}
