// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/fault"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/sriov"
)

// callTimeout is the maximum time that one call works on a claim. The kubelet cancels a call after 45 s.
const callTimeout = 40 * time.Second

// callHandler handles the calls of the kubelet. The Kubernetes library receives the calls and passes them to callHandler.
type callHandler struct{ *Driver }

// PrepareResourceClaims prepares several claims at the same time, so that none waits for a slow driver of another.
func (h callHandler) PrepareResourceClaims(ctx context.Context,
	claims []*resourceapi.ResourceClaim) (map[types.UID]kubeletplugin.PrepareResult, error) {
	uid := func(c *resourceapi.ResourceClaim) types.UID { return c.UID }
	return atOnce(claims, uid, func(c *resourceapi.ResourceClaim) (r kubeletplugin.PrepareResult) {
		began := time.Now()
		r.Devices, r.Err = h.prepareWithin(ctx, c, false)
		h.count.prepared(time.Since(began), r.Err)
		if h.failures.isDue("prepare "+string(c.UID), r.Err, time.Now()) {
			h.options.Log.Warn("could not prepare a claim; the kubelet retries", "claim", c.Namespace+"/"+c.Name, "uid", string(c.UID), "error",
				r.Err)
		}
		return r
	}), nil
}

// atOnce calls f() for all claims at the same time and returns the results by UID.
func atOnce[C, R any](claims []C, uid func(C) types.UID, f func(C) R) map[types.UID]R {
	results := make([]R, len(claims))
	var running sync.WaitGroup
	for i, c := range claims {
		running.Go(func() { results[i] = f(c) })
	}
	running.Wait()
	byUID := map[types.UID]R{}
	for i, c := range claims {
		byUID[uid(c)] = results[i]
	}
	return byUID
}

// prepareWithin calls prepare but returns after callTimeout. prepare then continues in the background with the locks of the claim.
func (d *Driver) prepareWithin(ctx context.Context, c *resourceapi.ResourceClaim, lost bool) ([]kubeletplugin.Device, error) {
	var devices []kubeletplugin.Device // not read after a timeout
	err := d.callBounded(ctx, func(ctx context.Context) (err error) {
		devices, err = d.prepare(ctx, c, lost)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("claim %s/%s: %w", c.Namespace, c.Name, err)
	}
	return devices, nil
}

// callBounded calls f() and returns after callTimeout at the latest.
func (d *Driver) callBounded(ctx context.Context, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), d.callTimeout)
	done := make(chan error, 1)
	go func() {
		defer cancel()
		done <- f(ctx)
	}()
	select {
	case err := <-done:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-done:
		return err
	case <-time.After(100 * time.Millisecond): // an error that arrives soon explains more
		return fmt.Errorf("not finished within %s; the work continues: %w", d.callTimeout, ctx.Err())
	}
}

// prepare makes the devices of a claim ready for its pods in four steps: reserve them in a record, bind the drivers, write the CDI
// specification, and mark the record as prepared. It is idempotent and continues after the last completed step, also after a crash.
// lost is true if the claim was prepared earlier but its record was lost.
func (d *Driver) prepare(ctx context.Context, c *resourceapi.ResourceClaim, lost bool) ([]kubeletplugin.Device, error) {
	l, err := d.lockClaim(string(c.UID))
	if err != nil {
		return nil, err
	}
	defer l.unlock()
	before, err := d.recordOf(string(c.UID))
	if err != nil {
		return nil, err
	}
	p, err := d.planClaim(c, before)
	if err != nil {
		return nil, err
	}
	p.lost = lost
	if err := l.lockVFs(p.lockedAddresses()); err != nil {
		return nil, err
	}
	if err := d.reserve(ctx, &p, before); err != nil {
		return nil, err
	}
	if err := d.writeCDI(p); err != nil {
		return nil, err
	}
	p.record.State = claim.Prepared
	if err := claim.Write(d.options.Claims, p.record); err != nil {
		return nil, err
	}
	d.recordsChanged()
	return d.answerFor(p), nil
}

// recordsChanged wakes all goroutines that wait for changes of claim records.
func (d *Driver) recordsChanged() {
	d.change(func() {})
	d.options.Changed()
}

// recordOf returns the existing record of a claim, or nil if the claim has no record.
func (d *Driver) recordOf(uid string) (*claim.Record, error) {
	r, err := claim.Read(d.options.Claims, uid)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return &r, err
}

// reserve reserves the devices of a plan for the claim and binds their drivers. The caller holds the locks of the claim and the VFs.
func (d *Driver) reserve(ctx context.Context, p *claimPlan, before *claim.Record) error {
	if _, err := d.checkOtherClaims(*p); err != nil { // check first: the pod of another claim may be running
		return err
	}
	held, err := sriov.Holdings()
	if err != nil {
		return err
	}
	if before != nil {
		p.record.Bound, p.record.Time = slices.Clone(before.Bound), before.Time
	}
	for i := range p.devices {
		dev := &p.devices[i]
		dev.held = holdingOf(held, dev.UID, dev.Claim.Device)
		if err := d.prepareToReserve(p, dev, before == nil); err != nil {
			return err
		}
	}
	check := func() error { return d.checkFree(*p) }
	change := func() error {
		if before != nil && before.State == claim.Prepared && !slices.ContainsFunc(p.devices, plannedDevice.mustBind) {
			return nil // the existing record already reserves the devices
		}
		return d.bindAll(ctx, p)
	}
	return d.options.Change(addressTexts(p.lockedAddresses()), check, change)
}

