// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"time"

	"github.com/podlace/podlace/pkg/dra"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/pool"
)

// retryAfter is how long a device that could not be prepared is left alone: what the kernel has not finished goes on meanwhile.
const retryAfter = 5 * time.Minute

// prepareAlways prepares devices whenever it is woken, until ctx is done. It may wait long for the kernel, and delays no other goroutine.
func (d *daemon) prepareAlways(ctx context.Context, wake <-chan struct{}) {
	failed := map[pci.Address]time.Time{}
	told := map[pci.Address]string{}
	for {
		select {
		case <-ctx.Done():
			return
		case <-wake:
		}
		d.prepare(ctx, func(a pci.Address, change func() error) {
			if at, ok := failed[a]; ok && time.Since(at) < retryAfter {
				return
			}
			delete(failed, a)
			err := change()
			if err == nil {
				delete(told, a)
				return
			}
			// Use may end, a driver be loaded and a VF made again at any moment.
			if !errors.Is(err, errInUse) && !errors.Is(err, fs.ErrNotExist) {
				failed[a] = time.Now()
			}
			if told[a] != err.Error() {
				d.log.Warn("a device is not as the configuration wants it", "device", a.String(), "error", err)
			}
			told[a] = err.Error()
		})
	}
}

var errInUse = errors.New("in use")

// prepare brings about what the configuration wants of PFs and drivers, as far as no pod would notice. Until it is known who has devices,
// only PFs without any VFs get some, if their interface is on the node.
func (d *daemon) prepare(ctx context.Context, try func(pci.Address, func() error)) {
	d.mu.Lock()
	s, known, want := d.snapshot, d.asked, d.config.NumVFs(d.snapshot)
	pools, claimable := byAPI(d.assign(d.env()))
	if d.driver != nil {
		pools = append(pools, claimable...)
	}
	may := d.mayChange()
	d.mu.Unlock()
	if !may {
		return
	}
	for _, pf := range slices.SortedFunc(maps.Keys(want), pci.Address.Compare) {
		if device, _ := s.Device(pf); device.NumVFs != want[pf] && (known || device.NumVFs == 0 && len(device.Interfaces) > 0) {
			try(pf, func() error { return d.setNumVFs(ctx, s, pf, want[pf]) })
		}
	}
	for _, p := range pools {
		for _, dev := range p.Devices {
			if driver := p.Resource.Driver; known && dev.Whole == 0 && driver != "" && driver != dev.Driver {
				try(dev.Address, func() error { return d.bind(ctx, dev, driver) })
			}
		}
	}
}

// mayChange reports whether this instance changes devices. Where pods get devices by claims, that is the instance that leads, and each one
// while the driver of claims cannot start. The caller has the lock.
func (d *daemon) mayChange() bool {
	if d.driver != nil {
		return d.driver.Leads()
	}
	claims := slices.ContainsFunc(d.config.Resources, func(r pool.Resource) bool { return r.API == pool.DRA }) ||
		slices.ContainsFunc(d.held, byClaim)
	return !claims || d.driverFault != ""
}

// change changes devices that no pod has, and that no other instance of the daemon is about to give to a claim or to change.
func (d *daemon) change(devices []pci.Address, check, change func() error) error {
	unlock, err := dra.LockDevices(d.Claims, devices)
	if err != nil {
		return fmt.Errorf("%w: %w", errInUse, err)
	}
	defer unlock()
	var ids []string
	for _, a := range devices {
		ids = append(ids, a.String())
	}
	return d.gate.change(ids, check, change)
}

// setNumVFs gives a PF its VFs, unless a pod has the PF, or one of its VFs is in use: all of them would go.
func (d *daemon) setNumVFs(ctx context.Context, s *pci.Snapshot, pf pci.Address, n int) error {
	device, _ := s.Device(pf)
	vfs := s.VFs(pf)
	devices := []pci.Address{pf}
	for _, vf := range vfs {
		devices = append(devices, vf.Address)
	}
	err := d.change(devices, func() error {
		if why := d.withPod(device); why != "" {
			return fmt.Errorf("PF %s does not get %d VFs, %w: it %s", pf, n, errInUse, why)
		}
		for _, vf := range vfs {
			if why := d.inUse(vf); why != "" {
				return fmt.Errorf("PF %s keeps its %d VFs and does not get %d, %w: VF %s %s", pf, device.NumVFs, n, errInUse, vf.Address, why)
			}
		}
		return nil
	}, func() error { return pci.SetNumVFs(ctx, d.Sysfs, pf, n) })
	if err == nil {
		d.log.Info("a PF has another number of VFs", "pf", pf.String(), "had", device.NumVFs, "has", n)
	}
	return err
}

func (d *daemon) bind(ctx context.Context, dev pool.Device, driver string) error {
	err := d.change([]pci.Address{dev.Address}, func() error {
		if why := d.inUse(dev.Device); why != "" {
			return fmt.Errorf("%s stays with driver %s and does not get %s, %w: it %s", dev.Address, cmp.Or(dev.Driver, "none"), driver, errInUse,
				why)
		}
		return nil
	}, func() error { return pci.Bind(ctx, d.Sysfs, dev.Address, driver) })
	if err == nil {
		d.log.Info("a device has another driver", "device", dev.Address.String(), "had", dev.Driver, "has", driver)
	}
	return err
}

// inUse returns why a device must be left alone, "" if no pod has it.
func (d *daemon) inUse(dev pci.Device) string {
	if why := d.withPod(dev); why != "" {
		return why
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.uplink(dev)
}

// uplink returns that a device is a link of the node's own, or "".
func (d *daemon) uplink(dev pci.Device) string {
	for _, name := range dev.Interfaces {
		if slices.Contains(d.uplinks, name) {
			return fmt.Sprintf("is the node's own link %s", name)
		}
	}
	return ""
}

// withPod returns which pod or namespace has a device, "" if none has.
func (d *daemon) withPod(dev pci.Device) string {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.mergeUnlisted()
	for _, h := range d.held {
		switch {
		case h.ID != dev.Address.String():
		case h.Claim != nil:
			return fmt.Sprintf("is of claim %s/%s", h.Claim.Namespace, h.Claim.Name)
		default:
			return fmt.Sprintf("is of pod %s/%s", h.Namespace, h.Pod)
		}
	}
	if d.unreadClaims != nil {
		return fmt.Sprintf("may be of a claim: %v", d.unreadClaims)
	}
	if d.leaked(dev) {
		return "has its interface in another namespace"
	}
	return ""
}
