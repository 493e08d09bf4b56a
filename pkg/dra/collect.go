// SPDX-License-Identifier: Apache-2.0

package dra

import (
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
	// rebuildEvery is how often records are looked for that the kubelet's file demands and that are missing.
	rebuildEvery = 10 * time.Second
	// collectEvery is how often orphaned records are looked for.
	collectEvery = time.Minute
	// orphanedAfter is how long the kubelet's file has to lack a claim before its record may be orphaned.
	orphanedAfter = 2 * time.Minute
	// orphanedAnyway is that time while the file cannot be read.
	orphanedAnyway = 10 * time.Minute
	// longestRebuild is the longest pause between two attempts to write the record of a claim.
	longestRebuild = time.Minute

	apiTimeout = 10 * time.Second
)

// collector makes records and claims agree.
type collector struct {
	*Driver
	missing  map[string]time.Time // since when the kubelet's file lacks a claim that has a record, by UID
	unreadAt time.Time            // since when that file cannot be read; zero if it can
	lost     map[string]lostRecord

	unattached map[string]time.Time // since when no pod has a device of a prepared claim, by UID
	warned     map[string]bool      // which of these claims were logged
}

// lostRecord is a claim that the kubelet's file names and that has no record.
type lostRecord struct {
	since, next time.Time
	pause       time.Duration
}

func newCollector(d *Driver) *collector {
	return &collector{Driver: d, missing: map[string]time.Time{}, lost: map[string]lostRecord{}, warned: map[string]bool{}}
}

// collectAlways makes records and claims agree until ctx is done, while this instance leads.
func (d *Driver) collectAlways(ctx context.Context) {
	c := newCollector(d)
	rebuild, collect := time.NewTicker(rebuildEvery), time.NewTicker(collectEvery)
	defer rebuild.Stop()
	defer collect.Stop()
	for {
		turn := d.lead.turn.wait()
		now := time.Now()
		select {
		case <-ctx.Done():
			return
		case <-turn:
			if d.leads() {
				c.report("", d.sweepCDI())
				c.rebuild(ctx, now)
			}
		case now = <-rebuild.C:
			if d.leads() {
				c.rebuild(ctx, now)
			}
		case now = <-collect.C:
			if d.leads() {
				c.collect(ctx, now)
			}
		}
	}
}

// report logs an error about a claim, "" for all claims.
func (c *collector) report(uid string, err error) {
	if c.failures.due("collect "+uid, err, time.Now()) {
		c.options.Log.Warn("records and claims do not agree", "uid", uid, "error", err)
	}
}

// collect unprepares claims that have ended without the kubelet's call: the kubelet's file does not name them, no pod has their VFs, and
// the API server says that they are gone.
func (c *collector) collect(ctx context.Context, now time.Time) {
	records, err := c.records.List()
	c.report("", err)
	held, err := sriov.Holdings()
	if err != nil {
		c.report("", err)
		return
	}
	c.reportUnattached(records, held, now)
	noted, grace := c.noted(now)
	seen := map[string]bool{}
	for _, r := range records {
		uid := r.Claim().UID
		if seen[uid] = true; r.State == claim.Damaged {
			continue // without the record the drivers that its devices had are not known
		}
		if noted[uid] {
			delete(c.missing, uid)
			continue
		}
		if _, ok := c.missing[uid]; !ok {
			c.missing[uid] = now
		}
		inPod := slices.ContainsFunc(held, func(h sriov.Holding) bool { return h.Claim != nil && h.Claim.UID == uid && !h.Gone() })
		if now.Sub(c.missing[uid]) >= grace && !inPod {
			c.report(uid, c.collectOne(ctx, r))
		}
	}
	for uid := range c.missing {
		if !seen[uid] {
			delete(c.missing, uid)
		}
	}
}

// noted returns the claims that the kubelet's file names, and how long a claim has to be missing there.
func (c *collector) noted(now time.Time) (map[string]bool, time.Duration) {
	notes, err := claim.Notes(c.options.Kubelet)
	if err != nil {
		if c.unreadAt.IsZero() {
			c.unreadAt = now
			clear(c.missing) // what it said before may be too old
		}
		return nil, orphanedAnyway
	}
	if !c.unreadAt.IsZero() {
		c.unreadAt = time.Time{}
		clear(c.missing)
	}
	uids := map[string]bool{}
	for _, n := range notes {
		uids[n.UID] = true
	}
	return uids, orphanedAfter
}

// collectOne unprepares a claim if the API server says that it has ended.
func (c *collector) collectOne(ctx context.Context, r claim.Record) error {
	ended, err := c.hasEnded(ctx, r)
	if err != nil || !ended {
		return err
	}
	if err := c.unprepareWithin(ctx, r.Claim().UID); err != nil {
		return fmt.Errorf("%s has ended without the kubelet's call, and keeps its devices: %w", r, err)
	}
	c.options.Log.Warn("a claim has ended without the kubelet's call: its devices were taken back", "claim", r.String(), "uid", r.Claim().UID)
	return nil
}

// hasEnded reports whether the API server says that the claim of a record is gone, another one, or not allocated as the record says.
func (d *Driver) hasEnded(ctx context.Context, r claim.Record) (bool, error) {
	now, err := d.get(ctx, r.Claim().Namespace, r.Claim().Name)
	switch {
	case apierrors.IsNotFound(err):
		return true, nil
	case err != nil:
		return false, fmt.Errorf("whether %s has ended: %w", r, err)
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

// rebuild writes records that the kubelet's file demands and that are missing, from the claims. A record has to be missing twice: the
// kubelet forgets a claim only after its record is gone.
func (c *collector) rebuild(ctx context.Context, now time.Time) {
	notes, err := claim.Notes(c.options.Kubelet)
	if err != nil {
		return // without the kubelet's file no record is known to be missing
	}
	lost := map[string]lostRecord{}
	for _, n := range notes {
		if _, err := claim.Read(c.options.Claims, n.UID); !errors.Is(err, fs.ErrNotExist) {
			continue
		}
		l, again := c.lost[n.UID]
		if !again {
			l = lostRecord{since: now, next: now.Add(rebuildEvery / 2), pause: rebuildEvery}
		} else if !now.Before(l.next) {
			l.next, l.pause = now.Add(l.pause), min(2*l.pause, longestRebuild)
			c.report(n.UID, c.rebuildOne(ctx, n))
		}
		lost[n.UID] = l
	}
	c.lost = lost
}

// rebuildOne prepares a claim whose record is lost. Its pods may run.
func (c *collector) rebuildOne(ctx context.Context, n claim.Note) error {
	now, err := c.get(ctx, n.Namespace, n.Name)
	if apierrors.IsNotFound(err) || err == nil && string(now.UID) != n.UID {
		return nil // the kubelet is about to forget it
	}
	if err != nil {
		return fmt.Errorf("the record of %s is lost: %w", n, err)
	}
	if _, err := c.prepareWithin(ctx, now, true); err != nil {
		return fmt.Errorf("the record of %s is lost: %w", n, err)
	}
	c.options.Log.Warn("the record of a claim was lost and is written again", "claim", n.String(), "uid", n.UID)
	return nil
}
