// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"fmt"

	"github.com/podlace/podlace/pkg/pci"
)

// vfsOf returns the VFs that pods cannot use while a claim has the device: those of a PF that is offered as a whole, or none.
func (i Inventory) vfsOf(p plannedDevice) (vfs []pci.Address) {
	if p.Whole == 0 || p.Admin {
		return nil
	}
	for _, d := range i.Snapshot.VFs(p.Address) {
		vfs = append(vfs, d.Address)
	}
	return vfs
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
