// SPDX-License-Identifier: Apache-2.0

package dra_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	core "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"

	"github.com/podlace/podlace/integration/harness/node"
)

// said is the command of each container. It first prints the interfaces and the environment variables that list the container's VFs.
const said = `echo "interfaces:" $(ls /sys/class/net); env | grep ^PCIDEVICE; trap "exit 0" TERM; while :; do sleep 3600 & wait $!; done`

// create creates the objects of a YAML text in the test's namespace, with defaults. Cluster-scoped ones are deleted at the end of the test.
func (l *lab) create(text string) {
	l.Helper()
	if err := l.tryCreate(text); err != nil {
		l.Fatal(err)
	}
}

func (l *lab) tryCreate(text string) error {
	objects, err := decode([]byte(text))
	if err != nil {
		return fmt.Errorf("%s: %w", text, err)
	}
	for _, o := range objects {
		l.fill(o)
		r := resourceOf(l.objects, o)
		if _, err := r.Create(context.Background(), o, metav1.CreateOptions{}); err != nil {
			return fmt.Errorf("create %s %s: %w", o.GetKind(), o.GetName(), err)
		}
		if o.GetNamespace() == "" {
			l.Cleanup(func() { _ = r.Delete(context.Background(), o.GetName(), metav1.DeleteOptions{}) })
		}
	}
	return nil
}

func (l *lab) fill(o *unstructured.Unstructured) {
	versions := map[string]string{"Pod": "v1", "Namespace": "v1", "DaemonSet": "apps/v1"}
	if o.GetAPIVersion() == "" {
		o.SetAPIVersion("resource.k8s.io/v1")
		if v := versions[o.GetKind()]; v != "" {
			o.SetAPIVersion(v)
		}
	}
	if !slices.Contains([]string{"DeviceClass", "ResourceSlice", "DeviceTaintRule", "Namespace", "ValidatingAdmissionPolicy",
		"ValidatingAdmissionPolicyBinding"}, o.GetKind()) && o.GetNamespace() == "" {
		o.SetNamespace(l.ns)
	}
	if o.GetKind() == "Pod" {
		fillPod(o)
	}
}

func fillPod(o *unstructured.Unstructured) {
	spec, _ := o.Object["spec"].(map[string]any)
	setDefault(spec, "terminationGracePeriodSeconds", int64(1))
	setDefault(spec, "automountServiceAccountToken", false)
	setDefault(spec, "enableServiceLinks", false)
	setDefault(spec, "containers", []any{map[string]any{}})
	list, _ := spec["containers"].([]any)
	for _, c := range list {
		c := c.(map[string]any)
		setDefault(c, "name", "app")
		setDefault(c, "image", node.Image)
		setDefault(c, "imagePullPolicy", "Never")
		setDefault(c, "command", []any{"/bin/sh", "-c", said})
	}
}

func setDefault(of map[string]any, key string, value any) {
	if _, ok := of[key]; !ok {
		of[key] = value
	}
}

// claim creates a ResourceClaim with one VF for each request.
func (l *lab) claim(name string, requests ...string) {
	l.Helper()
	l.create("{kind: ResourceClaim, metadata: {name: " + name + "}, spec: {devices: {requests: [" + l.exactly(requests...) + "]}}}")
}

// template creates a ResourceClaimTemplate with one VF for each request.
func (l *lab) template(name string, requests ...string) {
	l.Helper()
	l.create("{kind: ResourceClaimTemplate, metadata: {name: " + name + "}, spec: {spec: {devices: {requests: [" + l.exactly(requests...) +
		"]}}}}")
}

func (l *lab) exactly(requests ...string) string {
	var all []string
	for _, r := range requests {
		all = append(all, "{name: "+r+", exactly: {deviceClassName: "+l.class()+"}}")
	}
	return strings.Join(all, ", ")
}

// pod creates a pod with claims, which its containers do not reference: "name=claim" is an existing one, and "name=+template" one that
// Kubernetes generates.
func (l *lab) pod(name string, claims ...string) {
	l.Helper()
	l.create("{kind: Pod, metadata: {name: " + name + "}, spec: {" + claimList(claims) + "}}")
}

func claimList(claims []string) string {
	var all []string
	for _, c := range claims {
		as, from, _ := strings.Cut(c, "=")
		if template, ok := strings.CutPrefix(from, "+"); ok {
			all = append(all, "{name: "+as+", resourceClaimTemplateName: "+template+"}")
		} else {
			all = append(all, "{name: "+as+", resourceClaimName: "+from+"}")
		}
	}
	return "resourceClaims: [" + strings.Join(all, ", ") + "]"
}

func (l *lab) getPod(name string) (*core.Pod, error) {
	return l.client.CoreV1().Pods(l.ns).Get(context.Background(), name, metav1.GetOptions{})
}

