// SPDX-License-Identifier: Apache-2.0

// Package podresources asks the kubelet which devices pods have. Package podresources uses the PodResources API of the kubelet. A CNI
// plugin contains this package, and the plugin is started once for every pod. Package podresources is therefore small and fast: it
// implements only the parts of HTTP/2 and gRPC that one call needs.
//
// The kubelet identifies a pod by its namespace and its name. A pod's name is ambiguous, because an earlier pod may have had the same name.
// The checkpoint of the kubelet's device manager contains the devices for each pod UID. The UID distinguishes two pods with the same name.
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

	"github.com/podlace/podlace/pkg/poddevices"
)

const (
	// The pause between two attempts doubles each time, from firstPause up to longestPause. The kubelet allows 100 calls per second, and a
	// burst of 10 calls. If there are more calls, the kubelet refuses them with the error ResourceExhausted. A restart of the kubelet takes
	// several seconds.
	firstPause   = 20 * time.Millisecond
	longestPause = time.Second

	// listTimeout is the maximum time for List and GetAllocatableResources, including retries.
	listTimeout = 5 * time.Second

	// servicePath is the prefix of the names of all methods of the PodResources API.
	servicePath = "/v1.PodResourcesLister/"
)

var (
	// errNoKubelet means that a kubelet has never run on this node, because the folder of its socket is missing.
	errNoKubelet = errors.New("no kubelet has run on this node")
	// ErrUnknownPod means that the kubelet does not know the pod. A pod without devices does not cause ErrUnknownPod.
	ErrUnknownPod = errors.New("the kubelet does not know the pod")
	// ErrNoUID means that PodResources lists no devices for the pod. The checkpoint cannot confirm that the pod has no devices, because the
	// runtime does not pass the pod's UID.
	ErrNoUID = errors.New("the runtime does not pass the pod's UID")
	// ErrNoCheckpoint means that PodResources lists no devices for the pod and the checkpoint is missing. The kubelet writes no checkpoint
	// if no device plugin has registered.
	ErrNoCheckpoint = errors.New("the checkpoint is missing")

	errOtherPod = errors.New("the list is of another pod of the same name, or only init containers of the pod have devices")
)

// Kubelet contains the paths of a kubelet, and the names of the requested resources.
type Kubelet struct {
	Socket     string
	Checkpoint string
	// Resources contains the names of the requested resources. Only devices of the requested resources are returned. If Resources is nil,
	// the devices of all resources are returned.
	Resources []string
	// Claims is true if pods on the node get devices through ResourceClaims. On a node with ResourceClaims, it is possible that no device
	// plugin runs. A kubelet without device plugins writes no checkpoint.
	Claims bool
}

// At returns the paths of a kubelet with the given root folder, such as /var/lib/kubelet. A kubelet with another root folder still stores
// the checkpoint in /var/lib/kubelet.
func At(dir string) Kubelet {
	return Kubelet{Socket: filepath.Join(dir, "pod-resources/kubelet.sock"),
		Checkpoint: filepath.Join(dir, "device-plugins/kubelet_internal_checkpoint")}
}

