// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"slices"
	"time"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/sriov"
)

// unattachedAfter is how long no pod may have a device of a prepared claim before the claim is logged: the CNI configuration of the node
// may lack the plugin sriov.
const unattachedAfter = 2 * time.Minute

// reportUnattached counts the devices of prepared claims that no pod has attached, and logs each of these claims once.
func (c *collector) reportUnattached(records []claim.Record, held []sriov.Holding, now time.Time) {
	count := 0
	since := map[string]time.Time{}
	for _, r := range records {
		device := unattached(r, held)
		if device == "" {
			continue
		}
		uid := r.Claim().UID
		began, known := c.unattached[uid]
		if !known {
			began = now
		}
		since[uid] = began
		if now.Sub(began) < unattachedAfter {
			continue
		}
		count++
		if !c.warned[uid] {
			c.warned[uid] = true
			c.options.Log.Warn("no pod has attached a device of a prepared claim", "claim", r.String(), "uid", uid, "device", device,
				"hint", "the CNI configuration of the node must have the plugin sriov with the resource; pods with hostNetwork attach nothing")
		}
	}
	for uid := range c.warned {
		if _, still := since[uid]; !still {
			delete(c.warned, uid)
		}
	}
	c.unattached = since
	c.count.unattached.Set(float64(count))
}

// unattached returns a device that a claim owns and that no attachment of the claim has, "" for none.
func unattached(r claim.Record, held []sriov.Holding) string {
	for _, dev := range r.Devices {
		if r.State == claim.Prepared && !dev.Claim.Admin && !slices.ContainsFunc(held, func(h sriov.Holding) bool {
			return h.Address.String() == dev.ID && h.Claim != nil && h.Claim.UID == dev.Claim.UID
		}) {
			return dev.ID
		}
	}
	return ""
}
