// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"errors"
	"fmt"
	"slices"

	"github.com/podlace/podlace/pkg/bandwidth"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/reference"
)

// mayBeReference reports whether the reference plugins may have made the attachment in this boot, since only its addresses are known.
func (a *Attachment) mayBeReference() bool {
	return !a.earlier && !slices.ContainsFunc(a.Holders, func(holder string) bool { return holder != hostLocal })
}

// removeUnrecorded removes what the reference plugins made for dead attachments whose leases the plan releases: first, because a hostPort
// would otherwise lead to the next pod with the address. Attachments for which it fails are kept.
func (p Plan) removeUnrecorded(list []*Attachment) (kept map[*Attachment]bool, err error) {
	if !slices.ContainsFunc(p.Run, func(pl Plugin) bool { return pl.has(hostLocal) }) {
		return nil, nil
	}
	host, err := kernel.Host()
	if err != nil {
		return nil, err
	}
	defer host.Close()
	kept = map[*Attachment]bool{}
	errs := []error(nil)
	for _, a := range Dead(list) {
		if a.Network != p.Network.Name || !a.mayBeReference() {
			continue
		}
		ports := reference.Unrecorded(a.Key(), "portmap")
		ports.Addresses = a.Addresses
		err := errors.Join(reference.Portmap(ports).Remove(), reference.Bridge(reference.Unrecorded(a.Key(), "bridge")).Remove(),
			bandwidth.RemoveUnrecorded(host, a.Key()))
		if err != nil {
			kept[a] = true
			errs = append(errs, fmt.Errorf("network %s: container %s is kept, with its addresses: %w", a.Network, a.ContainerID, err))
		}
	}
	return kept, errors.Join(errs...)
}