// Ask returns the devices of a pod, in the order of its containers. Ask includes the devices of an init container only if the container is
// restartable. Ask retries until ctx ends if the kubelet is not available, refuses a call, or contradicts its own checkpoint. If the UID is
// empty or the checkpoint is missing, Ask identifies the pod only by its name. Without a UID or a checkpoint, Ask returns an error if the
// pod has no devices.
func Ask(ctx context.Context, k Kubelet, namespace, name, uid string) ([]poddevices.Device, error) {
	method := "Get"
	var devices []poddevices.Device
	err := retry(ctx, isTemporary, func() (err error) {
		if devices, err = k.askOnce(ctx, method, namespace, name, uid); method == "Get" && isUnsupported(err) {
			method = "List"
			devices, err = k.askOnce(ctx, method, namespace, name, uid)
		}
		if err != nil {
			err = fmt.Errorf("%s: %w", method, err)
		}
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("ask the kubelet at %s which devices pod %s/%s has: %w", k.Socket, namespace, name, err)
	}
	return devices, nil
}

func (k Kubelet) askOnce(ctx context.Context, method, namespace, name, uid string) ([]poddevices.Device, error) {
	var request []byte // ListPodResourcesRequest has no fields
	if method == "Get" {
		request = appendString(appendString(nil, 1, name), 2, namespace)
	}
	answer, err := sendCall(ctx, k.Socket, servicePath+method, request)
	switch {
	case isUnknownPod(err):
		return nil, fmt.Errorf("%w: %w", ErrUnknownPod, err)
	case errors.Is(err, fs.ErrNotExist) && isMissing(filepath.Dir(k.Socket)):
		return nil, fmt.Errorf("%w: there is no folder %s", errNoKubelet, filepath.Dir(k.Socket))
	case err != nil:
		return nil, err
	}
	pods, err := decodePods(answer)
	if err != nil {
		return nil, err
	}
	pods = slices.DeleteFunc(pods, func(p podMessage) bool { return p.namespace != namespace || p.name != name })
	if len(pods) == 0 {
		return nil, fmt.Errorf("%w: its response does not contain the pod", ErrUnknownPod)
	}
	return k.choosePod(pods, uid)
}

func isMissing(path string) bool {
	_, err := os.Stat(path)
	return errors.Is(err, fs.ErrNotExist)
}

// choosePod selects the pod with the given UID from several pods with the same name. choosePod returns the devices of the pod that it
// selected.
func (k Kubelet) choosePod(pods []podMessage, uid string) ([]poddevices.Device, error) {
	noted, err := readCheckpoint(k.Checkpoint, uid)
	if k.Claims && errors.Is(err, ErrNoCheckpoint) {
		err = nil // no device plugin has registered
	}
	if err != nil && len(pods) > 1 {
		return nil, fmt.Errorf("%d pods have this name, and %w: %w", len(pods), errOtherPod, err)
	}
	noted = k.filterResources(noted)
	var listed []string
	for _, p := range pods {
		devices, containers, err2 := p.decodeContainers()
		if err2 != nil {
			return nil, err2
		}
		devices = k.filterResources(devices)
		switch {
		case err == nil && isConfirmed(devices, containers, noted), err != nil && len(devices) > 0:
			return devices, nil
		case err != nil:
			return nil, fmt.Errorf("the kubelet lists no devices, and its checkpoint does not confirm it: %w", err)
		}
		listed = append(listed, list(devices))
	}
	return nil, fmt.Errorf("the kubelet lists %s, but %s lists %s for UID %s: %w", strings.Join(listed, " or "), k.Checkpoint, list(noted), uid,
		errOtherPod)
}

func (k Kubelet) filterResources(devices []poddevices.Device) []poddevices.Device {
	if k.Resources == nil {
		return devices
	}
	return slices.DeleteFunc(devices, func(d poddevices.Device) bool { return !slices.Contains(k.Resources, d.Resource) })
}

// List returns the devices of all pods, in the order of the pods and their containers.
func List(ctx context.Context, k Kubelet) (held []poddevices.Device, err error) {
	answer, err := k.callWithRetry(ctx, "List")
	if err != nil {
		return nil, err
	}
	pods, err := decodePods(answer)
	if err != nil {
		return nil, err
	}
	for _, p := range pods {
		devices, _, err := p.decodeContainers()
		if err != nil {
			return nil, err
		}
		held = append(held, k.filterResources(devices)...)
	}
	slices.SortStableFunc(held, func(a, b poddevices.Device) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Index, b.Index))
	})
	return held, nil
}

// CPUs returns the exclusive CPUs of the containers of each pod. The key of the returned map is "namespace/name" of the pod.
func CPUs(ctx context.Context, k Kubelet) (map[string][]int64, error) {
	answer, err := k.callWithRetry(ctx, "List")
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
			var c containerMessage
			if err := eachField(message, c.setField); err != nil {
				return nil, err
			}
			of[p.namespace+"/"+p.name] = append(of[p.namespace+"/"+p.name], c.cpus...)
		}
	}
	return of, nil
}

