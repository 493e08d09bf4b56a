// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/sriov"
)

const (
	// rebuildEvery is how often lost records, unattached devices, new attachments and damaged metadata files are searched. A record is
	// lost if it is missing although the claim is in the kubelet's file.
	rebuildEvery = 10 * time.Second
	// collectEvery is the time between two searches for orphaned records.
	collectEvery = time.Minute
	// orphanedAfter is the time for which a claim must be missing from the kubelet's file before its record may be orphaned.
	orphanedAfter = 2 * time.Minute
	// orphanedUnread is used instead of orphanedAfter while the kubelet's file cannot be read.
	orphanedUnread = 10 * time.Minute

	apiTimeout = 10 * time.Second
)

// collector deletes orphaned claim records, rebuilds lost ones, finds claims whose devices no pod has attached, and counts attachments
// by NUMA alignment.
type collector struct {
	*Driver
	missing    map[string]time.Time // by UID: since when a claim with a record is missing from the kubelet's file
	lost       map[string]bool      // by UID: claims in the kubelet's file without a record
	unattached map[string]time.Time // by UID: since when no pod has a device of a prepared claim

	began   time.Time
	counted map[countedVF]bool // attachments that the NUMA alignment metric includes
}

func (d *Driver) collectLoop(ctx context.Context) {
	c := &collector{Driver: d, began: time.Now().Truncate(time.Second)}
	defer c.count.unattached.Set(0)
	c.rebuild(ctx)
	rebuild, collect := time.NewTicker(rebuildEvery), time.NewTicker(collectEvery)
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-rebuild.C:
			c.findUnattached(now)
			c.countAlignment(ctx, now)
			c.rebuild(ctx)
		case now := <-collect.C:
			c.collect(ctx, now)
		}
	}
}

// reportError logs an error about a claim. If uid is "", the error does not belong to a single claim.
func (c *collector) reportError(uid string, err error) {
	if c.failures.isDue("collect "+uid, err, time.Now()) {
		c.options.Log.Warn("could not reconcile the records of claims", "uid", uid, "error", err)
	}
}

// collect unprepares ended claims that the kubelet has not: those that are missing from its file, whose VFs no pod has, and whose end
// the API server confirms.
func (c *collector) collect(ctx context.Context, now time.Time) {
	records, errRecords := c.records.List()
	held, err := sriov.Holdings()
	if c.reportError("", errors.Join(errRecords, err)); err != nil {
		return
	}
	grace := orphanedAfter
	notes, err := claim.KubeletClaims(c.options.Kubelet)
	if err != nil {
		grace = orphanedUnread
	}
	missing := map[string]time.Time{}
	for _, r := range records {
		uid := r.Claim().UID
		noted := slices.ContainsFunc(notes, func(n claim.KubeletClaim) bool { return n.UID == uid })
		if noted || r.State == claim.Damaged { // without the record, the former drivers of the devices are unknown
			continue
		}
		missing[uid] = cmp.Or(c.missing[uid], now)
		inPod := slices.ContainsFunc(held, func(h sriov.Holding) bool { return h.Claim != nil && h.Claim.UID == uid && !h.Gone() })
		if now.Sub(missing[uid]) >= grace && !inPod {
			c.reportError(uid, c.collectOne(ctx, r))
		}
	}
	c.missing = missing
	if err == nil {
		c.reportError("metadata", c.removeStaleMetadata(notes, now))
	}
}

// collectOne unprepares a claim if the API server confirms that the claim has ended.
func (c *collector) collectOne(ctx context.Context, r claim.Record) error {
	ended, err := c.hasEnded(ctx, r)
	if err != nil || !ended {
		return err
	}
	if err := c.unprepareWithin(ctx, r.Claim().UID); err != nil {
		return fmt.Errorf("%s has ended without an unprepare call of the kubelet, and keeps its devices: %w", r, err)
	}
	c.options.Log.Warn("freed the devices of a claim that has ended without an unprepare call of the kubelet", "claim", r.String(), "uid", r.Claim().UID)
	return nil
}

// hasEnded reports whether the API server no longer has a record's claim, or has it with another UID or allocation.
func (d *Driver) hasEnded(ctx context.Context, r claim.Record) (bool, error) {
	now, err := d.get(ctx, r.Claim().Namespace, r.Claim().Name)
	switch {
	case apierrors.IsNotFound(err):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("check whether %s has ended: %w", r, err)
	case string(now.UID) != r.Claim().UID, now.Status.Allocation == nil:
		return true, nil
	}
	for _, dev := range r.Devices {
		if !slices.ContainsFunc(now.Status.Allocation.Devices.Results, func(a resourceapi.DeviceRequestAllocationResult) bool {
			return a.Driver == claim.Driver && a.Pool == dev.Claim.Pool && a.Device == dev.Claim.Device && a.Request == dev.Claim.Request
		}) {
			return true, nil
		}
	}
	return false, nil
}

func (d *Driver) get(ctx context.Context, namespace, name string) (*resourceapi.ResourceClaim, error) {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	return d.options.Client.ResourceV1().ResourceClaims(namespace).Get(ctx, name, metav1.GetOptions{})
}

// rebuild recreates lost claim records from the API server. Only two searches in a row show a loss, because the driver deletes the
// record of an ended claim before the kubelet removes the claim from its file.
func (c *collector) rebuild(ctx context.Context) {
	notes, err := claim.KubeletClaims(c.options.Kubelet)
	if err != nil {
		return // without the kubelet's file, lost records are unknown
	}
	lost := map[string]bool{}
	for _, n := range notes {
		_, err := claim.Read(c.options.Claims, n.UID)
		if len(n.Devices) == 0 || !errors.Is(err, fs.ErrNotExist) {
			continue // without devices, the claim has never been prepared; the kubelet itself retries Prepare
		}
		if lost[n.UID] = true; c.lost[n.UID] {
			c.reportError(n.UID, c.rebuildOne(ctx, n))
		}
	}
	c.lost = lost
}

// rebuildOne recreates the lost record of a claim by preparing the claim again. Pods of the claim may already be running.
func (c *collector) rebuildOne(ctx context.Context, n claim.KubeletClaim) error {
	now, err := c.get(ctx, n.Namespace, n.Name)
	if apierrors.IsNotFound(err) || err == nil && string(now.UID) != n.UID {
		return nil // the kubelet will forget the claim soon
	}
	if err == nil {
		_, err = c.prepareWithin(ctx, now, true)
	}
	if err != nil {
		return fmt.Errorf("the record of %s is lost and cannot be rebuilt: %w", n, err)
	}
	c.options.Log.Warn("rebuilt the lost record of a claim", "claim", n.String(), "uid", n.UID)
	return nil
}
