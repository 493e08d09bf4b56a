// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"slices"
	"time"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/sriov"
)

// unattachedAfter is how long a device of a prepared claim may be without a pod before it is logged. The likely reason is that the node's
// CNI configuration lacks the plugin sriov.
const unattachedAfter = 2 * time.Minute

// reportUnattached counts the prepared claims with a device that no pod has attached, and logs each of these claims once.
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
				"hint", "add the plugin sriov with the resource to the node's CNI configuration; pods with hostNetwork cannot attach devices")
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

// unattached returns a device of a claim that no attachment of the claim has, or "".
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