// Allocatable returns all healthy devices, which the kubelet can assign to pods. The list from Allocatable also contains devices that are
// already assigned to running pods.
func Allocatable(ctx context.Context, k Kubelet) ([]poddevices.Device, error) {
	answer, err := k.callWithRetry(ctx, "GetAllocatableResources")
	if err != nil {
		return nil, err
	}
	devices, _, err := decodeAllocatable(answer)
	return k.filterResources(devices), err
}

// AllocatableCPUs returns the CPUs that the kubelet can assign exclusively. The list from AllocatableCPUs also contains the CPUs that are
// already assigned. AllocatableCPUs returns an empty list if the CPU manager does not have the policy "static".
func AllocatableCPUs(ctx context.Context, k Kubelet) ([]int64, error) {
	answer, err := k.callWithRetry(ctx, "GetAllocatableResources")
	if err != nil {
		return nil, err
	}
	_, cpus, err := decodeAllocatable(answer)
	return cpus, err
}

// callWithRetry makes a call. callWithRetry retries if the kubelet refuses the call because of its rate limit, or if the kubelet is just
// starting. If the socket is missing, callWithRetry does not retry, because no kubelet is running.
func (k Kubelet) callWithRetry(ctx context.Context, method string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	canRetry := func(err error) bool { return isTemporary(err) && !isMissing(k.Socket) }
	var answer []byte
	err := retry(ctx, canRetry, func() (err error) {
		answer, err = sendCall(ctx, k.Socket, servicePath+method, nil)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("ask the kubelet at %s: %s: %w", k.Socket, method, err)
	}
	return answer, nil
}

// The function retry() repeats an attempt until the attempt succeeds, until canRetry returns false for its error, or until ctx ends. If ctx
// ends, retry() returns the error of ctx and the last error before the deadline.
func retry(ctx context.Context, canRetry func(error) bool, attempt func() error) error {
	var last error
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		err := attempt()
		if err == nil {
			return nil
		}
		if errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) {
			<-ctx.Done() // this error came from the deadline of ctx, which the connection may see before ctx does
		}
		if last == nil || ctx.Err() == nil { // an error before the deadline explains more than the deadline does
			last = err
		}
		if !canRetry(err) || !sleep(ctx, pause) {
			return withDeadline(ctx, last)
		}
	}
}

func withDeadline(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return fmt.Errorf("%w: %w", ctx.Err(), err)
	}
	return err
}

// isUnsupported reports whether the kubelet does not support Get. Kubelets before version 1.27 do not implement Get. Before Kubernetes
// 1.36, the feature gate KubeletPodResourcesGet can disable Get.
func isUnsupported(err error) bool {
	var s *statusError
	return errors.As(err, &s) && (s.code == codeUnimplemented || s.code == codeUnknown && strings.Contains(s.message, "method disabled"))
}

// isUnknownPod reports whether the error means that the kubelet does not know the pod. For an unknown pod, kubelets up to 1.37 return the
// code Unknown and the text "pod web-0 in namespace shop not found".
func isUnknownPod(err error) bool {
	var s *statusError
	return errors.As(err, &s) && (s.code == codeNotFound || s.code == codeUnknown && strings.HasSuffix(s.message, " not found"))
}

// isTemporary reports whether a retry of the call may succeed. A retry is safe even after an incomplete response, because a call of this
// API changes nothing in the kubelet.
func isTemporary(err error) bool {
	var s *statusError
	if errors.As(err, &s) {
		return s.code == codeResourceExhausted || s.code == codeUnavailable
	}
	// EAGAIN means that the kubelet's socket has a full queue of new connections.
	soon := []error{errOtherPod, io.EOF, io.ErrUnexpectedEOF, syscall.ENOENT, syscall.ECONNREFUSED, syscall.ECONNRESET, syscall.EPIPE,
		syscall.EAGAIN}
	return slices.ContainsFunc(soon, func(e error) bool { return errors.Is(err, e) })
}

// sleep() waits for a random time between half of the pause and the whole pause. Pods that start at the same time therefore retry at
// different times. sleep() returns false if ctx has ended.
func sleep(ctx context.Context, pause time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(jitter(pause)):
		return ctx.Err() == nil
	}
}

func jitter(pause time.Duration) time.Duration { return pause/2 + rand.N(pause/2) }
