// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"cmp"
	"context"
	"fmt"
	"maps"
	"slices"

	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/pool"
)

// prepare brings about what the configuration wants of PFs and drivers, as far as no pod would notice: it needs to know who has devices.
// Whatever fails is told once, and tried again when something changes.
func (d *daemon) prepare(ctx context.Context) {
	d.mu.Lock()
	s, known, want := d.snapshot, d.asked, d.config.NumVFs(d.snapshot)
	pools := d.assign(d.env())
	d.mu.Unlock()
	if !known {
		return
	}
	for _, pf := range slices.SortedFunc(maps.Keys(want), pci.Address.Compare) {
		d.tell(pf, d.setNumVFs(ctx, s, pf, want[pf]))
	}
	for _, p := range pools {
		for _, dev := range p.Devices {
			if driver := p.Resource.Driver; driver != "" && driver != dev.Driver {
				d.tell(dev.Address, d.bind(ctx, dev, driver))
			}
		}
	}
}

// setNumVFs gives a PF its VFs, unless one of those that it has is in use: all of them would go.
func (d *daemon) setNumVFs(ctx context.Context, s *pci.Snapshot, pf pci.Address, n int) error {
	device, _ := s.Device(pf)
	if device.NumVFs == n {
		return nil
	}
	for _, vf := range s.VFs(pf) {
		if why := d.inUse(vf); why != "" {
			return fmt.Errorf("PF %s keeps its %d VFs and does not get %d: VF %s %s", pf, device.NumVFs, n, vf.Address, why)
		}
	}
	d.log.Info("a PF gets VFs", "pf", pf.String(), "had", device.NumVFs, "gets", n)
	return pci.SetNumVFs(ctx, d.Sysfs, pf, n)
}

func (d *daemon) bind(ctx context.Context, dev pool.Device, driver string) error {
	if why := d.inUse(dev.Device); why != "" {
		return fmt.Errorf("%s stays with driver %s and does not get %s: it %s", dev.Address, cmp.Or(dev.Driver, "none"), driver, why)
	}
	d.log.Info("a device gets another driver", "device", dev.Address.String(), "had", dev.Driver, "gets", driver)
	return pci.Bind(ctx, d.Sysfs, dev.Address, driver)
}

// inUse tells why a device must be left alone, "" if nobody has it.
func (d *daemon) inUse(dev pci.Device) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, h := range d.held {
		if h.Device == dev.Address.String() {
			return fmt.Sprintf("is of pod %s/%s", h.Namespace, h.Pod)
		}
	}
	if last, ok := d.last[dev.Address]; ok && last.Driver == dev.Driver && len(dev.Interfaces) == 0 {
		return "has its interface in another namespace"
	}
	return ""
}

// tell logs what is wrong with a device, when it is not what was wrong before.
func (d *daemon) tell(a pci.Address, err error) {
	text := ""
	if err != nil {
		text = err.Error()
	}
	if d.told[a] != text && err != nil {
		d.log.Warn("a device is not as the configuration wants it", "device", a.String(), "error", err)
	}
	d.told[a] = text
}
