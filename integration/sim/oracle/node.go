// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"os"
	"slices"
	"strings"

	cadvisorapi "github.com/google/cadvisor/lib/model"
	v1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/klog/v2"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	"k8s.io/kubernetes/pkg/kubelet/cm/containermap"
	"k8s.io/kubernetes/pkg/kubelet/cm/devicemanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/config"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"
)

// machine is the managers of a kubelet.
type machine struct {
	node    node
	rng     *rand.Rand
	log     klog.Logger
	policy  topologymanager.Manager
	devices *devicemanager.ManagerImpl
	cpus    *cpus // nil without a static policy
	plugin  *plugin
	healthy []bool
	active  map[int]*v1.Pod // by step, along with the one that is being admitted
	lists   []lists
	current lists
}

// recordNode lets pods come and go.
func recordNode(seed uint64, number, pods int) (node, error) {
	m, err := newMachine(rand.New(rand.NewPCG(seed, uint64(number)+1)), number)
	if err != nil {
		return node{}, err
	}
	ctx := klog.NewContext(context.Background(), m.log)
	for i := range pods {
		if err := m.step(ctx, i); err != nil {
			return node{}, fmt.Errorf("pod %d: %w", i, err)
		}
	}
	return m.node, m.devices.Stop(m.log)
}

func newMachine(rng *rand.Rand, number int) (*machine, error) {
	m := &machine{node: randomNode(rng, number), rng: rng, active: map[int]*v1.Pod{}}
	m.healthy = slices.Repeat([]bool{true}, len(m.node.Near))
	m.plugin = &plugin{kind: m.node.Plugin}
	scope := topologymanager.ContainerTopologyScope
	if m.node.PodScope {
		scope = topologymanager.PodTopologyScope
	}
	var err error
	info := machineInfo(m.node.Machine, max(1, m.node.CPUs))
	if m.policy, err = topologymanager.NewManager(m.log, info.Topology, m.node.Policy, scope, nil); err != nil {
		return nil, err
	}
	// What the manager before has left is no business of this one.
	if err := os.RemoveAll("/var/lib/kubelet"); err != nil {
		return nil, err
	}
	if m.devices, err = devicemanager.NewManagerImpl(m.log, info.Topology, m.policy); err != nil {
		return nil, err
	}
	active := func() []*v1.Pod {
		var out []*v1.Pod
		for _, p := range m.active {
			out = append(out, p)
		}
		return out
	}
	ready := config.NewSourcesReady(func(sets.Set[string]) bool { return true })
	if err := m.devices.Start(m.log, active, ready, containermap.NewContainerMap(), sets.New[string]()); err != nil {
		return nil, err
	}
	if err := m.devices.PluginConnected(klog.NewContext(context.Background(), m.log), resourceName, m.plugin); err != nil {
		return nil, err
	}
	m.policy.AddHintProvider(m.log, &witness{m.devices, m})
	if m.node.CPUs > 0 {
		if m.cpus, err = newCPUs(m.log, info, m.policy); err != nil {
			return nil, err
		}
		m.policy.AddHintProvider(m.log, &witness{m.cpus, m})
	}
	return m, nil
}

// randomNode has devices near one node, near several, near none, and near one that the machine does not have.
func randomNode(rng *rand.Rand, number int) node {
	n := node{Machine: 1 + rng.IntN(4), PodScope: number/4%2 == 1}
	n.Policy = []string{"none", "best-effort", "restricted", "single-numa-node"}[number%4]
	n.Plugin = []string{silent, lowest, lowest, toofew, toomany}[rng.IntN(5)]
	if rng.IntN(2) == 0 {
		n.CPUs = 2 + rng.IntN(4)
	}
	odd := rng.IntN(2) == 0
	for range 2 + rng.IntN(11) {
		near := uint64(1) << rng.IntN(n.Machine)
		if odd {
			switch rng.IntN(8) {
			case 0, 1:
				near = 0
			case 2:
				near |= 1 << rng.IntN(n.Machine)
			case 3:
				near = 1 << 6
			}
		}
		n.Near = append(n.Near, near)
	}
	return n
}

// machineInfo is what cadvisor would say.
func machineInfo(nodes, cpus int) *cadvisorapi.MachineInfo {
	info := &cadvisorapi.MachineInfo{NumCores: nodes * cpus, NumSockets: nodes}
	for n := range nodes {
		node := cadvisorapi.Node{Id: n}
		for c := range cpus {
			node.Cores = append(node.Cores, cadvisorapi.Core{Id: c, Threads: []int{n*cpus + c}, SocketID: n})
		}
		info.Topology = append(info.Topology, node)
	}
	return info
}

