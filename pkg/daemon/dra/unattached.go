// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"cmp"
	"errors"
	"slices"
	"time"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/sriov"
)

// unattachedAfter is how long after Prepare a claim with unattached devices is logged. The usual cause is that plugin sriov is missing
// from the node's CNI configuration.
const unattachedAfter = 2 * time.Minute

var errUnattached = errors.New("no pod has attached a device of a prepared claim")

// findUnattached counts and logs the prepared claims with an unattached device. A device is unattached if no pod has attached it.
func (c *collector) findUnattached(now time.Time) {
	records, _ := c.records.List() // collect() logs the error
	held, err := sriov.Holdings()
	if err != nil {
		return // collect() logs the error
	}
	count, unattached := 0, map[string]time.Time{}
	for _, r := range records {
		device, uid := c.unattachedDevice(r, held), r.Claim().UID
		if device == "" {
			continue
		}
		unattached[uid] = cmp.Or(c.unattached[uid], now)
		if now.Sub(unattached[uid]) < unattachedAfter {
			continue
		}
		count++
		if c.failures.isDue("unattached "+uid, errUnattached, now) {
			c.options.Log.Warn(errUnattached.Error(), "claim", r.String(), "uid", uid, "device", device,
				"hint", "add the plugin sriov with the resource to the node's CNI configuration; pods with hostNetwork cannot attach devices")
		}
	}
	c.unattached = unattached
	c.count.unattached.Set(float64(count))
}

// unattachedDevice returns a device of a claim that no pod of the claim has attached, or "". One with a user space driver counts as
// attached, because a pod may use it without plugin sriov.
func (c *collector) unattachedDevice(r claim.Record, held []sriov.Holding) string {
	for _, dev := range r.Devices {
		if r.State == claim.Prepared && !dev.Claim.Admin && !c.inUserspace(dev.ID) && !slices.ContainsFunc(held, func(h sriov.Holding) bool {
			return h.Address.String() == dev.ID && h.Claim != nil && h.Claim.UID == dev.Claim.UID
		}) {
			return dev.ID
		}
	}
	return ""
}

// inUserspace reports whether a device has a user space driver, such as vfio-pci.
func (c *collector) inUserspace(id string) bool {
	address, err := pci.ParseAddress(id)
	dev, ok := c.latestInventory().Snapshot.Device(address)
	return err == nil && ok && pci.IsUserspace(dev.Driver)
}
