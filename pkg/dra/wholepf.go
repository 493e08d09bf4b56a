// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"fmt"
	"slices"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/sriov"
)

// vfsOf returns the VFs that a device excludes: those of a PF that is given out whole.
func (i Inventory) vfsOf(p planned) (vfs []pci.Address) {
	if p.Whole == 0 || p.Admin || i.Snapshot == nil {
		return nil
	}
	for _, d := range i.Snapshot.VFs(p.Address) {
		vfs = append(vfs, d.Address)
	}
	return vfs
}

// excluded returns an error if another claim has the PF of a VF whole, or a pod has a VF of a PF by the device plugin API. The scheduler
// sees to that by counters, until a pod is deleted by force.
func (d *Driver) excluded(p plan, records []claim.Record) error {
	for _, dev := range p.devices {
		if dev.Admin {
			continue
		}
		i := slices.IndexFunc(records, func(r claim.Record) bool { return r.Claim().UID != dev.UID && r.Has(dev.PF.String()) })
		if dev.IsVF() && i >= 0 {
			return fmt.Errorf("VF %s: its PF %s is still of %s (uid %s): its pod has not ended", dev.Address, dev.PF, records[i],
				records[i].Claim().UID)
		}
		for _, vf := range dev.vfs {
			if why := d.inUse(vf); why != "" {
				return fmt.Errorf("PF %s: its VF %s %s", dev.Address, vf, why)
			}
		}
	}
	return nil
}

func (d *Driver) inUse(a pci.Address) string {
	if d.options.InUse == nil {
		return ""
	}
	return d.options.InUse(a.String())
}

// settleVFs makes sure that no attachment has a VF of a PF, or left it other than it was.
func (d *Driver) settleVFs(dev planned) error {
	for _, vf := range dev.vfs {
		if err := sriov.Settle(d.options.Sysfs, vf, "", d.options.Log); err != nil {
			return err
		}
	}
	return nil
}

// takeVFs takes the VFs of a PF away that is given out whole. The daemon makes them again when the PF is free.
func (d *Driver) takeVFs(ctx context.Context, dev planned) error {
	if dev.Whole == 0 || dev.Admin {
		return nil
	}
	now, err := pci.Inspect(d.options.Sysfs, dev.Address)
	if err != nil || now.NumVFs == 0 {
		return err
	}
	if err := pci.SetNumVFs(ctx, d.options.Sysfs, dev.Address, 0); err != nil {
		return fmt.Errorf("PF %s keeps its VFs: %w", dev.Address, err)
	}
	d.options.Log.Info("a PF has no VFs while a claim has it", "pf", dev.Address.String(), "claim", dev.Namespace+"/"+dev.Name)
	return nil
}
