// SPDX-License-Identifier: Apache-2.0

package apiserver

import (
	"bytes"
	"context"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/yaml"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
)

func nodeName(id int) string { return fmt.Sprintf("node-%d", id) }

// nodeAddresses returns the IPv4 and IPv6 addresses of a node on a link.
func nodeAddresses(id int, link string) [2]string {
	if link == "far" {
		return [2]string{fmt.Sprintf("198.51.100.%d", id), fmt.Sprintf("fd00:3::%x", id)}
	}
	return [2]string{fmt.Sprintf("172.16.%d.%d", id>>8, id&255), fmt.Sprintf("fd00:2::%x", id)}
}

// podCIDRs returns the IPv4 and IPv6 podCIDRs of a node.
func podCIDRs(id int) []netip.Prefix {
	return []netip.Prefix{netip.MustParsePrefix(fmt.Sprintf("10.%d.%d.0/24", 64+id>>8, id&255)),
		netip.MustParsePrefix(fmt.Sprintf("fd00:10:244:%x::/64", id))}
}

// nodeObject returns a Node object without podCIDRs, like the Node object that a kubelet registers.
func nodeObject(id int, link string) *corev1.Node {
	o := &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName(id)}}
	o.Status.Addresses = []corev1.NodeAddress{{Type: corev1.NodeHostName, Address: o.Name}}
	for _, a := range nodeAddresses(id, link) {
		o.Status.Addresses = append(o.Status.Addresses, corev1.NodeAddress{Type: corev1.NodeInternalIP, Address: a})
	}
	return o
}

// fullObject returns a Node as large as in real clusters: 14 labels, conditions, and 50 images with two names each.
func fullObject(id int) *corev1.Node {
	o := nodeObject(id, "lan")
	o.Labels = map[string]string{"kubernetes.io/hostname": o.Name}
	for i := range 13 {
		o.Labels[fmt.Sprintf("label-%d.example.com/topology", i)] = fmt.Sprintf("value-%d", i)
	}
	o.Status.NodeInfo = corev1.NodeSystemInfo{KernelVersion: "6.12.0-amd64", OSImage: "Debian GNU/Linux 13 (trixie)",
		KubeletVersion:          "v1.37.0",
		ContainerRuntimeVersion: "containerd://2.2.9", OperatingSystem: "linux", Architecture: "amd64"}
	o.Status.Capacity = corev1.ResourceList{"cpu": resource.MustParse("16"), "memory": resource.MustParse("64Gi"),
		"pods": resource.MustParse("110")}
	o.Status.Allocatable = o.Status.Capacity
	o.Status.Conditions = conditions(time.Now())
	for i := range 50 {
		name := fmt.Sprintf("registry.example.com/a-project/an-application-%d", i)
		o.Status.Images = append(o.Status.Images, corev1.ContainerImage{SizeBytes: 123_456_789,
			Names: []string{name + "@sha256:" + strings.Repeat("0123456789abcdef", 4), name + ":v1.2.3"}})
	}
	return o
}

func conditions(now time.Time) (list []corev1.NodeCondition) {
	for _, kind := range []corev1.NodeConditionType{"MemoryPressure", "DiskPressure", "PIDPressure", "Ready"} {
		list = append(list, corev1.NodeCondition{Type: kind, Status: "False", Reason: "KubeletHasSufficient" + string(kind),
			Message: "kubelet has sufficient resources available", LastHeartbeatTime: metav1.NewTime(now)})
	}
	return list
}

func (p *controlPlane) create(o *corev1.Node) error {
	return p.admin.Post().Resource("nodes").Body(o).Do(context.Background()).Error()
}

// setPodCIDRs sets the podCIDRs of a node, like kube-controller-manager.
func (p *controlPlane) setPodCIDRs(id int) error {
	cidrs := podCIDRs(id)
	return p.admin.Patch(types.StrategicMergePatchType).Resource("nodes").Name(nodeName(id)).
		Body(harness.Encode(map[string]any{"spec": map[string]any{"podCIDR": cidrs[0], "podCIDRs": cidrs}})).Do(context.Background()).Error()
}

// joinNode creates a node, sets its podCIDRs, and returns the time just before.
func (p *controlPlane) joinNode(o *corev1.Node, id int) (before time.Time, err error) {
	if err := p.create(o); err != nil {
		return before, err
	}
	before = time.Now()
	return before, p.setPodCIDRs(id)
}

func (p *controlPlane) remove(id int) {
	p.Helper()
	kerneltest.Must(p, p.admin.Delete().Resource("nodes").Name(nodeName(id)).Do(context.Background()).Error())
}

// fillCluster creates full Node objects with the numbers from first to last.
func (p *controlPlane) fillCluster(first, last int) {
	p.Helper()
	ids, failure := make(chan int), atomic.Value{}
	var workers sync.WaitGroup
	for range 8 {
		workers.Go(func() {
			for id := range ids {
				o := fullObject(id)
				for _, cidr := range podCIDRs(id) {
					o.Spec.PodCIDRs = append(o.Spec.PodCIDRs, cidr.String())
				}
				o.Spec.PodCIDR = o.Spec.PodCIDRs[0]
				if err := p.create(o); err != nil {
					failure.Store(err)
				}
			}
		})
	}
	for id := first; id <= last; id++ {
		ids <- id
	}
	close(ids)
	workers.Wait()
	if err := failure.Load(); err != nil {
		p.Fatal(err)
	}
}

// shippedContainer returns the container specification of the shipped DaemonSet.
func shippedContainer(t *testing.T) corev1.Container {
	t.Helper()
	text, err := os.ReadFile("../../../conf/cluster/base/daemonset.yaml")
	kerneltest.Must(t, err)
	var set appsv1.DaemonSet
	kerneltest.Must(t, yaml.NewYAMLOrJSONDecoder(bytes.NewReader(text), 4096).Decode(&set))
	return set.Spec.Template.Spec.Containers[0]
}
