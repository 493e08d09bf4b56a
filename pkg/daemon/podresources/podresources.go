// SPDX-License-Identifier: Apache-2.0

// Package podresources asks the kubelet which devices pods have, by its PodResources API. The device plugin links it, and so does the
// program that the sriov plugin starts while the device plugin does not answer.
//
// The kubelet identifies a pod by namespace and name, which an earlier pod may have had, too. Ask therefore compares its answer with
// the checkpoint of its device manager, which goes by the UID of the pod.
package podresources

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/status"
	api "k8s.io/kubelet/pkg/apis/podresources/v1"

	"github.com/podlace/podlace/pkg/poddevices"
)

const (
	// The pause between two attempts doubles from firstPause up to longestPause. The kubelet allows 100 calls per second and a burst of
	// 10, refuses more with ResourceExhausted, and takes several seconds to restart.
	firstPause   = 20 * time.Millisecond
	longestPause = time.Second

	// listTimeout is the maximum time for List and GetAllocatableResources, including retries.
	listTimeout = 5 * time.Second

	// maxResponse is the maximum size of a response in bytes, as of the kubelet's own client (defaultPodResourcesMaxSize). The kubelet sends
	// about 2 KB for each pod.
	maxResponse = 16 << 20
)

var (
	// errNoKubelet means that a kubelet has never run on this node, because the folder of its socket is missing.
	errNoKubelet = errors.New("no kubelet has run on this node")
	// ErrUnknownPod means that the kubelet does not know the pod. A pod without devices does not cause ErrUnknownPod.
	ErrUnknownPod = errors.New("the kubelet does not know the pod")
	errOtherPod   = errors.New("the list is of another pod of the same name, or only init containers of the pod have devices")
)

// Kubelet contains the paths of a kubelet, and the names of the requested resources.
type Kubelet struct {
	Socket     string
	Checkpoint string
	// Resources limits the answer to devices of these resources; nil means all.
	Resources []string
	// Claims is true if pods on the node get devices through ResourceClaims. Then there may be no device plugin, without which the
	// kubelet writes no checkpoint.
	Claims bool
}

// At returns the paths of a kubelet with this root folder, such as /var/lib/kubelet, where the checkpoint always is.
func At(dir string) Kubelet {
	return Kubelet{Socket: filepath.Join(dir, "pod-resources/kubelet.sock"),
		Checkpoint: filepath.Join(dir, "device-plugins/kubelet_internal_checkpoint")}
}

// call makes a call on a new connection, because the library waits before it connects to a restarted kubelet again.
func call[T any](k Kubelet, method func(api.PodResourcesListerClient) (T, error)) (answer T, err error) {
	conn, err := grpc.NewClient("unix://"+k.Socket, grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultCallOptions(grpc.MaxCallRecvMsgSize(maxResponse)))
	if err != nil {
		return answer, err
	}
	defer conn.Close()
	answer, err = method(api.NewPodResourcesListerClient(conn))
	if status.Code(err) == codes.ResourceExhausted && strings.Contains(err.Error(), "larger than max") { // refused here, not by the kubelet
		err = fmt.Errorf("the answer is larger than %d bytes: %s", maxResponse, status.Convert(err).Message())
	}
	return answer, err
}

func (k Kubelet) get(ctx context.Context, namespace, name string) ([]*api.PodResources, error) {
	answer, err := call(k, func(c api.PodResourcesListerClient) (*api.GetPodResourcesResponse, error) {
		return c.Get(ctx, &api.GetPodResourcesRequest{PodNamespace: namespace, PodName: name})
	})
	return []*api.PodResources{answer.GetPodResources()}, err
}

func (k Kubelet) list(ctx context.Context) ([]*api.PodResources, error) {
	answer, err := call(k, func(c api.PodResourcesListerClient) (*api.ListPodResourcesResponse, error) {
		return c.List(ctx, &api.ListPodResourcesRequest{})
	})
	return answer.GetPodResources(), err
}

