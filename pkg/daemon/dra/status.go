// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	resourceac "k8s.io/client-go/applyconfigurations/resource/v1"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/watch"
	"github.com/podlace/podlace/pkg/sriov"
)

const (
	// joinStatus is the time for which the driver collects changes before it writes the status of claims. One ADD writes several files, so the
	// delay avoids several writes of the same status.
	joinStatus = 200 * time.Millisecond
	// statusPace is the minimum time between two writes of claim status. The driver therefore writes the status of claims at most five times
	// per second.
	statusPace = 200 * time.Millisecond
	// statusGiveUp is the time after which the driver stops retrying a failed write.
	statusGiveUp = 5 * time.Minute
	// statusForbidden is the pause before the next write if the API server refused a write because of a missing permission.
	statusForbidden = time.Hour

	firstStatusRetry = time.Second
	lastStatusRetry  = time.Minute
)

// missingRight is a hint for the log. The hint contains the permissions that the service account needs.
const missingRight = `grant the verb patch on resourceclaims/status, and since Kubernetes 1.36 the verb associated-node:patch on ` +
	`resourceclaims/driver with the resource name ` + claim.Driver

// statusWriter writes the status of claims. The status contains the interface names, the addresses, and the pods that have the devices.
type statusWriter struct {
	*Driver
	began     time.Time
	written   map[string]string // by UID: status of a claim in the API server
	retries   map[string]statusRetry
	forbidden time.Time // no status is written before that time
	last      time.Time // time of the last write
}

// statusRetry describes a failed write that will be repeated.
type statusRetry struct {
	text        string // text that was not written
	since, next time.Time
	pause       time.Duration
}

func newStatusWriter(d *Driver) *statusWriter {
	return &statusWriter{Driver: d, began: time.Now().Truncate(time.Second), written: map[string]string{}, retries: map[string]statusRetry{}}
}

// statusLoop writes the status of claims after ADD or DEL has changed a journal. statusLoop runs until ctx is done. ADD does not wait until the status is written.
func (d *Driver) statusLoop(ctx context.Context) {
	w := newStatusWriter(d)
	journals := make(chan struct{}, 1)
	go watch.Folder(ctx, sriov.JournalFolder, func(string) {
		select {
		case journals <- struct{}{}:
		default:
		}
	}, d.options.Log)
	for {
		var due <-chan time.Time
		_, news := d.watchInventory()
		if again := w.writeAll(ctx); !again.IsZero() {
			due = time.After(time.Until(again))
		}
		select {
		case <-ctx.Done():
			return
		case <-journals:
		case <-news:
		case <-due:
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(joinStatus):
		}
	}
}

// writeAll writes the status of each claim whose status has changed. The result "again" is the time of the next attempt. The zero time
// means that the next attempt can wait for the next change.
func (w *statusWriter) writeAll(ctx context.Context) (again time.Time) {
	records, _ := w.records.List() // unreadable records are skipped
	held, err := sriov.Holdings()
	if err != nil {
		return time.Now().Add(lastStatusRetry)
	}
	seen := map[string]bool{}
	for _, r := range records {
		if seen[r.Claim().UID] = true; r.State == claim.Damaged {
			continue
		}
		if ctx.Err() != nil {
			return time.Time{}
		}
		if next := w.writeOne(ctx, r, held); !next.IsZero() && (again.IsZero() || next.Before(again)) {
			again = next
		}
	}
	ended := func(uid string) bool { return !seen[uid] }
	maps.DeleteFunc(w.written, func(uid, _ string) bool { return ended(uid) })
	maps.DeleteFunc(w.retries, func(uid string, _ statusRetry) bool { return ended(uid) })
	return again
}

// writeOne writes the status of the claim of a record, unless the API server already has the same status.
func (w *statusWriter) writeOne(ctx context.Context, r claim.Record, held []sriov.Holding) (again time.Time) {
	uid, now := r.Claim().UID, time.Now()
	if now.Before(w.forbidden) {
		return w.forbidden
	}
	before, known := w.written[uid]
	if !known && !r.Time.After(w.began) { // an earlier instance may have written it
		text, err := w.storedText(ctx, r)
		if err != nil {
			return now.Add(lastStatusRetry)
		}
		before = text
		w.written[uid] = text
	}
	entries := w.wantedEntries(r, held, before != "")
	text := comparedText(entries)
	retry, failed := w.retries[uid]
	switch {
	case text == before:
		delete(w.retries, uid)
		return time.Time{}
	case failed && retry.text == text && now.Sub(retry.since) > statusGiveUp:
		return time.Time{}
	case failed && retry.text == text && now.Before(retry.next):
		return retry.next
	}
	return w.noteWrite(uid, text, r, w.applyStatus(ctx, r, entries))
}

