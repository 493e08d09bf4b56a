// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"fmt"
	"slices"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/pci"
)

// vfsOf returns the VFs that pods cannot use while a claim has the device. The list is empty for all devices except a PF that is offered as
// a whole.
func (i Inventory) vfsOf(p plannedDevice) (vfs []pci.Address) {
	if p.Whole == 0 || p.Admin {
		return nil
	}
	for _, d := range i.Snapshot.VFs(p.Address) {
		vfs = append(vfs, d.Address)
	}
	return vfs
}

// checkExcluded returns an error in two cases. In the first case, the plan contains a VF, and another claim has the whole PF of the VF. In
// the second case, the plan contains a whole PF, and a pod has a VF of the PF through the device plugin API. Normally, the scheduler
// prevents both conflicts with the counters of the PF. The conflicts can occur after a pod was deleted by force.
func (d *Driver) checkExcluded(p claimPlan, records []claim.Record) error {
	for _, dev := range p.devices {
		if dev.Admin {
			continue
		}
		i := slices.IndexFunc(records, func(r claim.Record) bool { return r.Claim().UID != dev.UID && r.Has(dev.PF.String()) })
		if dev.IsVF() && i >= 0 {
			return fmt.Errorf("VF %s: its PF %s still belongs to %s (uid %s), whose pod has not ended", dev.Address, dev.PF, records[i],
				records[i].Claim().UID)
		}
		for _, vf := range dev.vfs {
			if why := d.options.InUse(vf.String()); why != "" {
				return fmt.Errorf("PF %s: its VF %s %s", dev.Address, vf, why)
			}
		}
	}
	return nil
}

// removeVFs removes the VFs of a PF that is offered as a whole. The daemon creates the VFs again when the PF is free.
func (d *Driver) removeVFs(ctx context.Context, dev plannedDevice) error {
	if dev.Whole == 0 || dev.Admin {
		return nil
	}
	now, err := pci.Inspect(d.options.Sysfs, dev.Address)
	if err != nil || now.NumVFs == 0 {
		return err
	}
	if now.NumVFs != len(dev.vfs) { // a VF that was unknown is neither locked nor checked
		return fmt.Errorf("PF %s has %d VFs, and the last scan found %d: Prepare must be repeated after the next scan", dev.Address, now.NumVFs,
			len(dev.vfs))
	}
	if err := pci.SetNumVFs(ctx, d.options.Sysfs, dev.Address, 0); err != nil {
		return fmt.Errorf("remove the VFs of PF %s: %w", dev.Address, err)
	}
	d.options.Log.Info("removed the VFs of a PF for a claim", "pf", dev.Address.String(), "claim", dev.Namespace+"/"+dev.Name)
	return nil
}
