// SPDX-License-Identifier: Apache-2.0

// Package poddevices answers which devices a pod has. It asks the SR-IOV device plugin over a unix socket that only root can use. A
// connection carries one question and one answer, a line of JSON each. The sriov plugin links this package and runs at each start of a pod,
// so the package is kept small.
package poddevices

import (
	"errors"
	"time"

	"github.com/podlace/podlace/pkg/vfconfig"
)

// Socket is the path of the device plugin's unix socket.
const Socket = "/run/podlace-sriov/sriov.sock"

// AnswerTimeout is the device plugin's time limit for an answer about one pod.
const AnswerTimeout = 4 * time.Second

// Question asks for the devices of one pod. If the field Pod is empty, the question asks for the devices of all pods.
type Question struct {
	Namespace string `json:"namespace,omitempty"`
	Pod       string `json:"pod,omitempty"`
	UID       string `json:"uid,omitempty"` // UID of the pod, which distinguishes pods with the same name
	// If the list Resources is not empty, the answer about one pod contains only devices of these resources. The list may include resources
	// of other device plugins. An empty list means all resources of this device plugin.
	Resources []string `json:"resources,omitempty"`
	// If Claims is true, the answer also contains the devices that ResourceClaims assigned.
	Claims bool `json:"claims,omitempty"`
	// If Published is true, the answer also contains the content of the node's ResourceSlices. Only a question about all pods may set this
	// field.
	Published bool `json:"published,omitempty"`
}

// Device is a device and the container that uses it. Some fields may be empty. PodResources does not return the pod's UID, and the
// kubelet's checkpoint contains only the UID, not the pod's namespace and name.
type Device struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	UID       string `json:"-"` // of the pod
	Container string `json:"container"`
	Index     int    `json:"index"`    // position of the container in the pod's specification
	Resource  string `json:"resource"` // such as example.com/fast
	ID        string `json:"id"`       // PCI address
	NUMA      []int  `json:"-"`        // NUMA nodes of the device, as reported to the kubelet
	// CPUs are the exclusive CPUs of the container. The list is empty if the container uses shared CPUs.
	CPUs []int64 `json:"cpus,omitempty"`
	// Claim is the ResourceClaim that assigned the device. Claim is nil if the device plugin API assigned the device.
	Claim *Claim `json:"claim,omitempty"`
	// Config is the merged configuration of the DeviceClass and the claim. Config is nil if neither the DeviceClass nor the claim sets any
	// option.
	Config *vfconfig.Config `json:"config,omitempty"`
}

// Claim identifies the ResourceClaim (resource.k8s.io) for which the device was allocated, and the allocation result that contains the
// device.
type Claim struct {
	UID       string `json:"uid"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// PodClaim is the claim's name in spec.resourceClaims of the pod, if Kubernetes generated the claim from a template. PodClaim is empty for
	// any other claim.
	PodClaim string `json:"podClaim,omitempty"`
	Request  string `json:"request"`           // "request", or "request/subrequest"
	Result   int    `json:"result"`            // index in status.allocation.devices.results
	Pool     string `json:"pool"`              // the node's name
	Device   string `json:"device"`            // name in the ResourceSlice
	ShareID  string `json:"shareID,omitempty"` // set if several claims share the device
	// Admin is true for administrative access (adminAccess). In this case, another pod may use the device, so Podlace does not move,
	// configure or bind the device.
	Admin bool `json:"admin,omitempty"`
}

// Answer is the device plugin's answer. If Error is set, the pod's devices are unknown, and the field Devices is not valid.
type Answer struct {
	Devices []Device `json:"devices"`
	// UID is a copy of the question's UID. If the kubelet's checkpoint is readable, Devices contains the devices of the pod with this UID. If
	// the checkpoint is unreadable, Devices contains the devices of the pod with the same name.
	UID string `json:"uid,omitempty"`
	// Resources is a copy of the question's list of resources. The copy confirms that Devices contains all of the pod's devices of these
	// resources.
	Resources []string `json:"resources,omitempty"`
	// Claims is a copy of the field Claims in the question. If Claims is true, the list Devices includes the devices of ResourceClaims.
	Claims bool `json:"claims,omitempty"`
	// Others lists the pod's devices that ResourceClaims assigned and that belong to none of the resources in the question. Others is nil if
	// an older daemon sent the answer.
	Others []Device `json:"others,omitzero"`
	// Faults maps the ID of each unhealthy device to the reason why it is unhealthy. Only the answer to a question about all pods sets Faults.
	Faults map[string]string `json:"faults,omitempty"`
	// Published maps the ID of each published device to its content in the ResourceSlices.
	Published map[string]Published `json:"published,omitempty"`
	Error     string               `json:"error,omitempty"`
	// Uncertain is true if the pod may have a device although the kubelet lists no container that uses this device. If Uncertain is true,
	// Error contains an explanation.
	Uncertain bool `json:"uncertain,omitempty"`
	// Unprepared is true if a claim of the pod is not prepared. The field Error then names the claim.
	Unprepared bool `json:"unprepared,omitempty"`
}

// Published contains the data of one device in a ResourceSlice.
type Published struct {
	Pool       string            `json:"pool"`
	Device     string            `json:"device"`     // name in the slice
	Attributes map[string]string `json:"attributes"` // values as text, by qualified name
	Taints     []string          `json:"taints,omitempty"`
}

// ErrUncertain means that the pod may have a device although the kubelet lists no container that uses this device.
var ErrUncertain = errors.New("the device was allocated, but the kubelet lists no container that has it")

// ErrUnprepared means that a claim of the pod is not prepared or has no record.
var ErrUnprepared = errors.New("the claim is not prepared")

// The type answerError is the Go error for an answer whose field Error is set.
type answerError struct{ answer Answer }

func (r answerError) Error() string { return "the SR-IOV device plugin answers: " + r.answer.Error }

func (r answerError) Is(target error) bool {
	return r.answer.Uncertain && target == ErrUncertain || r.answer.Unprepared && target == ErrUnprepared
}

// Refusal returns the answer with which the device plugin reports an error.
func Refusal(err error) Answer {
	return Answer{Error: err.Error(), Uncertain: errors.Is(err, ErrUncertain), Unprepared: errors.Is(err, ErrUnprepared)}
}
