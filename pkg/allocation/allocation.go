// SPDX-License-Identifier: Apache-2.0

// Package allocation is how others ask the SR-IOV device plugin which devices a pod was given: one question and one answer, each a JSON
// document of one line, over a unix socket that only root reaches. It is small because a CNI plugin links it.
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

// Socket is where the device plugin answers.
const Socket = "/run/podlace-sriov/sriov.sock"

// Within is how long the device plugin takes at most to answer about one pod.
const Within = 4 * time.Second

const (
	// maxLine is how long a question or an answer may be, in bytes.
	maxLine = 8 << 20
	// patience is how long who has connected may take to ask, and to read the answer.
	patience = 10 * time.Second
	// atOnce is how many questions are answered at a time; others wait.
	atOnce = 64
)

// Question asks for the devices of one pod, or with an empty Pod of all pods.
type Question struct {
	Namespace string `json:"namespace,omitempty"`
	Pod       string `json:"pod,omitempty"`
	UID       string `json:"uid,omitempty"` // of the pod, which may not be the first of its name
	// Resources are those that a question for one pod is about, also of other device plugins; none is all that this one has.
	Resources []string `json:"resources,omitempty"`
	// Claims asks for the devices of ResourceClaims, too.
	Claims bool `json:"claims,omitempty"`
	// Published asks for what ResourceSlices say of devices; only for a question about all pods.
	Published bool `json:"published,omitempty"`
}

// Device is a device and the container that has it, as far as the source knows: PodResources does not tell the pod's UID, and the kubelet's
// checkpoint tells nothing else of the pod.
type Device struct {
	Namespace string `json:"namespace"`
	Pod       string `json:"pod"`
	UID       string `json:"-"` // of the pod
	Container string `json:"container"`
	Index     int    `json:"index"`    // of the container among those of the pod, in the order of the pod's specification
	Resource  string `json:"resource"` // such as example.com/fast
	ID        string `json:"id"`       // its PCI address
	NUMA      []int  `json:"-"`        // the NUMA nodes that it is near to, as the kubelet was told
	// CPUs are those that the container has for itself, none if it shares them with others.
	CPUs []int64 `json:"cpus,omitempty"`
	// Claim is that by which the pod has the device; nil where the device plugin API gave it to a container.
	Claim *Claim `json:"claim,omitempty"`
	// Config is what the class and the claim set of the device, merged; nil for nothing.
	Config *vfconfig.Config `json:"config,omitempty"`
}

// Claim is the ResourceClaim of resource.k8s.io that a device was allocated by, and the place of the device in it.
type Claim struct {
	UID       string `json:"uid"`
	Namespace string `json:"namespace"`
	Name      string `json:"name"`
	// PodClaim is the name of the claim in spec.resourceClaims of the pod that it was generated for; "" for another one.
	PodClaim string `json:"podClaim,omitempty"`
	Request  string `json:"request"`           // "request", or "request/subrequest"
	Result   int    `json:"result"`            // index in status.allocation.devices.results
	Pool     string `json:"pool"`              // the node
	Device   string `json:"device"`            // the name in the ResourceSlice
	ShareID  string `json:"shareID,omitempty"` // of a device that claims share
	// Admin is for access that leaves the device to the pod that has it: it is never moved, set or bound.
	Admin bool `json:"admin,omitempty"`
}

// Answer is what the device plugin knows. With an Error the devices are unknown: the pod may have some.
type Answer struct {
	Devices []Device `json:"devices"`
	// UID is that of the question. The devices are those of the pod with this UID if the kubelet's checkpoint is readable, else of the pod
	// with the name.
	UID string `json:"uid,omitempty"`
	// Resources are those of the question, if all their devices are among these.
	Resources []string `json:"resources,omitempty"`
	// Claims is that of the question: devices of ResourceClaims are among these.
	Claims bool `json:"claims,omitempty"`
	// Others are devices that the pod has by claims, of resources that the question does not name; nil from an older daemon.
	Others []Device `json:"others,omitzero"`
	// Faults are why devices are not healthy, by ID; only who asks for all pods is told.
	Faults map[string]string `json:"faults,omitempty"`
	// Published is what ResourceSlices should say of devices, by ID.
	Published map[string]Published `json:"published,omitempty"`
	Error     string               `json:"error,omitempty"`
	// Uncertain goes with an Error: the pod may have a device that no container is known to have.
	Uncertain bool `json:"uncertain,omitempty"`
}

// Published is what a ResourceSlice says of a device.
type Published struct {
	Pool       string            `json:"pool"`
	Device     string            `json:"device"`     // its name in the slice
	Attributes map[string]string `json:"attributes"` // by name with domain, as text
	Taints     []string          `json:"taints,omitempty"`
}

// ErrUncertain is for a pod that may have a device that no container is known to have.
var ErrUncertain = errors.New("it was handed out, and the kubelet names no container that has it")

// Ask puts a question to the socket, and waits for the answer until a time. An answer with an error becomes an error, which is ErrUncertain
// (errors.Is) if the answer is uncertain. Without a daemon the error is fs.ErrNotExist or syscall.ECONNREFUSED, after the deadline
// os.ErrDeadlineExceeded.
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
		return Answer{}, refusal{a}
	}
	return a, nil
}

// refusal is an answer with an error.
type refusal struct{ answer Answer }

func (r refusal) Error() string        { return "the SR-IOV device plugin answers: " + r.answer.Error }
func (r refusal) Is(target error) bool { return r.answer.Uncertain && target == ErrUncertain }

// Serve answers questions until ctx is done.
func Serve(ctx context.Context, l *net.UnixListener, answer func(context.Context, Question) Answer, log *slog.Logger) {
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	free := make(chan struct{}, atOnce)
	for {
		conn, err := l.AcceptUnix()
		if ctx.Err() != nil {
			return
		}
		if err != nil { // too many open files, say
			log.Warn("a question could not be taken", "error", err)
			time.Sleep(100 * time.Millisecond)
			continue
		}
		free <- struct{}{}
		go func() {
			defer func() { <-free }()
			defer conn.Close()
			if err := serve(ctx, conn, answer); err != nil && !errors.Is(err, io.EOF) { // who only looks whether somebody is there asks nothing
				log.Warn("a question was not answered", "error", err)
			}
		}()
	}
}

func serve(ctx context.Context, conn *net.UnixConn, answer func(context.Context, Question) Answer) error {
	if err := conn.SetDeadline(time.Now().Add(patience)); err != nil {
		return err
	}
	uid, err := peer(conn)
	if err != nil {
		return err
	}
	var q Question
	err = read(conn, &q) // a question that is not read would take the answer along when the connection is closed
	if uid != 0 && int(uid) != os.Geteuid() {
		return errors.Join(fmt.Errorf("user %d asked, who is not root", uid), write(conn, Answer{Error: "only root may ask"}))
	}
	if err != nil {
		return errors.Join(err, write(conn, Answer{Error: "want a question: " + err.Error()}))
	}
	return write(conn, answer(ctx, q))
}

// peer returns the user at the other end (SO_PEERCRED of unix(7)).
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
		return 0, fmt.Errorf("who asks: %w", err)
	}
	return cred.Uid, nil
}

func write(conn io.Writer, v any) error { return json.NewEncoder(conn).Encode(v) } // ends with a newline

func read(conn io.Reader, v any) error {
	line, err := bufio.NewReader(io.LimitReader(conn, maxLine)).ReadBytes('\n')
	if err != nil {
		return fmt.Errorf("read a line of at most %d bytes: %w", maxLine, err)
	}
	return json.Unmarshal(line, v)
}
