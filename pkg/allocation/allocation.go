// SPDX-License-Identifier: Apache-2.0

// Package allocation defines a protocol: other programs ask the SR-IOV device plugin which devices a pod has. A connection carries one
// question and one answer over a unix socket that only root can use. The question and the answer are one line of JSON each. The sriov
// plugin, which runs at each start of a pod, contains this package. The package is small, so that the process of the sriov plugin starts
// quickly.
package allocation

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"syscall"
	"time"

	"github.com/podlace/podlace/pkg/vfconfig"
)

// Socket is the path of the device plugin's unix socket.
const Socket = "/run/podlace-sriov/sriov.sock"

// AnswerTimeout is the device plugin's time limit for an answer about one pod.
const AnswerTimeout = 4 * time.Second

const (
	// maxLine is the largest question or answer in bytes.
	maxLine = 8 << 20
	// connTimeout limits the total time of a connection, from the question to the end of the answer.
	connTimeout = 10 * time.Second
	// maxConcurrent is the number of questions that Serve answers concurrently. Further connections wait in a queue.
	maxConcurrent = 64
)

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

// Ask sends a question to the socket and waits for the answer until a deadline. If the field Error of the answer is set, Ask returns a Go
// error with the same text. If the field Uncertain is also true, the Go error matches ErrUncertain (errors.Is). If the field Unprepared is
// also true, the Go error matches ErrUnprepared. If no daemon listens, the Go error matches fs.ErrNotExist or syscall.ECONNREFUSED. After
// the deadline, the Go error matches os.ErrDeadlineExceeded.
func Ask(socket string, until time.Time, q Question) (a Answer, err error) {
	conn, err := dial(socket, until)
	if err != nil {
		return a, fmt.Errorf("ask the SR-IOV device plugin: %w", err)
	}
	defer conn.Close()
	if err := errors.Join(write(conn, q), read(conn, &a)); err != nil {
		return Answer{}, fmt.Errorf("ask the SR-IOV device plugin: %w", err)
	}
	if a.Error != "" {
		return Answer{}, answerError{a}
	}
	return a, nil
}

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

// Serve answers questions until ctx is done.
func Serve(ctx context.Context, l *net.UnixListener, answer func(context.Context, Question) Answer, log *slog.Logger) {
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	free := make(chan struct{}, maxConcurrent)
	for {
		conn, err := l.AcceptUnix()
		if ctx.Err() != nil {
			return
		}
		if err != nil { // for example: too many open files
			log.Warn("could not accept a connection; retrying", "error", err)
			time.Sleep(100 * time.Millisecond)
			continue
		}
		free <- struct{}{}
		go func() {
			defer func() { <-free }()
			defer conn.Close()
			if err := serve(ctx, conn, answer); err != nil && !errors.Is(err, io.EOF) { // a client that only probes the socket sends no question
				log.Warn("could not answer a question", "error", err)
			}
		}()
	}
}

func serve(ctx context.Context, conn *net.UnixConn, answer func(context.Context, Question) Answer) error {
	if err := conn.SetDeadline(time.Now().Add(connTimeout)); err != nil {
		return err
	}
	uid, err := peer(conn)
	if err != nil {
		return err
	}
	var q Question
	err = read(conn, &q) // read before any answer: closing a socket with unread data would discard the answer
	if uid != 0 && int(uid) != os.Geteuid() {
		return errors.Join(fmt.Errorf("user %d is not root", uid), write(conn, Answer{Error: "only root may ask"}))
	}
	if err != nil {
		return errors.Join(err, write(conn, Answer{Error: "want a question: " + err.Error()}))
	}
	return write(conn, answer(ctx, q))
}

// peer() returns the user ID of the client (SO_PEERCRED of unix(7)).
func peer(conn *net.UnixConn) (uid uint32, err error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *syscall.Ucred
	control := raw.Control(func(fd uintptr) {
		cred, err = syscall.GetsockoptUcred(int(fd), syscall.SOL_SOCKET, syscall.SO_PEERCRED)
	})
	if err := errors.Join(control, err); err != nil {
		return 0, fmt.Errorf("read the client's user ID: %w", err)
	}
	return cred.Uid, nil
}

func write(conn io.Writer, v any) error { return json.NewEncoder(conn).Encode(v) } // Encode appends the newline

func read(conn io.Reader, v any) error {
	line, err := bufio.NewReader(io.LimitReader(conn, maxLine)).ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("read a line of at most %d bytes: %w", maxLine, err)
	}
	return json.Unmarshal(line, v)
}