// noteWrite records the result of a write and returns the time of the next attempt.
func (w *statusWriter) noteWrite(uid, text string, r claim.Record, err error) time.Time {
	now := time.Now()
	switch {
	case err == nil:
		w.count.statuses.WithLabelValues("ok").Inc()
		w.written[uid] = text
		delete(w.retries, uid)
		return time.Time{}
	case apierrors.IsForbidden(err):
		w.count.statuses.WithLabelValues("forbidden").Inc()
		if w.forbidden.IsZero() {
			w.options.Log.Warn("cannot write the status of claims: the API server refuses it", "error", err, "hint", missingRight)
		}
		w.forbidden = now.Add(statusForbidden)
		return w.forbidden
	}
	w.count.statuses.WithLabelValues("error").Inc()
	retry, failed := w.retries[uid]
	if !failed || retry.text != text {
		retry = statusRetry{text: text, since: now, pause: firstStatusRetry}
		w.options.Log.Warn("could not write the status of a claim", "claim", r.String(), "error", err)
	}
	if apierrors.IsNotFound(err) || apierrors.IsConflict(err) || apierrors.IsInvalid(err) {
		retry.since = now.Add(-2 * statusGiveUp) // the claim was deleted, replaced or allocated differently
	}
	retry.next = now.Add(retry.pause)
	retry.pause = min(2*retry.pause, lastStatusRetry)
	w.retries[uid] = retry
	return retry.next
}

// applyStatus writes the entries of one claim to the API server. Entries of other drivers stay unchanged.
func (w *statusWriter) applyStatus(ctx context.Context, r claim.Record, entries []statusEntry) error {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(time.Until(w.last.Add(statusPace))):
	}
	w.last = time.Now()
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	status := resourceac.ResourceClaimStatus()
	for _, e := range entries {
		status.WithDevices(e.toApply())
	}
	c := r.Claim()
	_, err := w.options.Client.ResourceV1().ResourceClaims(c.Namespace).ApplyStatus(ctx,
		resourceac.ResourceClaim(c.Name, c.Namespace).WithUID(types.UID(c.UID)).WithStatus(status),
		metav1.ApplyOptions{FieldManager: claim.Driver, Force: true})
	return err
}

// storedText reads the status of a claim from the API server and returns the entries of this driver as text. Without entries, storedText
// returns "".
func (w *statusWriter) storedText(ctx context.Context, r claim.Record) (string, error) {
	now, err := w.get(ctx, r.Claim().Namespace, r.Claim().Name)
	if apierrors.IsNotFound(err) || err == nil && string(now.UID) != r.Claim().UID {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	var entries []statusEntry
	for _, d := range r.Devices {
		for _, s := range now.Status.Devices {
			if s.Driver == claim.Driver && s.Pool == d.Claim.Pool && s.Device == d.Claim.Device {
				entries = append(entries, storedStatus(s))
			}
		}
	}
	return comparedText(entries), nil
}

// comparedText returns status entries as text without their times, so that they can be compared. Without entries, comparedText returns "".
func comparedText(entries []statusEntry) string {
	if len(entries) == 0 {
		return ""
	}
	list := make([]statusEntry, len(entries))
	for i, e := range entries {
		e.Since = time.Time{}
		list[i] = e
	}
	text, err := json.Marshal(list)
	if err != nil {
		return fmt.Sprint(list)
	}
	return string(text)
}

// wantedEntries returns the desired status of a claim. A device gets an entry only after a pod has attached the device. The argument "had"
// is true if the API server already has entries of this claim.
func (w *statusWriter) wantedEntries(r claim.Record, held []sriov.Holding, had bool) (list []statusEntry) {
	i := w.latestInventory()
	for _, d := range r.Devices {
		if d.Claim.Admin {
			continue
		}
		e := statusEntry{Pool: d.Claim.Pool, Device: d.Claim.Device, ShareID: d.Claim.ShareID, Since: time.Now()}
		e.Data.Address = d.ID
		for _, h := range held {
			if h.Address.String() == d.ID && h.Claim != nil && h.Claim.UID == d.Claim.UID && h.Ready {
				e.fillFrom(i, h)
			}
		}
		if e.Ready || had {
			list = append(list, e)
		}
	}
	return list
}

// fillFrom adds the data of an attachment to the entry.
func (e *statusEntry) fillFrom(i Inventory, h sriov.Holding) {
	e.Ready, e.Since, e.Pod = true, h.Since, h.Pod
	e.Interface, e.MAC, e.Data.VLAN = h.Name, h.MAC, h.VLAN
	for _, ip := range h.IPs[:min(len(h.IPs), maxStatusIPs)] {
		e.IPs = append(e.IPs, ip.String())
	}
	if h.MAC == "" { // a user space program has the VF, without an interface
		e.Interface = ""
	}
	if d, ok := i.Snapshot.Device(h.Address); ok {
		e.Data.VF = d.VFIndex
		e.Data.PF = cmp.Or(i.pfName(i.pfOf(d)), d.PF.String())
	}
}
