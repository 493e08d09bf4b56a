// SPDX-License-Identifier: Apache-2.0

package kubelet_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/harness/node"
)

// TestExplained compares pods under each policy of the Topology Manager with `podlace sriov explain` for the same request. A NUMA node has
// 8 VFs and 8 CPUs, one of them reserved by the kubelet, so a pod with 8 CPUs never fits on one.
func TestExplained(t *testing.T) {
	node.Skip(t)
	for _, policy := range []string{"best-effort", "restricted", "single-numa-node"} {
		t.Run(policy, func(t *testing.T) {
			l := newLab(t, policy)
			l.runPod("three", guaranteedLimits(3, 3))
			l.checkAligned("three")
			for _, c := range []struct {
				cpus, vfs int
				never     bool // refused by single-numa-node on an idle node, too
			}{
				{cpus: 2, vfs: 2}, {cpus: 1, vfs: 8}, {cpus: 7, vfs: 1}, {cpus: 8, vfs: 1, never: true}, {cpus: 4, vfs: 6}, {vfs: 8},
				{vfs: 9, never: true}, {cpus: 1, vfs: 9, never: true},
			} {
				l.compareExplained(policy, c.cpus, c.vfs, c.never)
			}
		})
	}
}

// compareExplained fails the test if the kubelet runs a pod for which `podlace sriov explain` predicts a refusal, or the reverse.
func (l *testLab) compareExplained(policy string, cpus, count int, never bool) {
	l.t.Helper()
	limits := vfs(count)
	args := []string{"explain", resource, "--policy", policy, "--count", fmt.Sprint(count)}
	if cpus > 0 {
		limits = guaranteedLimits(cpus, count)
		args = append(args, "--cpus", fmt.Sprint(cpus))
	}
	says, err := l.runPodlace(args...)
	pod := fmt.Sprintf("c%d-v%d", cpus, count)
	switch {
	case strings.Contains(says, "  yes\n") && err == nil:
		l.runPod(pod, limits)
		l.removePods(pod)
	case strings.Contains(says, "  no, ") && err != nil:
		if reason, message := l.runRefused(pod, limits); reason != affinityError {
			l.t.Errorf("%s: %s: %s, and podlace says\n%s", pod, reason, message, says)
		}
	default:
		l.t.Errorf("%s: %v\n%s", pod, err, says)
	}
	if got := strings.Contains(says, "never on a node like this"); got != never && policy == "single-numa-node" {
		l.t.Errorf("%s: refused on the idle node %v, want %v\n%s", pod, got, never, says)
	}
}
