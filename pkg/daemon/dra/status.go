// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/util/workqueue"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/watch"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/poddevices"
	"github.com/podlace/podlace/pkg/sriov"
)

const (
	// joinStatus is how long changes are collected before the status of claims is written, because one ADD writes several files.
	joinStatus = 200 * time.Millisecond
	// statusPace is the pause after a write of claim status. The driver therefore writes the status of claims at most five times per second.
	statusPace = 200 * time.Millisecond
	// statusForbidden is the pause before the next write of a claim's status that the API server refused because of a missing permission.
	statusForbidden = time.Hour

	// maxStatusIPs is the maximum number of addresses that the API accepts for one device in the status of a claim.
	maxStatusIPs = 16
)

// missingRight is a hint for the log. The hint contains the permissions that the service account needs.
const missingRight = `grant the verb patch on resourceclaims/status, and since Kubernetes 1.36 the verb associated-node:patch on ` +
	`resourceclaims/driver with the resource name ` + claim.Driver

// statusWriter writes the status of claims. The status contains the interface names, the addresses, and the pods that have the devices.
type statusWriter struct {
	*Driver
	began   time.Time
	written map[string]string    // by UID: comparedText of the claim's status in the API server
	next    map[string]time.Time // by UID: when the failed write of a claim's status is repeated
	pauses  workqueue.TypedRateLimiter[string]
}

func newStatusWriter(d *Driver) *statusWriter {
	return &statusWriter{Driver: d, began: time.Now().Truncate(time.Second), written: map[string]string{}, next: map[string]time.Time{},
		pauses: workqueue.NewTypedItemExponentialFailureRateLimiter[string](firstRetry, lastRetry)}
}

// statusLoop writes the status of claims after ADD or DEL has changed a journal, until ctx is done. ADD does not wait for it.
func (d *Driver) statusLoop(ctx context.Context) {
	w := newStatusWriter(d)
	journals := d.watchJournals(ctx)
	for ctx.Err() == nil {
		_, news := d.watchInventory()
		select {
		case <-ctx.Done():
		case <-journals:
		case <-news:
		case <-time.After(w.writeAll(ctx)):
		}
		select {
		case <-ctx.Done():
		case <-time.After(joinStatus):
		}
	}
}

// watchJournals returns a channel that receives a value after each change of a journal, until ctx is done.
func (d *Driver) watchJournals(ctx context.Context) <-chan struct{} {
	journals := make(chan struct{}, 1)
	go watch.Folder(ctx, sriov.JournalFolder, func(string) {
		select {
		case journals <- struct{}{}:
		default:
		}
	}, d.options.Log)
	return journals
}

// writeAll writes each changed status, and returns the time until the next repeated write. A failure delays only its own claim.
func (w *statusWriter) writeAll(ctx context.Context) (wait time.Duration) {
	records, _ := w.records.List() // unreadable records are skipped
	held, err := sriov.Holdings()
	if err != nil {
		return lastRetry
	}
	ended := func(uid string) bool {
		if slices.ContainsFunc(records, func(r claim.Record) bool { return r.Claim().UID == uid }) {
			return false
		}
		w.pauses.Forget(uid)
		return true
	}
	maps.DeleteFunc(w.written, func(uid, _ string) bool { return ended(uid) })
	maps.DeleteFunc(w.next, func(uid string, _ time.Time) bool { return ended(uid) })
	wait = statusForbidden
	for _, r := range records {
		uid := r.Claim().UID
		if ctx.Err() != nil || r.State == claim.Damaged {
			continue
		}
		if time.Now().After(w.next[uid]) {
			w.noteWrite(r, w.writeOne(ctx, r, held))
		}
		if next, ok := w.next[uid]; ok {
			wait = min(wait, time.Until(next))
		}
	}
	return wait
}

// noteWrite logs a failed write and determines when it is repeated. A missing permission is logged once for all claims, which it
// usually concerns.
func (w *statusWriter) noteWrite(r claim.Record, err error) {
	uid, key, hint := r.Claim().UID, "status "+r.Claim().UID, "the write is repeated"
	logged := err
	switch {
	case err == nil:
		w.pauses.Forget(uid)
		delete(w.next, uid)
	case apierrors.IsForbidden(err):
		key, logged, hint = "status", errForbidden, missingRight
		w.next[uid] = time.Now().Add(statusForbidden)
	default:
		w.next[uid] = time.Now().Add(w.pauses.When(uid))
	}
	if w.failures.isDue(key, logged, time.Now()) {
		w.options.Log.Warn("could not write the status of a claim", "claim", r.String(), "error", err, "hint", hint)
	}
}

var errForbidden = errors.New("forbidden")

// writeOne writes the status of the claim of a record, unless the API server already has the same status.
func (w *statusWriter) writeOne(ctx context.Context, r claim.Record, held []sriov.Holding) error {
	uid := r.Claim().UID
	if _, known := w.written[uid]; !known && !r.Time.After(w.began) { // an earlier instance may have written it
		text, err := w.storedText(ctx, r)
		if err != nil {
			return err
		}
		w.written[uid] = text
	}
	status := w.wantedStatus(r, held, w.written[uid] != "")
	text := comparedText(status)
	if text == w.written[uid] {
		return nil
	}
	err := w.applyStatus(ctx, r.Claim(), status)
	result := "ok"
	switch {
	case err == nil:
		w.written[uid] = text
	case apierrors.IsForbidden(err):
		result = "forbidden"
	default:
		result = "error"
		if apierrors.IsNotFound(err) || apierrors.IsConflict(err) || apierrors.IsInvalid(err) {
			w.written[uid] = text // the claim was deleted, replaced or allocated differently
		}
	}
	w.count.statuses.WithLabelValues(result).Inc()
	time.Sleep(statusPace)
	return err
}

