// SPDX-License-Identifier: Apache-2.0

package main

import (
	"context"

	cadvisorapi "github.com/google/cadvisor/lib/model"
	v1 "k8s.io/api/core/v1"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/pkg/kubelet/cm/cpumanager"
	"k8s.io/kubernetes/pkg/kubelet/cm/cpumanager/state"
	"k8s.io/kubernetes/pkg/kubelet/cm/cpumanager/topology"
	"k8s.io/kubernetes/pkg/kubelet/cm/topologymanager"
	"k8s.io/kubernetes/pkg/kubelet/lifecycle"
	"k8s.io/utils/cpuset"
)

// witness passes hints on and remembers them.
type witness struct {
	topologymanager.HintProvider
	machine *machine
}

// GetTopologyHints is asked for each container.
func (w *witness) GetTopologyHints(log klog.Logger, pod *v1.Pod, c *v1.Container, op lifecycle.Operation) map[string][]topologymanager.TopologyHint {
	return w.seen(w.HintProvider.GetTopologyHints(log, pod, c, op))
}

// GetPodTopologyHints is asked for each pod.
func (w *witness) GetPodTopologyHints(log klog.Logger, pod *v1.Pod, op lifecycle.Operation) map[string][]topologymanager.TopologyHint {
	return w.seen(w.HintProvider.GetPodTopologyHints(log, pod, op))
}

func (w *witness) seen(hints map[string][]topologymanager.TopologyHint) map[string][]topologymanager.TopologyHint {
	// The device manager is asked first, each time.
	if _, ok := w.HintProvider.(*cpus); !ok {
		w.machine.flush()
		w.machine.current = lists{}
	}
	for _, list := range hints {
		w.machine.current = append(w.machine.current, encoded(list))
	}
	return hints
}

// flush ends what was said for one container or pod.
func (m *machine) flush() {
	if m.current != nil {
		m.lists = append(m.lists, m.current)
	}
	m.current = nil
}

// cpus is the CPU manager's static policy with its state, as the CPU manager would hold it.
type cpus struct {
	policy cpumanager.Policy
	state  state.State
}

func newCPUs(log klog.Logger, info *cadvisorapi.MachineInfo, affinity topologymanager.Store) (*cpus, error) {
	t, err := topology.Discover(log, info)
	if err != nil {
		return nil, err
	}
	p, err := cpumanager.NewStaticPolicy(log, t, 0, cpuset.New(), affinity, nil)
	if err != nil {
		return nil, err
	}
	c := &cpus{p, state.NewMemoryState(log)}
	return c, p.Start(log, c.state)
}

// GetTopologyHints asks the policy.
func (c *cpus) GetTopologyHints(log klog.Logger, pod *v1.Pod, container *v1.Container, op lifecycle.Operation) map[string][]topologymanager.TopologyHint {
	return c.policy.GetTopologyHints(log, c.state, pod, container, op)
}

// GetPodTopologyHints asks the policy.
func (c *cpus) GetPodTopologyHints(log klog.Logger, pod *v1.Pod, op lifecycle.Operation) map[string][]topologymanager.TopologyHint {
	return c.policy.GetPodTopologyHints(log, c.state, pod, op)
}

// Allocate asks the policy.
func (c *cpus) Allocate(ctx context.Context, pod *v1.Pod, container *v1.Container, op lifecycle.Operation) error {
	return c.policy.Allocate(klog.FromContext(ctx), c.state, pod, container, op)
}

// AllocatePod is for resources of whole pods, which there are none of.
func (c *cpus) AllocatePod(klog.Logger, *v1.Pod, lifecycle.Operation) error { return nil }

// of returns the CPUs of a container.
func (c *cpus) of(pod, container string) []int {
	if c == nil {
		return nil
	}
	set, _ := c.state.GetCPUSet(pod, container)
	return set.List()
}

func (c *cpus) release(log klog.Logger, pod, container string) {
	if c != nil {
		_ = c.policy.RemoveContainer(log, c.state, pod, container)
	}
}
