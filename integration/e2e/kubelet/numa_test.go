// SPDX-License-Identifier: Apache-2.0

package kubelet_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/harness/node"
)

// affinityError is the reason that the Topology Manager gives when it refuses a pod.
const affinityError = "TopologyAffinityError"

// checkAligned returns the NUMA node of the pod's CPUs and VFs, which must be on one.
func (l *testLab) checkAligned(pod string) int {
	l.t.Helper()
	near, cpus := l.sameNUMA(pod, l.devicesOf(pod)), l.cpusOf(pod)
	if len(cpus) == 0 {
		l.t.Errorf("pod %s has no exclusive CPUs", pod)
	}
	for _, cpu := range cpus {
		if int(cpu)/cpusEach != near {
			l.t.Errorf("pod %s has the CPUs %v and %v of NUMA node %d", pod, cpus, l.devicesOf(pod), near)
			break
		}
	}
	return near
}

// TestPolicies checks which devices pods get under each policy of the Topology Manager, with the scope "pod" and static CPU and Memory
// Managers. A NUMA node has 8 VFs.
func TestPolicies(t *testing.T) {
	node.Skip(t)
	for _, c := range []struct {
		policy  string
		aligned bool // CPUs and VFs are on the same NUMA nodes
		// nine is the kubelet's reason for refusing a pod with 9 VFs and no exclusive CPUs, and nineAndCPU the one with exclusive CPUs.
		nine, nineAndCPU string
	}{
		{"none", false, "", ""},
		{"best-effort", true, "", ""},
		{"restricted", true, "", affinityError},
		{"single-numa-node", true, affinityError, affinityError},
	} {
		t.Run(c.policy, func(t *testing.T) {
			l := newLab(t, c.policy)
			granted := l.runPod("one", guaranteedLimits(1, 1))
			granted = append(granted, l.runPod("two", guaranteedLimits(2, 2))...)
			l.sameNUMA("two", l.devicesOf("two"))
			granted = append(granted, l.runPod("shared", vfs(2))...)
			l.sameNUMA("shared", l.devicesOf("shared"))
			if c.aligned {
				l.checkAligned("one")
				l.checkAligned("two")
			}
			l.checkDistinct(granted)
			l.requestMost(c.policy, granted)
			l.runsOrNot("nine", vfs(9), c.nine, granted)
			l.runsOrNot("nine-and-cpu", guaranteedLimits(1, 9), c.nineAndCPU, granted)
		})
	}
}

// requestMost starts a pod that requests all free VFs of the NUMA node with the most of them. It must get VFs of only one NUMA node.
func (l *testLab) requestMost(policy string, granted []string) {
	l.t.Helper()
	free := [numaNodes]int{8, 8}
	for _, id := range granted {
		free[l.numaOf(id)]--
	}
	n := max(free[0], free[1])
	l.runPod("many", guaranteedLimits(1, n))
	l.sameNUMA("many", l.devicesOf("many"))
	if policy != "none" {
		l.checkAligned("many")
	}
	l.removePods("many")
}

// runsOrNot starts a pod. The kubelet must refuse it for the wanted reason or, if this is empty, run it with VFs that no other pod has.
func (l *testLab) runsOrNot(pod string, limits podResources, want string, others []string) {
	l.t.Helper()
	if want == "" {
		l.checkDistinct(append(l.runPod(pod, limits), others...))
		l.removePods(pod)
	} else if reason, message := l.runRefused(pod, limits); reason != want {
		l.t.Errorf("pod %s: %s: %s: want %s", pod, reason, message, want)
	}
}

// checkDistinct fails the test if a VF was allocated twice.
func (l *testLab) checkDistinct(ids []string) {
	l.t.Helper()
	sorted := slices.Sorted(slices.Values(ids))
	if len(slices.Compact(slices.Clone(sorted))) != len(ids) {
		l.t.Errorf("%v: a VF was allocated twice", sorted)
	}
}

// TestGuide runs the example of the guides to the Topology Manager: pods with 4 CPUs, memory, a GPU and a NIC on two NUMA nodes. The first
// two each get all from one node. The third would need both, so the kubelet refuses it. If the device plugin reports no topology, a pod may
// get resources of both.
func TestGuide(t *testing.T) {
	l := newLab(t, "single-numa-node")
	runGPUs(t)
	limits := podResources{"cpu": "4", "memory": "1Gi", resource: "1", gpus: "1"}
	var nodes []int
	for _, pod := range []string{"first", "second"} {
		l.runPod(pod, limits)
		near := l.checkAligned(pod)
		nodes = append(nodes, near)
		var got []string
		for _, h := range heldDevices(t, gpus) {
			if h.Pod == pod+"-node" {
				got = append(got, h.ID)
			}
		}
		if want := []string{[]string{"gpu-0", "gpu-1"}[near]}; !slices.Equal(got, want) {
			t.Errorf("pod %s has %v: want %v, as its CPUs and its VF are on NUMA node %d", pod, got, want, near)
		}
		t.Logf("pod %s: CPUs %v, %v, %v: NUMA node %d", pod, l.cpusOf(pod), got, l.devicesOf(pod), near)
	}
	if slices.Sort(nodes); !slices.Equal(nodes, []int{0, 1}) {
		t.Errorf("the pods are on the NUMA nodes %v: want one on each", nodes)
	}
	if reason, message := l.runRefused("third", limits); reason == "" || !strings.Contains(message, gpus) && reason != affinityError {
		t.Errorf("the third pod: %s: %s", reason, message)
	}
}