// applyStatus writes the status of the devices of one claim to the API server. Entries of other drivers stay unchanged.
func (w *statusWriter) applyStatus(ctx context.Context, c poddevices.Claim, status []resourceapi.AllocatedDeviceStatus) error {
	ctx, cancel := context.WithTimeout(ctx, apiTimeout)
	defer cancel()
	type object = map[string]any
	data, err := json.Marshal(object{"apiVersion": resourceapi.SchemeGroupVersion.String(), "kind": "ResourceClaim",
		"metadata": object{"name": c.Name, "namespace": c.Namespace, "uid": c.UID}, "status": object{"devices": status}})
	if err != nil {
		return err
	}
	_, err = w.options.Client.ResourceV1().ResourceClaims(c.Namespace).Patch(ctx, c.Name, types.ApplyPatchType, data,
		metav1.PatchOptions{FieldManager: claim.Driver, Force: new(true)}, "status")
	return err
}

// storedText reads the status of a claim from the API server and returns the entries of the record's devices as text.
func (w *statusWriter) storedText(ctx context.Context, r claim.Record) (string, error) {
	now, err := w.get(ctx, r.Claim().Namespace, r.Claim().Name)
	if apierrors.IsNotFound(err) || err == nil && string(now.UID) != r.Claim().UID {
		return "", nil
	}
	if err != nil {
		return "", err
	}
	var stored []resourceapi.AllocatedDeviceStatus
	for _, d := range r.Devices {
		for _, s := range now.Status.Devices {
			if s.Driver == claim.Driver && s.Pool == d.Claim.Pool && s.Device == d.Claim.Device {
				stored = append(stored, s)
			}
		}
	}
	return comparedText(stored), nil
}

// comparedText returns the status of devices as text without times, so that it can be compared. Without devices, comparedText returns "".
func comparedText(status []resourceapi.AllocatedDeviceStatus) (text string) {
	for _, s := range status {
		s = *s.DeepCopy()
		for i := range s.Conditions {
			s.Conditions[i].LastTransitionTime = metav1.Time{}
		}
		data, _ := json.Marshal(s) // the status consists of data that came from JSON
		text += string(data)
	}
	return text
}

// wantedStatus returns the desired status of a claim, with entries for devices that a pod has attached. had is true if the API server
// already has entries of this claim.
func (w *statusWriter) wantedStatus(r claim.Record, held []sriov.Holding, had bool) (list []resourceapi.AllocatedDeviceStatus) {
	i := w.latestInventory()
	for _, d := range r.Devices {
		h := holdingOf(held, d.Claim.UID, d.Claim.Device)
		switch {
		case d.Claim.Admin:
		case h != nil && h.Ready:
			list = append(list, i.deviceStatus(d, h))
		case had:
			list = append(list, i.deviceStatus(d, nil))
		}
	}
	return list
}

// holdingOf returns the attachment of a claim's device, or nil if no pod has the device through the claim.
func holdingOf(held []sriov.Holding, uid, device string) *sriov.Holding {
	i := slices.IndexFunc(held, func(h sriov.Holding) bool { return h.Claim != nil && h.Claim.UID == uid && h.Claim.Device == device })
	if i < 0 {
		return nil
	}
	return &held[i]
}

// deviceStatus returns the status of a device. h is its attachment, or nil if no pod has the device.
func (i Inventory) deviceStatus(d poddevices.Device, h *sriov.Holding) resourceapi.AllocatedDeviceStatus {
	ready := metav1.Condition{Type: "Ready", Status: metav1.ConditionFalse, Reason: "Detached", Message: "no pod has the device",
		LastTransitionTime: metav1.Now()}
	data := struct { // in the order of the API server
		Address string `json:"pciAddress"`
		PF      string `json:"pf,omitempty"`
		VF      int    `json:"vf"`
		VLAN    int    `json:"vlan,omitempty"`
	}{Address: d.ID}
	if a, err := pci.ParseAddress(d.ID); err == nil {
		if dev, ok := i.Snapshot.Device(a); ok {
			data.PF, data.VF = i.pfName(i.pfOf(dev)), dev.VFIndex
		}
	}
	s := resourceapi.AllocatedDeviceStatus{Driver: claim.Driver, Pool: d.Claim.Pool, Device: d.Claim.Device}
	if d.Claim.ShareID != "" {
		s.ShareID = &d.Claim.ShareID
	}
	if h != nil {
		data.VLAN = h.VLAN
		ready.Status, ready.Reason, ready.LastTransitionTime = metav1.ConditionTrue, "Attached", metav1.NewTime(h.Since)
		ready.Message = "pod " + h.Pod + " has the device"
		if s.NetworkData = networkData(h); s.NetworkData.InterfaceName != "" {
			ready.Message += " as " + h.Name
		}
	}
	raw, _ := json.Marshal(data)
	s.Conditions, s.Data = []metav1.Condition{ready}, &runtime.RawExtension{Raw: raw}
	return s
}

// networkData returns the interface and addresses of an attachment, or nil before ADD has finished and if h is nil.
func networkData(h *sriov.Holding) *resourceapi.NetworkDeviceData {
	if h == nil || !h.Ready {
		return nil
	}
	n := &resourceapi.NetworkDeviceData{HardwareAddress: h.MAC}
	if h.Userspace == "" && h.MAC != "" {
		n.InterfaceName = h.Name
	}
	for _, ip := range h.IPs[:min(len(h.IPs), maxStatusIPs)] {
		n.IPs = append(n.IPs, ip.String())
	}
	return n
}