// step lets some pods go, makes some devices ill, and admits a pod.
func (m *machine) step(ctx context.Context, number int) error {
	s := m.randomStep(number)
	for _, gone := range s.Gone {
		m.release(m.active[gone])
		delete(m.active, gone)
	}
	m.publish()
	pod := newPod(number, s)
	m.active[number], m.lists, m.plugin.asked = pod, nil, nil
	result := m.policy.Admit(ctx, &lifecycle.PodAdmitAttributes{Pod: pod, Operation: lifecycle.AddOperation})
	m.flush()
	s.Lists, s.Asked, s.Reason = m.lists, m.plugin.asked, result.Reason
	m.note(&s, pod)
	if !result.Admit {
		m.release(pod)
		delete(m.active, number)
	}
	m.node.Steps = append(m.node.Steps, s)
	return nil
}

func (m *machine) randomStep(number int) step {
	var s step
	for gone := range number {
		if m.active[gone] != nil && m.rng.IntN(4) == 0 {
			s.Gone = append(s.Gone, gone)
		}
	}
	var healthy strings.Builder
	for i := range m.healthy {
		if m.rng.IntN(12) == 0 {
			m.healthy[i] = !m.healthy[i]
		}
		fmt.Fprint(&healthy, map[bool]int{true: 1}[m.healthy[i]])
	}
	s.Healthy = healthy.String()
	cpus := func() int {
		if m.node.CPUs == 0 {
			return 0
		}
		return m.rng.IntN(4)
	}
	if m.rng.IntN(3) == 0 {
		s.Init = append(s.Init, [2]int{m.rng.IntN(4), 0})
	}
	for range 1 + m.rng.IntN(2) {
		s.Containers = append(s.Containers, [2]int{m.rng.IntN(5), cpus()})
	}
	return s
}

// publish is a list of the plugin's stream.
func (m *machine) publish() {
	r := &pluginapi.ListAndWatchResponse{}
	for i, near := range m.node.Near {
		d := &pluginapi.Device{ID: id(i), Health: pluginapi.Unhealthy}
		if m.healthy[i] {
			d.Health = pluginapi.Healthy
		}
		if near != 0 {
			d.Topology = &pluginapi.TopologyInfo{}
		}
		for node := range 64 {
			if near>>node&1 == 1 {
				d.Topology.Nodes = append(d.Topology.Nodes, &pluginapi.NUMANode{ID: int64(node)})
			}
		}
		r.Devices = append(r.Devices, d)
	}
	m.devices.PluginListAndWatchReceiver(m.log, resourceName, r)
}

// newPod is a guaranteed one: only such have CPUs of their own.
func newPod(number int, s step) *v1.Pod {
	name := fmt.Sprintf("pod-%d", number)
	pod := &v1.Pod{ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", UID: types.UID(name)}}
	container := func(name string, r [2]int) v1.Container {
		list := v1.ResourceList{v1.ResourceMemory: resource.MustParse("1Mi"), v1.ResourceCPU: resource.MustParse("100m")}
		if r[0] > 0 {
			list[resourceName] = *resource.NewQuantity(int64(r[0]), resource.DecimalSI)
		}
		if r[1] > 0 {
			list[v1.ResourceCPU] = *resource.NewQuantity(int64(r[1]), resource.DecimalSI)
		}
		return v1.Container{Name: name, Resources: v1.ResourceRequirements{Limits: list, Requests: list}}
	}
	for i, r := range s.Init {
		pod.Spec.InitContainers = append(pod.Spec.InitContainers, container(fmt.Sprintf("init-%d", i), r))
	}
	for i, r := range s.Containers {
		pod.Spec.Containers = append(pod.Spec.Containers, container(fmt.Sprintf("c-%d", i), r))
	}
	return pod
}

// note writes down what each container was given, also those of a pod that was refused for the next one.
func (m *machine) note(s *step, pod *v1.Pod) {
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		s.Hints = append(s.Hints, encode(m.policy.GetAffinity(m.log, string(pod.UID), c.Name)))
		var ids []string
		for id := range m.devices.GetDevices(string(pod.UID), c.Name)[resourceName] {
			ids = append(ids, id)
		}
		s.VFs = append(s.VFs, numbers(ids))
		s.Taken = append(s.Taken, m.cpus.of(string(pod.UID), c.Name))
	}
}

// release gives CPUs back. The device manager sees by itself that a pod is not there any more.
func (m *machine) release(pod *v1.Pod) {
	for _, c := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
		m.cpus.release(m.log, string(pod.UID), c.Name)
	}
}
