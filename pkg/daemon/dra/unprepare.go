// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/fault"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/sriov"
)

// UnprepareResourceClaims frees the devices of several claims. After an error, a claim keeps them, and the kubelet repeats the call.
func (h callHandler) UnprepareResourceClaims(ctx context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	uid := func(c kubeletplugin.NamespacedObject) types.UID { return c.UID }
	return atOnce(claims, uid, func(c kubeletplugin.NamespacedObject) error {
		err := h.unprepareWithin(ctx, string(c.UID))
		if err != nil {
			err = fmt.Errorf("claim %s/%s: %w", c.Namespace, c.Name, err)
		}
		if h.failures.isDue("unprepare "+string(c.UID), err, time.Now()) {
			h.options.Log.Warn("could not unprepare a claim, which keeps its devices; the kubelet retries", "claim", c.Namespace+"/"+c.Name,
				"uid", string(c.UID), "error", err)
		}
		return err
	}), nil
}

// unprepareWithin calls unprepare but returns after callTimeout. unprepare then continues in the background with the locks of the
// claim.
func (d *Driver) unprepareWithin(ctx context.Context, uid string) error {
	return d.callBounded(ctx, func(ctx context.Context) error { return d.unprepare(ctx, uid) })
}

// unprepare moves a claim's VFs out of the pods, restores their drivers and settings, and then deletes the CDI specification and the
// record. It is idempotent, and a no-op if the claim is not prepared. After a failure, the record stays, so that no other claim gets
// the devices.
func (d *Driver) unprepare(ctx context.Context, uid string) error {
	l, err := d.lockClaim(uid)
	if err != nil {
		return err
	}
	defer l.unlock()
	r, err := claim.Read(d.options.Claims, uid)
	if errors.Is(err, fs.ErrNotExist) { // the record may be lost; journals also contain the claim
		return errors.Join(sriov.RestoreClaim(d.options.Sysfs, uid, nil, d.options.Log), d.removeCDI(uid))
	}
	if err != nil {
		return err
	}
	vfs, err := ownedDevices(r)
	if err != nil {
		return err
	}
	if err := l.lockVFs(vfs); err != nil {
		return err
	}
	if err := d.releaseDevices(ctx, r, vfs); err != nil {
		return err
	}
	d.recordsChanged()
	return nil
}

func ownedDevices(r claim.Record) (vfs []pci.Address, err error) {
	for _, dev := range r.Devices {
		if dev.Claim.Admin {
			continue
		}
		a, err := pci.ParseAddress(dev.ID)
		if err != nil {
			return nil, err
		}
		vfs = append(vfs, a)
	}
	return vfs, nil
}

// releaseDevices frees the devices of a record. The caller holds the locks of the claim and the VFs.
func (d *Driver) releaseDevices(ctx context.Context, r claim.Record, vfs []pci.Address) error {
	uid := r.Claim().UID
	if r.State == claim.Prepared { // no ADD may take a VF from now on
		r.State = claim.Preparing
		if err := claim.Write(d.options.Claims, r); err != nil {
			return err
		}
	}
	fault.Step("return the devices of claim", uid)
	if err := sriov.RestoreClaim(d.options.Sysfs, uid, vfs, d.options.Log); err != nil {
		return err
	}
	for _, b := range r.Bound {
		if err := d.restoreDriver(ctx, b); err != nil {
			return err
		}
	}
	fault.Step("forget claim", uid)
	if err := d.removeCDI(uid); err != nil {
		return err
	}
	return claim.Remove(d.options.Claims, uid)
}

// restoreDriver binds a device to the driver that it had before the claim. If that fails, for example because the driver is not loaded, the
// claim can end nevertheless.
func (d *Driver) restoreDriver(ctx context.Context, b claim.Binding) error {
	a, err := pci.ParseAddress(b.ID)
	if err != nil {
		return err
	}
	now, _, err := pci.Read(d.options.Sysfs, a)
	switch {
	case errors.Is(err, fs.ErrNotExist): // the device no longer exists
		return nil
	case err != nil:
		return err
	case now.Driver == b.Former:
		return nil
	}
	if err = pci.Bind(ctx, d.options.Sysfs, a, b.Former); err == nil || ctx.Err() != nil {
		return err
	}
	d.options.Log.Warn("the VF cannot be used until its former driver is bound", "vf", b.ID, "driver", b.Former, "error", err)
	return sriov.RestoreLater(a, b.Former, err)
}
