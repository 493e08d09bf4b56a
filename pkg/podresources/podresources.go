// SPDX-License-Identifier: Apache-2.0

// Package podresources asks the kubelet which devices pods have, by its PodResources API. It is small and quick because a CNI plugin links
// it, that is started for every pod: it speaks the little of HTTP/2 and gRPC that one question needs, without the libraries of these.
//
// The kubelet answers by namespace and name, and a pod of the same name may have been there before. What it wrote down for the pod's UID
// in the checkpoint of its device plugins tells the two apart.
package podresources

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/podlace/podlace/pkg/allocation"
)

const (
	// The pauses before a question is repeated double up to the longest. The kubelet answers 100 questions a second and 10 at once
	// (ResourceExhausted else), and is away for seconds when it restarts.
	firstPause   = 20 * time.Millisecond
	longestPause = time.Second

	// listTimeout is how long the kubelet may take to tell of all its pods, or of what it may give away.
	listTimeout = 5 * time.Second

	// service is what the methods of the API are of.
	service = "/v1.PodResourcesLister/"
)

var (
	// errNoKubelet means that no kubelet ever ran here: the socket's folder is missing.
	errNoKubelet = errors.New("no kubelet was here")
	// ErrUnknownPod is for a pod that the kubelet does not have, which is something else than a pod without devices.
	ErrUnknownPod = errors.New("the kubelet does not know the pod")
	// ErrNoUID is where a pod has no devices by its name, and the runtime does not say its UID.
	ErrNoUID = errors.New("the runtime does not say the pod's UID")
	// ErrNoCheckpoint is where a pod has no devices by its name, and the kubelet has no checkpoint: no device plugin has ever registered.
	ErrNoCheckpoint = errors.New("there is none")

	errOtherPod = errors.New("that is another pod of the same name, or one of which only init containers have devices")
)

// Kubelet has the paths of a kubelet and the wanted resources.
type Kubelet struct {
	Socket     string
	Checkpoint string
	// Resources are the resources whose devices are returned; nil: all.
	Resources []string
	// Claims is set where pods get devices by ResourceClaims. Such a node may have no device plugin, and so no checkpoint.
	Claims bool
}

// At is the kubelet of a root folder, such as /var/lib/kubelet. Where kubelets have another root, the checkpoint is in /var/lib/kubelet all
// the same.
func At(dir string) Kubelet {
	return Kubelet{Socket: filepath.Join(dir, "pod-resources/kubelet.sock"),
		Checkpoint: filepath.Join(dir, "device-plugins/kubelet_internal_checkpoint")}
}

// Ask returns the devices of a pod in the order of its containers, among which are no init containers but those that restart. While the
// kubelet is away, busy, or contradicts its checkpoint, the question is put again until ctx ends. With an empty uid, or without a
// checkpoint, devices are believed by the pod's name alone; that there are none is an error then.
func Ask(ctx context.Context, k Kubelet, namespace, name, uid string) ([]allocation.Device, error) {
	method, last := "Get", error(nil)
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		devices, err := k.once(ctx, method, namespace, name, uid)
		if err == nil {
			return devices, nil
		}
		if method == "Get" && unsupported(err) {
			method = "List"
			continue
		}
		if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) {
			<-ctx.Done() // the only deadline is its own, and connections may see it first
		}
		if last == nil || ctx.Err() == nil { // what was wrong before the time was up says more
			last = fmt.Errorf("%s: %w", method, err)
		}
		if !temporary(err) || !sleep(ctx, pause) {
			return nil, fmt.Errorf("ask the kubelet at %s which devices pod %s/%s has: %w", k.Socket, namespace, name, ended(ctx, last))
		}
	}
}

func ended(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return fmt.Errorf("%w: %w", ctx.Err(), err)
	}
	return err
}

func (k Kubelet) once(ctx context.Context, method, namespace, name, uid string) ([]allocation.Device, error) {
	var request []byte // ListPodResourcesRequest has no fields
	if method == "Get" {
		request = appendString(appendString(nil, 1, name), 2, namespace)
	}
	answer, err := call(ctx, k.Socket, service+method, request)
	switch {
	case unknown(err):
		return nil, fmt.Errorf("%w: %w", ErrUnknownPod, err)
	case errors.Is(err, fs.ErrNotExist) && missing(filepath.Dir(k.Socket)):
		return nil, fmt.Errorf("%w: there is no folder %s", errNoKubelet, filepath.Dir(k.Socket))
	case err != nil:
		return nil, err
	}
	pods, err := decodePods(answer)
	if err != nil {
		return nil, err
	}
	pods = slices.DeleteFunc(pods, func(p pod) bool { return p.namespace != namespace || p.name != name })
	if len(pods) == 0 {
		return nil, fmt.Errorf("%w: it is not in the answer", ErrUnknownPod)
	}
	return k.choose(pods, uid)
}

func missing(path string) bool {
	_, err := os.Stat(path)
	return errors.Is(err, fs.ErrNotExist)
}

