// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/fault"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/sriov"
)

// UnprepareResourceClaims takes the devices of claims back. A claim with an error keeps its devices: the kubelet calls again.
func (h handler) UnprepareResourceClaims(ctx context.Context, claims []kubeletplugin.NamespacedObject) (map[types.UID]error, error) {
	results := make([]error, len(claims))
	var running sync.WaitGroup
	for i, c := range claims {
		running.Go(func() {
			err := h.unprepareWithin(ctx, string(c.UID))
			if err != nil {
				err = fmt.Errorf("claim %s/%s: %w", c.Namespace, c.Name, err)
			}
			if h.failures.due("unprepare "+string(c.UID), err, time.Now()) {
				h.options.Log.Warn("a claim keeps its devices", "claim", c.Namespace+"/"+c.Name, "uid", string(c.UID), "error", err)
			}
			results[i] = err
		})
	}
	running.Wait()
	byUID := map[types.UID]error{}
	for i, c := range claims {
		byUID[c.UID] = results[i]
	}
	return byUID, nil
}

// unprepareWithin is unprepare for at most the time of a call. What has not finished by then goes on, and keeps the locks of the claim.
func (d *Driver) unprepareWithin(ctx context.Context, uid string) error {
	return d.bounded(ctx, func(ctx context.Context) error { return d.unprepare(ctx, uid) })
}

// unprepare takes the devices of a claim back: VFs come out of pods, drivers and settings are as before, then specification and record
// go. It is idempotent, and a no-op for a claim that has nothing. After an error the record stays, and no other claim gets the devices.
func (d *Driver) unprepare(ctx context.Context, uid string) error {
	l, err := d.lockClaim(uid)
	if err != nil {
		return err
	}
	defer l.unlock()
	r, err := claim.Read(d.options.Claims, uid)
	if errors.Is(err, fs.ErrNotExist) { // lost perhaps: journals name the claim as well
		return errors.Join(sriov.ReturnClaim(d.options.Sysfs, uid, nil, d.options.Log), d.removeCDI(uid))
	}
	if err != nil {
		return err
	}
	vfs, err := owned(r)
	if err != nil {
		return err
	}
	if err := l.lockVFs(vfs); err != nil {
		return err
	}
	if err := d.release(ctx, r, vfs); err != nil {
		return err
	}
	d.recordsChanged()
	return nil
}

// owned returns the devices that the claim of a record owns.
func owned(r claim.Record) (vfs []pci.Address, err error) {
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

// release gives the devices of a record back. The caller has the locks of claim and VFs.
func (d *Driver) release(ctx context.Context, r claim.Record, vfs []pci.Address) error {
	uid := r.Claim().UID
	if r.State == claim.Prepared { // from now on no ADD takes a VF
		r.State = claim.Preparing
		if err := claim.Write(d.options.Claims, r); err != nil {
			return err
		}
	}
	fault.Step("return the devices of claim", uid)
	if err := sriov.ReturnClaim(d.options.Sysfs, uid, vfs, d.options.Log); err != nil {
		return err
	}
	for _, b := range r.Bound {
		if err := d.giveBack(ctx, b); err != nil {
			return err
		}
	}
	fault.Step("forget claim", uid)
	if err := d.removeCDI(uid); err != nil {
		return err
	}
	return claim.Remove(d.options.Claims, uid)
}

// giveBack binds a device to the driver that it had before its claim.
func (d *Driver) giveBack(ctx context.Context, b claim.Binding) error {
	a, err := pci.ParseAddress(b.ID)
	if err != nil {
		return err
	}
	now, _, err := pci.Read(d.options.Sysfs, a)
	switch {
	case errors.Is(err, fs.ErrNotExist): // it is gone
		return nil
	case err != nil:
		return err
	case now.Driver == b.Former:
		return nil
	case b.Former == "":
		return pci.Unbind(ctx, d.options.Sysfs, a)
	}
	return pci.Bind(ctx, d.options.Sysfs, a, b.Former)
}
