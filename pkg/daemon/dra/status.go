// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"encoding/json"
	"maps"
	"slices"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/watch"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/poddevices"
	"github.com/podlace/podlace/pkg/sriov"
)

const (
	// joinStatus is the time for which the driver collects changes before it writes the status of claims. One ADD writes several files, so the
	// delay avoids several writes of the same status.
	joinStatus = 200 * time.Millisecond
	// statusPace is the pause after a write of claim status. The driver therefore writes the status of claims at most five times per second.
	statusPace = 200 * time.Millisecond
	// statusForbidden is the pause before the next write if the API server refused a write because of a missing permission.
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
	written map[string]string // by UID: comparedText of the claim's status in the API server
	next    time.Time         // no status is written before that time
	backoff wait.Backoff
	warned  bool // the missing permission was logged
}

func newStatusWriter(d *Driver) *statusWriter {
	return &statusWriter{Driver: d, began: time.Now().Truncate(time.Second), written: map[string]string{}, backoff: newBackoff()}
}

// statusLoop writes the status of claims after ADD or DEL has changed a journal. statusLoop runs until ctx is done. ADD does not wait until
// the status is written.
func (d *Driver) statusLoop(ctx context.Context) {
	w := newStatusWriter(d)
	journals := make(chan struct{}, 1)
	go watch.Folder(ctx, sriov.JournalFolder, func(string) {
		select {
		case journals <- struct{}{}:
		default:
		}
	}, d.options.Log)
	for ctx.Err() == nil {
		_, news := d.watchInventory()
		var due <-chan time.Time
		if w.writeAll(ctx); !w.next.IsZero() {
			due = time.After(time.Until(w.next))
		}
		select {
		case <-ctx.Done():
		case <-journals:
		case <-news:
		case <-due:
		}
		select {
		case <-ctx.Done():
		case <-time.After(joinStatus):
		}
	}
}

// writeAll writes the status of each claim whose status has changed. After a failure, writeAll sets w.next to the time of the next attempt.
func (w *statusWriter) writeAll(ctx context.Context) {
	if time.Now().Before(w.next) {
		return
	}
	w.next = time.Time{}
	records, _ := w.records.List() // unreadable records are skipped
	held, err := sriov.Holdings()
	if err != nil {
		w.next = time.Now().Add(lastRetry)
		return
	}
	maps.DeleteFunc(w.written, func(uid, _ string) bool {
		return !slices.ContainsFunc(records, func(r claim.Record) bool { return r.Claim().UID == uid })
	})
	failed := false
	for _, r := range records {
		if ctx.Err() != nil || r.State == claim.Damaged {
			continue
		}
		err := w.writeOne(ctx, r, held)
		if apierrors.IsForbidden(err) {
			w.next = time.Now().Add(statusForbidden)
			if !w.warned {
				w.options.Log.Warn("cannot write the status of claims: the API server refuses it", "error", err, "hint", missingRight)
			}
			w.warned = true
			return
		}
		failed = failed || err != nil
		if w.failures.isDue("status "+r.Claim().UID, err, time.Now()) {
			w.options.Log.Warn("could not write the status of a claim", "claim", r.String(), "error", err)
		}
	}
	if !failed {
		w.backoff = newBackoff()
		return
	}
	w.next = time.Now().Add(w.backoff.Step())
}

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

// wantedStatus returns the desired status of a claim. A device gets an entry only after a pod has attached the device. The argument "had"
// is true if the API server already has entries of this claim.
func (w *statusWriter) wantedStatus(r claim.Record, held []sriov.Holding, had bool) (list []resourceapi.AllocatedDeviceStatus) {
	i := w.latestInventory()
	for _, d := range r.Devices {
		n := slices.IndexFunc(held, func(h sriov.Holding) bool {
			return h.Address.String() == d.ID && h.Claim != nil && h.Claim.UID == d.Claim.UID && h.Ready
		})
		switch {
		case d.Claim.Admin:
		case n >= 0:
			list = append(list, i.deviceStatus(d, &held[n]))
		case had:
			list = append(list, i.deviceStatus(d, nil))
		}
	}
	return list
}

// deviceStatus returns the status of a device. The argument `h` is the attachment of the device, or nil if no pod has the device.
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
		s.NetworkData = &resourceapi.NetworkDeviceData{HardwareAddress: h.MAC}
		if h.MAC != "" { // otherwise a user space program has the VF, without an interface
			s.NetworkData.InterfaceName = h.Name
			ready.Message += " as " + h.Name
		}
		for _, ip := range h.IPs[:min(len(h.IPs), maxStatusIPs)] {
			s.NetworkData.IPs = append(s.NetworkData.IPs, ip.String())
		}
	}
	raw, _ := json.Marshal(data)
	s.Conditions, s.Data = []metav1.Condition{ready}, &runtime.RawExtension{Raw: raw}
	return s
}
