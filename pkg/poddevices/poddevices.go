// SPDX-License-Identifier: Apache-2.0

// Package poddevices asks the SR-IOV device plugin which devices a pod has, over a unix socket for root alone. A connection carries one
// question and one answer, a line of JSON each. The package is kept small because each start of a pod loads it with the sriov plugin.
package poddevices

import (
	"errors"
	"time"

	"github.com/podlace/podlace/pkg/vfconfig"
)

// Socket is the path of the device plugin's unix socket.
const Socket = "/run/podlace-sriov/sriov.sock"

// AnswerTimeout is the time that the device plugin has for an answer about one pod.
const AnswerTimeout = 4 * time.Second

// Question asks for the devices of one pod, or of all pods if Pod is empty.
type Question struct {
	Namespace string `json:"namespace,omitempty"`
	Pod       string `json:"pod,omitempty"`
	UID       string `json:"uid,omitempty"` // UID of the pod, which distinguishes pods with the same name
	// Resources limits the answer about one pod to devices of these resources, which may belong to other device plugins. Empty means
	// all resources of this device plugin.
	Resources []string `json:"resources,omitempty"`
	// Published asks also for the content of the node's ResourceSlices. Valid only in a question about all pods.
	Published bool `json:"published,omitempty"`
	// Node asks only for what the kubelet can assign to pods.
	Node bool `json:"node,omitempty"`
}

// Device is a device and the container that uses it. Fields may be empty: PodResources does not return the pod's UID, and the kubelet's
// checkpoint has only the UID, not the pod's namespace and name.
type Device struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	UID       string `json:"-"` // of the pod
	Container string `json:"container"`
	Index     int    `json:"index"`    // position of the container in the pod's specification
	Resource  string `json:"resource"` // such as example.com/fast
	ID        string `json:"id"`       // PCI address
	NUMA      []int  `json:"-"`        // NUMA nodes of the device, as reported to the kubelet
	// CPUs are the exclusive CPUs of the container, none if it uses shared CPUs.
	CPUs []int64 `json:"cpus,omitempty"`
	// Claim is the ResourceClaim that assigned the device, or nil if the device plugin API did.
	Claim *Claim `json:"claim,omitempty"`
	// Config merges the DeviceClass and the claim, or is nil if neither sets anything.
	Config *vfconfig.Config `json:"config,omitempty"`
}

// Claim identifies the ResourceClaim (resource.k8s.io) of a device and its allocation result.
type Claim struct {
	UID       string `json:"uid"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// PodClaim is the claim's name in spec.resourceClaims of the pod if Kubernetes generated the claim from a template, or else empty.
	PodClaim string `json:"podClaim,omitempty"`
	Request  string `json:"request"`           // "request", or "request/subrequest"
	Result   int    `json:"result"`            // index in status.allocation.devices.results
	Pool     string `json:"pool"`              // the node's name
	Device   string `json:"device"`            // name in the ResourceSlice
	ShareID  string `json:"shareID,omitempty"` // set if several claims share the device
	// Admin marks administrative access (adminAccess). Another pod may use the device, so Podlace does not move, configure or bind it.
	Admin bool `json:"admin,omitempty"`
}

// Answer is the device plugin's answer. If Error is set, the pod's devices are unknown and Devices is not valid.
type Answer struct {
	Devices []Device `json:"devices"`
	// Others lists the pod's devices from ResourceClaims that belong to none of the resources in the question.
	Others []Device `json:"others,omitempty"`
	// Faults maps the ID of each unhealthy device to the reason. Only the answer to a question about all pods has it.
	Faults map[string]string `json:"faults,omitempty"`
	// Published maps the ID of each published device to its content in the ResourceSlices.
	Published map[string]Published `json:"published,omitempty"`
	Node      Node                 `json:"node,omitzero"`
	Error     string               `json:"error,omitempty"`
	Cause     Cause                `json:"cause,omitempty"` // of the error, if it is one of the causes below
}

// Node lists what the kubelet can assign to pods, including what they already have.
type Node struct {
	Devices   []Assignable `json:"devices"` // of all device plugins
	CPUs      []int64      `json:"cpus"`    // empty unless the CPU manager has the policy "static"
	TakenCPUs []int64      `json:"takenCPUs"`
}

// Assignable is a healthy device that the kubelet can assign to a pod.
type Assignable struct {
	Resource string `json:"resource"`
	ID       string `json:"id"`
	NUMA     []int  `json:"numa"`
	Taken    bool   `json:"taken"`
}

// Published is the data of one device in a ResourceSlice.
type Published struct {
	Pool       string            `json:"pool"`
	Device     string            `json:"device"`     // name in the slice
	Attributes map[string]string `json:"attributes"` // values as text, by qualified name
	Taints     []string          `json:"taints,omitempty"`
}

// Cause is an error that callers recognise with errors.Is, even after it has crossed the socket.
type Cause string

func (c Cause) Error() string { return string(c) }

const (
	// ErrUncertain means that the pod may have a device that the kubelet lists for no container.
	ErrUncertain Cause = "the device was allocated, but the kubelet lists no container that has it"
	// ErrUnprepared means that a claim of the pod is not prepared or has no record.
	ErrUnprepared Cause = "the claim is not prepared"
	// ErrNoUID means that the kubelet lists no devices for the pod, and that its checkpoint cannot confirm this without a UID.
	ErrNoUID Cause = "the runtime does not pass the pod's UID"
	// ErrNoCheckpoint means that the kubelet lists no devices for the pod and has no checkpoint, as before the first device plugin
	// registers.
	ErrNoCheckpoint Cause = "the checkpoint is missing"
	// ErrNoProgram means that Program is not installed.
	ErrNoProgram Cause = Program + ", which asks the kubelet in place of the device plugin, is not installed"
)

type answerError struct{ answer Answer }

func (e answerError) Error() string { return e.answer.Error }

func (e answerError) Is(target error) bool { return target == e.answer.Cause }

// err returns the error of an answer, which matches its Cause.
func (a Answer) err() error {
	if a.Error == "" {
		return nil
	}
	return answerError{a}
}

// Refusal returns the answer that carries an error.
func Refusal(err error) Answer {
	a := Answer{Error: err.Error()}
	_ = errors.As(err, &a.Cause)
	return a
}
