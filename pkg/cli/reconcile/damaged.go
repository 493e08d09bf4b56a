// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"slices"

	"github.com/podlace/podlace/pkg/attachment"
)

// AddDamaged adds unreadable records to the attachments. Of one with neither a readable record nor a lease, only the network is known.
func AddDamaged(list []*Attachment, damaged []attachment.Damaged) []*Attachment {
	for _, d := range damaged {
		at := slices.IndexFunc(list, func(a *Attachment) bool {
			return d.Of(a.Key())
		})
		if at < 0 {
			at, list = len(list), append(list, &Attachment{Network: d.Network, State: Unknown, Holders: []string{d.Plugin()}})
		}
		list[at].Damaged = append(list[at].Damaged, Damaged{d.Path(), d.Reason.Error()})
	}
	return list
}
