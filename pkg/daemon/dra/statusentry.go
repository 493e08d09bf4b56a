// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"encoding/json"
	"strings"
	"time"

	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	metaac "k8s.io/client-go/applyconfigurations/meta/v1"
	resourceac "k8s.io/client-go/applyconfigurations/resource/v1"

	"github.com/podlace/podlace/pkg/claim"
)

const (
	readyCondition = "Ready"
	reasonAttached = "Attached"
	reasonDetached = "Detached"
	// maxStatusIPs is the maximum number of addresses that the API accepts for one device in the status of a claim.
	maxStatusIPs = 16
)

// statusEntry is the entry of a device in the status of a claim.
type statusEntry struct {
	Pool, Device, ShareID string
	Ready                 bool
	Pod                   string // pod that has the device
	Since                 time.Time
	Interface, MAC        string
	IPs                   []string
	Data                  statusData
}

// statusData is the driver-specific part of a status entry.
type statusData struct {
	Address string `json:"pciAddress"`
	PF      string `json:"pf,omitempty"`
	VF      int    `json:"vf"`
	VLAN    int    `json:"vlan,omitempty"`
}

// messageText returns the message for the condition of a status entry.
func (e statusEntry) messageText() string {
	switch {
	case !e.Ready:
		return "no pod has the device"
	case e.Interface != "":
		return "pod " + e.Pod + " has the device as " + e.Interface
	}
	return "pod " + e.Pod + " has the device"
}

// podOf returns the name of the pod in the message of a status condition.
func podOf(message string) string {
	rest, ok := strings.CutPrefix(message, "pod ")
	pod, _, _ := strings.Cut(rest, " has the device")
	if !ok {
		return ""
	}
	return pod
}

// toApply converts the entry for a server-side apply.
func (e statusEntry) toApply() *resourceac.AllocatedDeviceStatusApplyConfiguration {
	out := resourceac.AllocatedDeviceStatus().WithDriver(claim.Driver).WithPool(e.Pool).WithDevice(e.Device)
	if e.ShareID != "" {
		out.WithShareID(e.ShareID)
	}
	status, reason := metav1.ConditionFalse, reasonDetached
	if e.Ready {
		status, reason = metav1.ConditionTrue, reasonAttached
	}
	out.WithConditions(metaac.Condition().WithType(readyCondition).WithStatus(status).WithReason(reason).WithMessage(e.messageText()).
		WithLastTransitionTime(metav1.NewTime(e.Since)))
	if data, err := json.Marshal(e.Data); err == nil {
		out.WithData(runtime.RawExtension{Raw: data})
	}
	if e.Ready {
		network := resourceac.NetworkDeviceData()
		if e.Interface != "" {
			network.WithInterfaceName(e.Interface)
		}
		if e.MAC != "" {
			network.WithHardwareAddress(e.MAC)
		}
		out.WithNetworkData(network.WithIPs(e.IPs...))
	}
	return out
}

// storedStatus converts the status of a device in the API server to an entry.
func storedStatus(s resourceapi.AllocatedDeviceStatus) statusEntry {
	e := statusEntry{Pool: s.Pool, Device: s.Device}
	if s.ShareID != nil {
		e.ShareID = *s.ShareID
	}
	for _, c := range s.Conditions {
		if c.Type == readyCondition {
			e.Ready = c.Status == metav1.ConditionTrue
			e.Pod = podOf(c.Message)
		}
	}
	if s.Data != nil {
		_ = json.Unmarshal(s.Data.Raw, &e.Data) // an unreadable part is overwritten
	}
	if n := s.NetworkData; n != nil {
		e.Interface, e.MAC, e.IPs = n.InterfaceName, n.HardwareAddress, n.IPs
	}
	return e
}
