// SPDX-License-Identifier: Apache-2.0

// Package allocation is the protocol by which other programs ask the SR-IOV device plugin for a pod's devices. A connection carries one
// question and one answer, each one line of JSON, over a unix socket that only root can use. The package is small because a CNI plugin
// links it.
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
	// connTimeout is the time limit of a connection, for question and answer together.
	connTimeout = 10 * time.Second
	// maxConcurrent is the number of questions that Serve answers concurrently. Further connections wait.
	maxConcurrent = 64
)

// Question asks for the devices of one pod. An empty Pod asks for the devices of all pods.
type Question struct {
	Namespace string `json:"namespace,omitempty"`
	Pod       string `json:"pod,omitempty"`
	UID       string `json:"uid,omitempty"` // of the pod; it distinguishes pods of the same name
	// Resources limits a question about one pod to these resources, which may belong to other device plugins. Empty means all resources
	// of this device plugin.
	Resources []string `json:"resources,omitempty"`
	// Claims requests the devices of ResourceClaims as well.
	Claims bool `json:"claims,omitempty"`
	// Published requests what the ResourceSlices say about devices. It needs a question about all pods.
	Published bool `json:"published,omitempty"`
}

// Device is a device with the container that has it. Some sources lack fields: PodResources does not contain the pod's UID, and the
// kubelet's checkpoint contains only the UID of the pod.
type Device struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	UID       string `json:"-"` // of the pod
	Container string `json:"container"`
	Index     int    `json:"index"`    // position of the container in the pod's specification
	Resource  string `json:"resource"` // such as example.com/fast
	ID        string `json:"id"`       // PCI address
	NUMA      []int  `json:"-"`        // NUMA nodes of the device, as reported to the kubelet
	// CPUs are the exclusive CPUs of the container. It is empty if the container uses shared CPUs.
	CPUs []int64 `json:"cpus,omitempty"`
	// Claim is the ResourceClaim that assigned the device. It is nil if the device plugin API assigned it.
	Claim *Claim `json:"claim,omitempty"`
	// Config is the merged configuration of the DeviceClass and the claim. It is nil if they set nothing.
	Config *vfconfig.Config `json:"config,omitempty"`
}

// Claim is the ResourceClaim (resource.k8s.io) that a device was allocated for, and the device's place in its results.
type Claim struct {
	UID       string `json:"uid"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// PodClaim is the name in spec.resourceClaims of the pod that the claim was generated for. It is "" for a claim that was not
	// generated.
	PodClaim string `json:"podClaim,omitempty"`
	Request  string `json:"request"`           // "request", or "request/subrequest"
	Result   int    `json:"result"`            // index in status.allocation.devices.results
	Pool     string `json:"pool"`              // the node's name
	Device   string `json:"device"`            // name in the ResourceSlice
	ShareID  string `json:"shareID,omitempty"` // for a device that several claims share
	// Admin marks administrative access (adminAccess): the device stays with the pod that has it, and is never moved, configured or
	// bound.
	Admin bool `json:"admin,omitempty"`
}

// Answer is the device plugin's answer. If Error is set, the devices are unknown and the pod may have some.
type Answer struct {
	Devices []Device `json:"devices"`
	// UID repeats the UID of the question. The devices are those of the pod with this UID if the kubelet's checkpoint is readable,
	// otherwise those of the pod with this name.
	UID string `json:"uid,omitempty"`
	// Resources repeats the resources of the question if Devices contains all their devices.
	Resources []string `json:"resources,omitempty"`
	// Claims repeats the field of the question: Devices includes the devices of ResourceClaims.
	Claims bool `json:"claims,omitempty"`
	// Others are the pod's claimed devices of resources that the question does not name. It is nil from an older daemon.
	Others []Device `json:"others,omitzero"`
	// Faults are the reasons why devices are unhealthy, by device ID. Only an answer about all pods has them.
	Faults map[string]string `json:"faults,omitempty"`
	// Published is the content of the ResourceSlices, by device ID.
	Published map[string]Published `json:"published,omitempty"`
	Error     string               `json:"error,omitempty"`
	// Uncertain explains an Error: the pod may have a device that is not assigned to a known container.
	Uncertain bool `json:"uncertain,omitempty"`
}

// Published is the content of a ResourceSlice for one device.
type Published struct {
	Pool       string            `json:"pool"`
	Device     string            `json:"device"`     // name in the slice
	Attributes map[string]string `json:"attributes"` // values as text, by qualified name
	Taints     []string          `json:"taints,omitempty"`
}

// ErrUncertain means that the pod may have a device that is not assigned to a known container.
var ErrUncertain = errors.New("the device was allocated, but the kubelet lists no container that has it")

// Ask sends a question to the socket and waits for the answer until a deadline. It returns the answer's Error as an error, which is
// ErrUncertain (errors.Is) if the answer is uncertain. Without a daemon the error is fs.ErrNotExist or syscall.ECONNREFUSED, after the
// deadline os.ErrDeadlineExceeded.
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

// answerError is the error of an answer with an Error.
type answerError struct{ answer Answer }

func (r answerError) Error() string        { return "the SR-IOV device plugin answers: " + r.answer.Error }
func (r answerError) Is(target error) bool { return r.answer.Uncertain && target == ErrUncertain }

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

// peer returns the user ID of the client (SO_PEERCRED of unix(7)).
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
