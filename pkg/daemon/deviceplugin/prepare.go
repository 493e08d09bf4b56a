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

	"github.com/podlace/podlace/pkg/daemon/dra"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/pci"
)

// retryAfter is the pause after the daemon failed to change a device. During the pause, the kernel may complete pending work.
const retryAfter = 5 * time.Minute

// prepareLoop runs prepareDevices at each value from wake until ctx is done. It has its own goroutine, because the kernel may take long
// to change a device.
func (d *daemon) prepareLoop(ctx context.Context, wake <-chan struct{}) {
	failed := map[pci.Address]time.Time{}
	logged := map[pci.Address]string{}
	for {
		select {
		case <-ctx.Done():
			return
		case <-wake:
		}
		d.prepareDevices(ctx, func(a pci.Address, change func() error) {
			if at, ok := failed[a]; ok && time.Since(at) < retryAfter {
				return
			}
			delete(failed, a)
			err := change()
			if err == nil {
				delete(logged, a)
				return
			}
			// These two cause no pause, because a device may become free, a driver be loaded or a VF appear at any time.
			if !errors.Is(err, errInUse) && !errors.Is(err, fs.ErrNotExist) {
				failed[a] = time.Now()
			}
			if logged[a] != err.Error() {
				d.log.Warn("could not configure a device as requested; retrying", "device", a.String(), "error", err)
			}
			logged[a] = err.Error()
		})
	}
}

var errInUse = errors.New("in use")

// prepareDevices sets the configured number of VFs on each PF and binds the configured drivers, but only of devices that no pod uses.
// While the devices of pods are unknown, it only creates VFs on a PF that has none and whose interface is on the node.
func (d *daemon) prepareDevices(ctx context.Context, try func(pci.Address, func() error)) {
	d.mu.Lock()
	s, known, want := d.snapshot, d.answered, d.config.NumVFs(d.snapshot)
	pools, claimable := byAPI(d.assignPools(d.poolEnv()))
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

// mayChange reports whether this instance may change devices. With claims, only the leader may, once the DRA driver has started;
// without claims, or if the driver cannot start, every instance may. The caller holds d.mu.
func (d *daemon) mayChange() bool {
	if d.driver != nil {
		return d.driver.Leads()
	}
	claims := slices.ContainsFunc(d.config.Resources, func(r pool.Resource) bool { return r.API == pool.DRA }) ||
		slices.ContainsFunc(d.held, byClaim)
	return !claims || d.driverFault != ""
}

// changeDevices calls change for devices that no pod has. Locks keep other instances from changing them or assigning them to a claim
// meanwhile.
func (d *daemon) changeDevices(devices []pci.Address, check, change func() error) error {
	unlock, err := dra.LockDevices(d.Claims, devices)
	if err != nil {
		return fmt.Errorf("%w: %w", errInUse, err)
	}
	defer unlock()
	var ids []string
	for _, a := range devices {
		ids = append(ids, a.String())
	}
	return d.gate.runChange(ids, check, change)
}

// setNumVFs sets the number of VFs of a PF. It fails if a pod has the PF or a VF is in use, because the kernel removes all VFs first.
func (d *daemon) setNumVFs(ctx context.Context, s *pci.Snapshot, pf pci.Address, n int) error {
	device, _ := s.Device(pf)
	vfs := s.VFs(pf)
	devices := []pci.Address{pf}
	for _, vf := range vfs {
		devices = append(devices, vf.Address)
	}
	err := d.changeDevices(devices, func() error {
		d.mu.Lock()
		defer d.mu.Unlock()
		if why := d.ownerOf(device, true); why != "" {
			return fmt.Errorf("PF %s: cannot create %d VFs, %w: the PF %s", pf, n, errInUse, why)
		}
		for _, vf := range vfs {
			if why := d.whyInUse(vf); why != "" {
				return fmt.Errorf("PF %s: cannot change the number of VFs from %d to %d, %w: VF %s %s", pf, device.NumVFs, n, errInUse, vf.Address, why)
			}
		}
		return nil
	}, func() error { return pci.SetNumVFs(ctx, d.Sysfs, pf, n) })
	if err == nil {
		d.log.Info("changed the number of VFs of a PF", "pf", pf.String(), "had", device.NumVFs, "has", n)
	}
	return err
}

func (d *daemon) bind(ctx context.Context, dev pool.Device, driver string) error {
	err := d.changeDevices([]pci.Address{dev.Address}, func() error {
		d.mu.Lock()
		defer d.mu.Unlock()
		if why := d.whyInUse(dev.Device); why != "" {
			return fmt.Errorf("%s: cannot change the driver from %s to %s, %w: the device %s", dev.Address, cmp.Or(dev.Driver, "none"), driver, errInUse,
				why)
		}
		return nil
	}, func() error { return pci.Bind(ctx, d.Sysfs, dev.Address, driver) })
	if err == nil {
		d.log.Info("changed the driver of a device", "device", dev.Address.String(), "had", dev.Driver, "has", driver)
	}
	return err
}

// whyInUse returns why a device must not be changed, or "". The caller holds d.mu.
func (d *daemon) whyInUse(dev pci.Device) string {
	return cmp.Or(d.ownerOf(dev, true), d.whyOnNode(dev))
}

// whyOnNode returns why the node itself uses a device, or "". It asks the kernel again about a function without a PF, which may have become
// the node's since the last scan.
func (d *daemon) whyOnNode(dev pci.Device) string {
	if dev.HasNoPF() {
		if d.poolEnv(); d.envErr != nil {
			return fmt.Sprintf("may be in use: %v", d.envErr)
		}
	}
	for _, name := range dev.Interfaces {
		switch why, ok := d.inUse[name]; {
		case !dev.HasNoPF():
		case !ok:
			return "is changing: its interface is no longer " + name
		case why != "":
			return fmt.Sprintf("is in use on the node: %s %s", name, why)
		}
		if slices.Contains(d.uplinks, name) {
			return fmt.Sprintf("is the node's uplink %s", name)
		}
	}
	return ""
}

// ownerOf describes the pod, network namespace or, if `claims`, the claim that has a device, or returns "" if it is free. The caller
// holds d.mu.
func (d *daemon) ownerOf(dev pci.Device, claims bool) string {
	d.mergeUnlisted()
	for _, h := range d.held {
		switch {
		case h.ID != dev.Address.String():
		case !byClaim(h):
			return "belongs to " + podText(h)
		case claims:
			return fmt.Sprintf("belongs to claim %s/%s", h.Claim.Namespace, h.Claim.Name)
		}
	}
	if claims && d.unreadClaims != nil {
		return fmt.Sprintf("may belong to a claim: %v", d.unreadClaims)
	}
	if d.isLeaked(dev) {
		return "has its interface in another namespace"
	}
	return ""
}
