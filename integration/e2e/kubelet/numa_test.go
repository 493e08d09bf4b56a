// SPDX-License-Identifier: Apache-2.0

package kubelet_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/harness/node"
)

// affinity is the reason with which the Topology Manager refuses pods.
const affinity = "TopologyAffinityError"

// aligned fails the test unless the pod's CPUs and VFs are on one NUMA node, which it returns.
func (l *lab) aligned(pod string) int {
	l.t.Helper()
	near, cpus := l.sameNUMA(pod, l.devices(pod)), l.cpus(pod)
	if len(cpus) == 0 {
		l.t.Errorf("pod %s has no exclusive CPUs", pod)
	}
	for _, cpu := range cpus {
		if int(cpu)/cpusEach != near {
			l.t.Errorf("pod %s has the CPUs %v and %v of NUMA node %d", pod, cpus, l.devices(pod), near)
			break
		}
	}
	return near
}

// TestPolicies: the devices of pods under each policy of the Topology Manager, with the static policies for CPUs and memory, in scope
// pod. A NUMA node has 8 VFs.
func TestPolicies(t *testing.T) {
	node.Skip(t)
	for _, c := range []struct {
		policy  string
		aligned bool // CPUs and VFs are on the same NUMA nodes
		// The reasons for the refusal of a pod with more VFs than a NUMA node has, and of such a pod with exclusive CPUs.
		nine, nineAndCPU string
	}{
		{"none", false, "", ""},
		{"best-effort", true, "", ""},
		{"restricted", true, "", affinity},
		{"single-numa-node", true, affinity, affinity},
	} {
		t.Run(c.policy, func(t *testing.T) {
			l := newLab(t, c.policy)
			granted := l.runPod("one", guaranteed(1, 1))
			granted = append(granted, l.runPod("two", guaranteed(2, 2))...)
			l.sameNUMA("two", l.devices("two"))
			granted = append(granted, l.runPod("shared", vfs(2))...)
			l.sameNUMA("shared", l.devices("shared"))
			if c.aligned {
				l.aligned("one")
				l.aligned("two")
			}
			l.distinct(granted)
			l.fewest(c.policy, granted)
			l.runsOrNot("nine", vfs(9), c.nine, granted)
			l.runsOrNot("nine-and-cpu", guaranteed(1, 9), c.nineAndCPU, granted)
		})
	}
}

// fewest requests more VFs than one NUMA node has left, or as many: the kubelet grants 5 VFs, and each node has at most 5.
func (l *lab) fewest(policy string, granted []string) {
	l.t.Helper()
	free := [numaNodes]int{8, 8}
	for _, id := range granted {
		free[l.numaOf(id)]--
	}
	n := max(free[0], free[1])
	l.runPod("many", guaranteed(1, n))
	l.sameNUMA("many", l.devices("many"))
	if policy != "none" {
		l.aligned("many")
	}
	l.remove("many")
}

// runsOrNot runs a pod. Unless the pod has a reason to be refused, it gets VFs that no other pod has.
func (l *lab) runsOrNot(pod string, limits resources, want string, others []string) {
	l.t.Helper()
	if want == "" {
		l.distinct(append(l.runPod(pod, limits), others...))
		l.remove(pod)
	} else if reason, message := l.refused(pod, limits); reason != want {
		l.t.Errorf("pod %s: %s: %s: want %s", pod, reason, message, want)
	}
}

// distinct fails the test if a VF was allocated twice.
func (l *lab) distinct(ids []string) {
	l.t.Helper()
	sorted := slices.Sorted(slices.Values(ids))
	if len(slices.Compact(slices.Clone(sorted))) != len(ids) {
		l.t.Errorf("%v: a VF was allocated twice", sorted)
	}
}

// TestGuide is the worked example of the guides to the Topology Manager: pods of 4 CPUs, memory, a GPU and a NIC on two NUMA nodes.
// Each pod gets all of its resources from node 0 or from node 1. The third pod would need both nodes and is refused. Without the
// plugin's topology a pod's resources come from both nodes.
func TestGuide(t *testing.T) {
	l := newLab(t, "single-numa-node")
	runGPUs(t)
	limits := resources{"cpu": "4", "memory": "1Gi", resource: "1", gpus: "1"}
	var nodes []int
	for _, pod := range []string{"first", "second"} {
		l.runPod(pod, limits)
		near := l.aligned(pod)
		nodes = append(nodes, near)
		var got []string
		for _, h := range holders(t, gpus) {
			if h.Pod == pod+"-node" {
				got = append(got, h.ID)
			}
		}
		if want := []string{[]string{"gpu-0", "gpu-1"}[near]}; !slices.Equal(got, want) {
			t.Errorf("pod %s has %v: want %v, as its CPUs and its VF are on NUMA node %d", pod, got, want, near)
		}
		t.Logf("pod %s: CPUs %v, %v, %v: NUMA node %d", pod, l.cpus(pod), got, l.devices(pod), near)
	}
	if slices.Sort(nodes); !slices.Equal(nodes, []int{0, 1}) {
		t.Errorf("the pods are on the NUMA nodes %v: want one on each", nodes)
	}
	if reason, message := l.refused("third", limits); reason == "" || !strings.Contains(message, gpus) && reason != affinity {
		t.Errorf("the third pod: %s: %s", reason, message)
	}
}