// choose returns the devices of the pod with a UID, out of those with its name.
func (k Kubelet) choose(pods []pod, uid string) ([]allocation.Device, error) {
	noted, err := readCheckpoint(k.Checkpoint, uid)
	if k.Claims && errors.Is(err, ErrNoCheckpoint) {
		err = nil // no device plugin has registered
	}
	if err != nil && len(pods) > 1 {
		return nil, fmt.Errorf("%d pods have that name, and %w: %w", len(pods), errOtherPod, err)
	}
	noted = k.wanted(noted)
	var told []string
	for _, p := range pods {
		devices, containers, err2 := p.devices()
		if err2 != nil {
			return nil, err2
		}
		devices = k.wanted(devices)
		switch {
		case err == nil && confirmed(devices, containers, noted), err != nil && len(devices) > 0:
			return devices, nil
		case err != nil:
			return nil, fmt.Errorf("the kubelet tells of no devices, and its checkpoint does not confirm that: %w", err)
		}
		told = append(told, list(devices))
	}
	return nil, fmt.Errorf("the kubelet tells of %s, and %s for UID %s of %s: %w", strings.Join(told, " or "), k.Checkpoint, uid, list(noted),
		errOtherPod)
}

func (k Kubelet) wanted(devices []allocation.Device) []allocation.Device {
	if k.Resources == nil {
		return devices
	}
	return slices.DeleteFunc(devices, func(d allocation.Device) bool { return !slices.Contains(k.Resources, d.Resource) })
}

// List returns the devices that pods have, in the order of pods and containers.
func List(ctx context.Context, k Kubelet) (held []allocation.Device, err error) {
	answer, err := k.repeat(ctx, "List")
	if err != nil {
		return nil, err
	}
	pods, err := decodePods(answer)
	if err != nil {
		return nil, err
	}
	for _, p := range pods {
		devices, _, err := p.devices()
		if err != nil {
			return nil, err
		}
		held = append(held, k.wanted(devices)...)
	}
	slices.SortStableFunc(held, func(a, b allocation.Device) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Index, b.Index))
	})
	return held, nil
}

// CPUs returns the CPUs that the containers of pods have for themselves, by namespace and name of the pod.
func CPUs(ctx context.Context, k Kubelet) (map[string][]int64, error) {
	answer, err := k.repeat(ctx, "List")
	if err != nil {
		return nil, err
	}
	pods, err := decodePods(answer)
	if err != nil {
		return nil, err
	}
	of := map[string][]int64{}
	for _, p := range pods {
		for _, message := range p.containers {
			var c container
			if err := fields(message, c.take); err != nil {
				return nil, err
			}
			of[p.namespace+"/"+p.name] = append(of[p.namespace+"/"+p.name], c.cpus...)
		}
	}
	return of, nil
}

// Allocatable returns the devices that the kubelet may give away: the healthy ones, whether pods have them or not.
func Allocatable(ctx context.Context, k Kubelet) ([]allocation.Device, error) {
	answer, err := k.repeat(ctx, "GetAllocatableResources")
	if err != nil {
		return nil, err
	}
	devices, _, err := decodeAllocatable(answer)
	return k.wanted(devices), err
}

// AllocatableCPUs returns the CPUs that the kubelet may give to containers for themselves, used or not. There are none unless its CPU
// manager has the policy static.
func AllocatableCPUs(ctx context.Context, k Kubelet) ([]int64, error) {
	answer, err := k.repeat(ctx, "GetAllocatableResources")
	if err != nil {
		return nil, err
	}
	_, cpus, err := decodeAllocatable(answer)
	return cpus, err
}

// repeat repeats a question that came too fast after others, or while the kubelet started. Without a socket there is no kubelet to wait
// for.
func (k Kubelet) repeat(ctx context.Context, method string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		answer, err := call(ctx, k.Socket, service+method, nil)
		if err == nil {
			return answer, nil
		}
		if !temporary(err) || missing(k.Socket) || !sleep(ctx, pause) {
			return nil, fmt.Errorf("ask the kubelet at %s: %s: %w", k.Socket, method, err)
		}
	}
}

// unsupported reports whether an error is from a kubelet that does not know Get (before 1.27), or whose feature gate
// KubeletPodResourcesGet is off (before 1.36).
func unsupported(err error) bool {
	var s *statusError
	return errors.As(err, &s) && (s.code == codeUnimplemented || s.code == codeUnknown && strings.Contains(s.message, "method disabled"))
}

// unknown reports whether an error means that the kubelet does not have the pod: "pod web-0 in namespace shop not found", of
// code Unknown up to 1.37.
func unknown(err error) bool {
	var s *statusError
	return errors.As(err, &s) && (s.code == codeNotFound || s.code == codeUnknown && strings.HasSuffix(s.message, " not found"))
}

// temporary reports whether a retry may succeed. The request changes nothing, so a retry is safe even after half a response.
func temporary(err error) bool {
	var s *statusError
	if errors.As(err, &s) {
		return s.code == codeResourceExhausted || s.code == codeUnavailable
	}
	// EAGAIN: more connect than the kubelet has accepted.
	soon := []error{errOtherPod, io.EOF, io.ErrUnexpectedEOF, syscall.ENOENT, syscall.ECONNREFUSED, syscall.ECONNRESET, syscall.EPIPE,
		syscall.EAGAIN}
	return slices.ContainsFunc(soon, func(e error) bool { return errors.Is(err, e) })
}

// sleep waits between half a pause and a whole, so that pods that start together do not ask together again and again. It reports whether
// ctx goes on.
func sleep(ctx context.Context, pause time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(jitter(pause)):
		return ctx.Err() == nil
	}
}

func jitter(pause time.Duration) time.Duration { return pause/2 + rand.N(pause/2) }