func (l *lab) getClaim(name string) *resourceapi.ResourceClaim {
	l.Helper()
	c, err := l.client.ResourceV1().ResourceClaims(l.ns).Get(context.Background(), name, metav1.GetOptions{})
	if err != nil {
		l.Fatal(err)
	}
	return c
}

// runs waits until all containers of a pod are ready.
func (l *lab) runs(name string) *core.Pod {
	l.Helper()
	var pod *core.Pod
	took := within(l.T, "pod "+name+" runs", func() (err error) {
		if pod, err = l.getPod(name); err != nil {
			return err
		}
		return isRunning(pod)
	})
	l.Logf("pod %s runs after %.1f s", name, took.Seconds())
	if took > 15*time.Second {
		l.Logf("events of the slow start: %s", strings.Join(l.events(name), "\n"))
	}
	return pod
}

func isRunning(p *core.Pod) error {
	if p.Status.Phase != core.PodRunning || len(p.Status.ContainerStatuses) == 0 || p.DeletionTimestamp != nil {
		return fmt.Errorf("pod %s is %s: %s %s", p.Name, p.Status.Phase, p.Status.Reason, p.Status.Message)
	}
	for _, c := range p.Status.ContainerStatuses {
		if !c.Ready {
			return fmt.Errorf("container %s of pod %s is not ready: %+v", c.Name, p.Name, c.State)
		}
	}
	return nil
}

// delete deletes pods and waits until they are gone.
func (l *lab) delete(names ...string) {
	l.Helper()
	for _, n := range names {
		if err := l.client.CoreV1().Pods(l.ns).Delete(context.Background(), n, metav1.DeleteOptions{}); err != nil {
			l.Fatal(err)
		}
	}
	l.gone(names...)
}

func (l *lab) gone(names ...string) {
	l.Helper()
	for _, n := range names {
		within(l.T, "pod "+n+" is gone", func() error {
			_, err := l.getPod(n)
			if apierrors.IsNotFound(err) {
				return nil
			}
			return errors.Join(err, errors.New("it is there"))
		})
	}
}

// event waits until an object has an event whose message contains all given texts, and returns this message.
func (l *lab) event(name string, texts ...string) (message string) {
	l.Helper()
	within(l.T, fmt.Sprintf("%s has an event with %q", name, texts), func() error {
		var all []string
		for _, m := range l.events(name) {
			if all = append(all, m); hasAll(m, texts) {
				message = m
				return nil
			}
		}
		return fmt.Errorf("it has %q", all)
	})
	return message
}

func (l *lab) events(name string) (messages []string) {
	list, err := l.client.CoreV1().Events(l.ns).List(context.Background(), metav1.ListOptions{FieldSelector: "involvedObject.name=" + name})
	if err != nil {
		return []string{err.Error()}
	}
	for _, e := range list.Items {
		at := e.EventTime.Time
		if at.IsZero() {
			at = e.LastTimestamp.Time
		}
		messages = append(messages, at.UTC().Format("15:04:05 ")+e.Reason+": "+e.Message)
	}
	return messages
}

func hasAll(text string, parts []string) bool {
	return !slices.ContainsFunc(parts, func(p string) bool { return !strings.Contains(text, p) })
}

// claimOf returns the claim that was generated for a pod. The parameter `name` contains the claim's name in the pod.
func (l *lab) claimOf(pod, name string) string {
	l.Helper()
	p, err := l.getPod(pod)
	if err != nil {
		l.Fatal(err)
	}
	for _, s := range p.Status.ResourceClaimStatuses {
		if s.Name == name && s.ResourceClaimName != nil {
			return *s.ResourceClaimName
		}
	}
	l.Fatalf("pod %s has no claim %s: %+v", pod, name, p.Status.ResourceClaimStatuses)
	return ""
}

// allocated returns the PCI addresses of a claim's VFs, in the order of the claim's requests.
func (l *lab) allocated(claim string) (ids []string) {
	l.Helper()
	c := l.getClaim(claim)
	if c.Status.Allocation == nil {
		return nil
	}
	for _, r := range c.Status.Allocation.Devices.Results {
		if r.Driver == driverName {
			ids = append(ids, l.address(r.Device))
		}
	}
	return ids
}

// address returns the PCI address of the VF that has the given device name in the ResourceSlices.
func (l *lab) address(device string) string {
	l.Helper()
	for _, id := range l.ids {
		if deviceName(id) == device {
			return id
		}
	}
	l.Fatalf("there is no VF %s among %v", device, l.ids)
	return ""
}

// pending fails the test if a pod runs during the next 4 seconds.
func (l *lab) pending(name string) {
	l.Helper()
	remains(l.T, "pod "+name+" waits", func() error {
		p, err := l.getPod(name)
		if err == nil && p.Status.Phase != core.PodPending {
			return fmt.Errorf("it is %s", p.Status.Phase)
		}
		return err
	})
}