// Ask returns the devices of a pod in the order of its containers, with init containers only if restartable. It retries until ctx ends
// if the kubelet is not available, refuses a call, or contradicts its own checkpoint. Without a UID or a checkpoint, it goes by the
// pod's name alone and fails if the pod has no devices.
func Ask(ctx context.Context, k Kubelet, namespace, name, uid string) (devices []poddevices.Device, err error) {
	method := "Get"
	request := func(ctx context.Context) ([]*api.PodResources, error) { return k.get(ctx, namespace, name) }
	err = retry(ctx, isTemporary, func() error {
		pods, err := request(ctx)
		if isUnsupported(err) && method == "Get" {
			method, request = "List", k.list
			pods, err = request(ctx)
		}
		if err == nil {
			devices, err = k.choosePod(pods, namespace, name, uid)
		} else {
			err = k.explain(err)
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

// explain adds to the error of a call what it means, if that is known.
func (k Kubelet) explain(err error) error {
	switch {
	case isUnknownPod(err):
		return fmt.Errorf("%w: %w", ErrUnknownPod, err)
	case status.Code(err) == codes.Unavailable && isMissing(filepath.Dir(k.Socket)):
		return fmt.Errorf("%w: there is no folder %s", errNoKubelet, filepath.Dir(k.Socket))
	}
	return err
}

func isMissing(path string) bool {
	_, err := os.Stat(path)
	return errors.Is(err, fs.ErrNotExist)
}

// choosePod returns the devices of the pod with the given name and UID. Several pods may have the same name.
func (k Kubelet) choosePod(pods []*api.PodResources, namespace, name, uid string) ([]poddevices.Device, error) {
	pods = slices.DeleteFunc(pods, func(p *api.PodResources) bool { return p.GetNamespace() != namespace || p.GetName() != name })
	if len(pods) == 0 {
		return nil, fmt.Errorf("%w: its response does not contain the pod", ErrUnknownPod)
	}
	noted, err := readCheckpoint(k.Checkpoint, uid)
	if k.Claims && errors.Is(err, poddevices.ErrNoCheckpoint) {
		err = nil // no device plugin has registered
	}
	if err != nil && len(pods) > 1 {
		return nil, fmt.Errorf("%d pods have this name, and %w: %w", len(pods), errOtherPod, err)
	}
	noted = slices.DeleteFunc(noted, func(d poddevices.Device) bool { return !k.wants(d.Resource) })
	var listed []string
	for _, p := range pods {
		devices, containers := k.devicesOf(p)
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

// devicesOf returns the devices of a pod, and the names of its containers.
func (k Kubelet) devicesOf(p *api.PodResources) (devices []poddevices.Device, containers []string) {
	for i, c := range p.GetContainers() {
		containers = append(containers, c.GetName())
		for _, d := range k.wanted(c.GetDevices()) {
			d.Namespace, d.Pod, d.Container, d.Index, d.CPUs = p.GetNamespace(), p.GetName(), c.GetName(), i, c.GetCpuIds()
			devices = append(devices, d)
		}
	}
	return devices, containers
}

func (k Kubelet) wants(resource string) bool {
	return k.Resources == nil || slices.Contains(k.Resources, resource)
}

// wanted returns the devices of the requested resources.
func (k Kubelet) wanted(of []*api.ContainerDevices) (devices []poddevices.Device) {
	for _, d := range of {
		if !k.wants(d.GetResourceName()) {
			continue
		}
		var nodes []int
		for _, n := range d.GetTopology().GetNodes() {
			nodes = append(nodes, int(n.GetID()))
		}
		for _, id := range d.GetDeviceIds() {
			devices = append(devices, poddevices.Device{Resource: d.GetResourceName(), ID: id, NUMA: nodes})
		}
	}
	return devices
}

// List returns the devices of all pods, in the order of the pods and their containers.
func List(ctx context.Context, k Kubelet) (held []poddevices.Device, err error) {
	pods, err := withRetry(ctx, k, "List", k.list)
	for _, p := range pods {
		devices, _ := k.devicesOf(p)
		held = append(held, devices...)
	}
	slices.SortStableFunc(held, func(a, b poddevices.Device) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Pod, b.Pod), cmp.Compare(a.Index, b.Index))
	})
	return held, err
}

// CPUs returns the exclusive CPUs of the containers of each pod. The key of the returned map is "namespace/name" of the pod.
func CPUs(ctx context.Context, k Kubelet) (map[string][]int64, error) {
	pods, err := withRetry(ctx, k, "List", k.list)
	of := map[string][]int64{}
	for _, p := range pods {
		for _, c := range p.GetContainers() {
			of[p.GetNamespace()+"/"+p.GetName()] = append(of[p.GetNamespace()+"/"+p.GetName()], c.GetCpuIds()...)
		}
	}
	return of, err
}

// Allocatable returns all healthy devices and CPUs that the kubelet can assign, including those that pods have. It can assign CPUs only
// with the CPU manager's policy "static".
func Allocatable(ctx context.Context, k Kubelet) (devices []poddevices.Device, cpus []int64, err error) {
	answer, err := withRetry(ctx, k, "GetAllocatableResources", func(ctx context.Context) (*api.AllocatableResourcesResponse, error) {
		return call(k, func(c api.PodResourcesListerClient) (*api.AllocatableResourcesResponse, error) {
			return c.GetAllocatableResources(ctx, &api.AllocatableResourcesRequest{})
		})
	})
	return k.wanted(answer.GetDevices()), answer.GetCpuIds(), err
}

// Node returns what the kubelet can assign, and what of it pods have.
func Node(ctx context.Context, k Kubelet) (n poddevices.Node, err error) {
	devices, cpus, err := Allocatable(ctx, k)
	if err != nil {
		return n, err
	}
	pods, err := withRetry(ctx, k, "List", k.list)
	var held []poddevices.Device
	for _, p := range pods {
		of, _ := k.devicesOf(p)
		held = append(held, of...)
		for _, c := range p.GetContainers() {
			n.TakenCPUs = append(n.TakenCPUs, c.GetCpuIds()...)
		}
	}
	n.CPUs = cpus
	for _, d := range devices {
		isTaken := slices.ContainsFunc(held, func(h poddevices.Device) bool { return h.Resource == d.Resource && h.ID == d.ID })
		n.Devices = append(n.Devices, poddevices.Assignable{Resource: d.Resource, ID: d.ID, NUMA: d.NUMA, Taken: isTaken})
	}
	return n, err
}

// withRetry makes a call, and retries if the kubelet limits the rate or is just starting. A missing socket means that no kubelet is
// running, so it does not retry.
func withRetry[T any](ctx context.Context, k Kubelet, method string, attempt func(context.Context) (T, error)) (answer T, err error) {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	canRetry := func(err error) bool { return isTemporary(err) && !isMissing(k.Socket) }
	err = retry(ctx, canRetry, func() (err error) {
		answer, err = attempt(ctx)
		return err
	})
	if err != nil {
		err = fmt.Errorf("ask the kubelet at %s: %s: %w", k.Socket, method, err)
	}
	return answer, err
}

// retry repeats an attempt until it succeeds, canRetry returns false for its error, or ctx ends. It then returns the error of ctx with
// the last one before.
func retry(ctx context.Context, canRetry func(error) bool, attempt func() error) error {
	var last error
	for pause := firstPause; ; pause = min(2*pause, longestPause) {
		err := attempt()
		if err == nil {
			return nil
		}
		if status.Code(err) == codes.DeadlineExceeded {
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

// isUnsupported reports whether the kubelet does not support Get, which it lacks before 1.27 and which the feature gate
// KubeletPodResourcesGet can disable before 1.36.
func isUnsupported(err error) bool {
	s := status.Convert(err)
	return s.Code() == codes.Unimplemented || s.Code() == codes.Unknown && strings.Contains(s.Message(), "method disabled")
}

// isUnknownPod reports whether the kubelet does not know the pod. Up to 1.37, it then returns the code Unknown and the text "pod web-0
// in namespace shop not found".
func isUnknownPod(err error) bool {
	s := status.Convert(err)
	return s.Code() == codes.NotFound || s.Code() == codes.Unknown && strings.HasSuffix(s.Message(), " not found")
}

// isTemporary reports whether a retry may succeed. Unavailable is the library's code for every failure of the connection, and the
// kubelet may write its checkpoint soon.
func isTemporary(err error) bool {
	code := status.Code(err)
	return code == codes.ResourceExhausted || code == codes.Unavailable || errors.Is(err, errOtherPod) ||
		errors.Is(err, poddevices.ErrNoCheckpoint)
}

// sleep waits for half of the pause to all of it, at random, so that pods that start together retry at different times. It returns
// false if ctx has ended.
func sleep(ctx context.Context, pause time.Duration) bool {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(jitter(pause)):
		return ctx.Err() == nil
	}
}

func jitter(pause time.Duration) time.Duration { return pause/2 + rand.N(pause/2) }