// prepareToReserve reads a device from sysfs, and restores it if an earlier claim has ended without doing so. first is true if no
// record has the device.
func (d *Driver) prepareToReserve(p *claimPlan, dev *plannedDevice, first bool) error {
	if err := d.rereadDevice(dev); err != nil || dev.Admin {
		return err
	}
	attached := dev.held != nil
	if first {
		d.recoverDriver(p, *dev, attached)
	}
	if attached {
		dev.driver = "" // a pod has the VF with its current driver
	}
	dev.fresh = first && !attached
	return errors.Join(d.freeDevice(*dev), d.rereadDevice(dev)) // freeDevice may restore the former driver
}

// freeDevice ensures that a device, or a VF of a whole PF, has no attachment and has its former settings.
func (d *Driver) freeDevice(dev plannedDevice) error {
	if err := d.checkUsable(dev); err != nil {
		return err
	}
	for _, a := range append([]pci.Address{dev.Address}, dev.vfs...) {
		if err := sriov.FreeOrphan(d.options.Sysfs, a, dev.UID, d.options.Log); err != nil {
			return err
		}
	}
	return nil
}

func addressTexts(list []pci.Address) (out []string) {
	for _, a := range list {
		out = append(out, a.String())
	}
	return out
}

// checkFree returns an error if another claim has a device of the plan, or if a pod has one that is new for the claim through the
// device plugin API. A VF also conflicts with a claim of its whole PF, and a whole PF with a pod that has one of its VFs. The PF's
// counters normally prevent both, but not after a pod was deleted by force.
func (d *Driver) checkFree(p claimPlan) error {
	records, err := d.checkOtherClaims(p)
	if err != nil {
		return err
	}
	for _, dev := range p.devices {
		if why := d.options.InUse(dev.Address.String()); dev.fresh && why != "" {
			return fmt.Errorf("VF %s %s", dev.Address, why)
		}
		i := slices.IndexFunc(records, func(r claim.Record) bool { return r.Claim().UID != dev.UID && r.Has(dev.PF.String()) })
		if i >= 0 && dev.IsVF() && !dev.Admin {
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

// checkOtherClaims returns the records of all claims, or an error if another claim has a device of the plan.
func (d *Driver) checkOtherClaims(p claimPlan) ([]claim.Record, error) {
	records, unreadable := d.records.List()
	if unreadable != nil {
		return nil, fmt.Errorf("find the claims that have its devices: %w; see %s", unreadable, d.options.Claims)
	}
	for _, a := range p.lockedAddresses() {
		for _, r := range records {
			if c := r.Claim(); c.UID != p.devices[0].UID && r.Has(a.String()) {
				return nil, fmt.Errorf("VF %s still belongs to %s (uid %s), whose pod has not ended", a, r, c.UID)
			}
		}
	}
	return records, nil
}

// mustBind reports whether the driver of the device must be changed.
func (p plannedDevice) mustBind() bool { return p.driver != "" && p.driver != p.Driver }

// bindAll writes the record that reserves the devices and contains their former drivers. Then bindAll binds the new drivers.
func (d *Driver) bindAll(ctx context.Context, p *claimPlan) error {
	for _, dev := range p.devices {
		if !dev.mustBind() {
			continue
		}
		if err := d.recentBindFailure(dev.Address); err != nil {
			return err
		}
		id := dev.Address.String()
		if dev.restores && !slices.ContainsFunc(p.record.Bound, func(b claim.Binding) bool { return b.ID == id }) {
			p.record.Bound = append(p.record.Bound, claim.Binding{ID: id, Driver: dev.driver, Former: cmp.Or(dev.restoreTo, dev.Driver),
				MAC: d.macOf(dev)})
		}
	}
	if err := claim.Write(d.options.Claims, p.record); err != nil {
		return err
	}
	fault.Step("bind the devices of claim", p.devices[0].UID)
	for i := range p.devices {
		if p.devices[i].mustBind() {
			if err := d.bindDriver(ctx, &p.devices[i]); err != nil {
				return err
			}
		}
		if err := d.removeVFs(ctx, p.devices[i]); err != nil {
			return err
		}
	}
	return nil
}

// macOf returns the MAC of a device's interface, or "" if that is not on the node. Nothing tells it once a user space driver is bound.
func (d *Driver) macOf(dev plannedDevice) string {
	if len(dev.Interfaces) == 0 {
		return ""
	}
	text, _ := os.ReadFile(filepath.Join(d.options.Sysfs, "bus/pci/devices", dev.Address.String(), "net", dev.Interfaces[0], "address"))
	return strings.TrimSpace(string(text))
}

func (d *Driver) rereadDevice(dev *plannedDevice) error {
	now, err := pci.Inspect(d.options.Sysfs, dev.Address)
	if err != nil {
		return fmt.Errorf("device %s: %w", dev.Address, err)
	}
	dev.Device.Device = now
	return nil
}

func (d *Driver) bindDriver(ctx context.Context, dev *plannedDevice) error {
	had := dev.Driver
	err := pci.Bind(ctx, d.options.Sysfs, dev.Address, dev.driver)
	d.recordBind(dev.Address, err)
	if err != nil {
		return fmt.Errorf("bind the driver: %w", err)
	}
	d.options.Log.Info("changed the driver of a device for a claim", "device", dev.Address.String(), "claim", dev.Namespace+"/"+dev.Name,
		"had", had, "has", dev.driver)
	return d.rereadDevice(dev)
}
