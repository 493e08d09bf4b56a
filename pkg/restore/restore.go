// SPDX-License-Identifier: Apache-2.0

// Package restore brings back what other programs removed from the pods' network, such as flushed rules, from the records of all
// attachments. All compares once, for 'podlace reload'; Watch compares whenever the kernel reports a removal, for 'podlace reload --watch'
// and podlace-node.
package restore

import (
	"errors"
	"fmt"
	"log/slog"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/bandwidth"
	"github.com/podlace/podlace/pkg/bridge"
	"github.com/podlace/podlace/pkg/hostlocal"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/portmap"
)

// All restores what is missing of all attachments: first the rules that protect pods and node. It waits for the locks of running plugins.
// An error does not stop the rest.
func All(log *slog.Logger) error {
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
