// SPDX-License-Identifier: Apache-2.0

// Package kubeletnode models how the kubelet of Kubernetes 1.37 admits pods and chooses their devices and CPUs, for simulations. It uses
// the hints and the merge of pkg/cli/kubelet, and implements the choice of devices and the static CPU policy without hyperthreads. Where
// the kubelet depends on the random order of a Go map, it calls a Pick; all other choices are the same.
package kubeletnode

import (
	"errors"
	"slices"

	"github.com/podlace/podlace/pkg/cli/kubelet"
)

// ErrAffinity means that the Topology Manager refuses a pod, which a kubelet reports as TopologyAffinityError. All other errors are
// UnexpectedAdmissionError there.
var ErrAffinity = errors.New("resources cannot be allocated with topology locality")

// Node emulates the kubelet of a node.
type Node struct {
	Policy   kubelet.Policy
	PodScope bool // one hint for all containers of a pod
	VFs      *kubelet.Devices
	CPUs     *CPUs // nil: the CPU manager has no static policy
	Prefer   Prefer
	Pick     Pick

	trace trace
}

// A trace observes Admit in tests: one function gets the hints of all resources, the other the index of each admitted container.
type trace struct {
	lists     func([][]kubelet.Hint)
	container func(int)
}

// Request is the number of VFs and CPUs of a container. Only those of guaranteed pods request CPUs; init containers never do here.
type Request struct{ VFs, CPUs int }

// Pod has the requests of its init containers, which run one after the other, and then of its containers.
type Pod struct{ Init, Containers []Request }

// Grant is the hint, the VFs and the CPUs of each container of a pod, init containers first.
type Grant struct {
	Hints     []kubelet.Hint
	VFs, CPUs [][]int
}

// Admit admits a pod and allocates its requests, or returns an error and allocates nothing.
func (n *Node) Admit(p Pod) (Grant, error) {
	g, err := n.admit(p)
	if err != nil {
		n.Remove(g)
		return Grant{}, err
	}
	return g, nil
}

// Remove releases the resources of a pod.
func (n *Node) Remove(g Grant) {
	release(n.VFs, slices.Concat(g.VFs...))
	if n.CPUs != nil {
		release(&n.CPUs.Devices, slices.Concat(g.CPUs...))
	}
}

func (n *Node) admit(p Pod) (Grant, error) {
	var g Grant
	var reusable []int
	var hint kubelet.Hint
	admitted := true
	if n.PodScope {
		hint, admitted = n.mergedHint(p.podRequest(), nil)
	}
	for i, r := range slices.Concat(p.Init, p.Containers) {
		if !n.PodScope {
			hint, admitted = n.mergedHint(r, reusable)
		}
		if !admitted {
			return g, ErrAffinity
		}
		g.Hints = append(g.Hints, hint)
		if n.trace.container != nil {
			n.trace.container(i)
		}
		vfs, cpus, err := n.allocate(r, hint, reusable)
		g.VFs, g.CPUs = append(g.VFs, vfs), append(g.CPUs, cpus)
		if err != nil {
			return g, err
		}
		reusable = slices.DeleteFunc(reusable, func(d int) bool { return slices.Contains(vfs, d) })
		if i < len(p.Init) {
			reusable = append(reusable, vfs...)
		}
	}
	return g, nil
}

// allocate gives a container VFs and CPUs near the NUMA nodes of the hint.
func (n *Node) allocate(r Request, hint kubelet.Hint, reusable []int) (vfs, cpus []int, err error) {
	if r.VFs > 0 {
		vfs, err = choose(n.VFs, hint, r.VFs, reusable, n.Prefer, n.Pick)
	}
	if err == nil && n.CPUs != nil && r.CPUs > 0 {
		cpus, err = n.CPUs.Take(hint, r.CPUs)
	}
	return vfs, cpus, err
}

// mergedHint merges the hints of all resource managers for a request, and reports whether the Topology Manager admits it.
func (n *Node) mergedHint(r Request, reusable []int) (kubelet.Hint, bool) {
	if n.Policy == kubelet.None {
		return kubelet.Hint{}, true
	}
	var lists [][]kubelet.Hint
	if r.VFs > 0 {
		lists = append(lists, n.VFs.Hints(r.VFs, reusable))
	}
	if n.CPUs != nil && r.CPUs > 0 {
		lists = append(lists, n.CPUs.Hints(r.CPUs, nil))
	}
	if n.trace.lists != nil {
		n.trace.lists(lists)
	}
	return kubelet.Merge(n.Policy, n.VFs.Machine, lists)
}

// podRequest returns what the whole pod requests: the sum of its containers, or the VFs of an init container that requests more.
func (p Pod) podRequest() Request {
	var sum Request
	for _, r := range p.Containers {
		sum.VFs += r.VFs
		sum.CPUs += r.CPUs
	}
	for _, r := range p.Init {
		sum.VFs = max(sum.VFs, r.VFs)
	}
	return sum
}
