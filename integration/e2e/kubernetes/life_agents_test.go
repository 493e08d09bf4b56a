// SPDX-License-Identifier: Apache-2.0

package kubernetes_test

import (
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// killAgents kills agents at random times, also during their start, while pods come and go. The kubelet restarts them within a second
// (maxContainerRestartPeriod).
func (l *clusterLife) killAgents(t *testing.T) {
	var monitors []*eventMonitor
	for _, n := range l.machineNames()[1:] {
		monitors = append(monitors, l.startMonitor(t, n))
	}
	tr, ch := l.startTraffic(t, podPairs()...), l.churn(t)
	begin := time.Now()
	var killing sync.WaitGroup
	for i, node := range l.machineNames()[1:] {
		killing.Go(func() {
			moments := rand.New(rand.NewPCG(142, uint64(i)))
			for pid, k := 0, i; k < *kills; k += len(monitors) {
				awaitCondition(t, "agent on "+node, func() bool { next := l.agentPID(t, node); return next != 0 && next != pid })
				time.Sleep(time.Duration(moments.Int64N(int64(500 * time.Millisecond))))
				pid = l.signalAgent(t, node, pid, unix.SIGKILL)
			}
		})
	}
	killing.Wait()
	took := time.Since(begin)
	l.awaitAgents(t)
	lost, _ := tr.endFlows(t, "")
	ch.endChurn(t)
	changes := 0
	for _, m := range monitors {
		changes += m.endMonitor(t)
	}
	t.Logf("%d agents killed in %.0f s; %d changes of routes and nexthops", *kills, took.Seconds(), changes)
	if lost != 0 || changes != 0 {
		t.Errorf("%d packets lost and %d changes of routes and nexthops, want none", lost, changes)
	}
	l.proveDetection(t)
}

// proveDetection causes losses to prove that the tests of TestClusterLife would detect them.
func (l *clusterLife) proveDetection(t *testing.T) {
	t.Helper()
	m := l.startMonitor(t, "node1")
	tr := l.startTraffic(t, podPairs()...)
	pid := l.signalAgent(t, "node1", 0, unix.SIGSTOP)
	l.runScript(t, "exec", "node1", "ip", "route", "delete", l.podCIDROf(t, "node2", "4"))
	time.Sleep(100 * requestPace)
	if err := unix.Kill(pid, unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	awaitCondition(t, "route again", func() bool { return m.countEvents("route") > 0 })
	others, lost := tr.endFlows(t, "node2")
	if changes := m.endMonitor(t); others != 0 || lost < 50 || changes < 2 {
		t.Errorf("without a route of node1 to node2 %d packets were lost and %d of the other nodes, with %d changes, want many, 0 and at least 2", lost, others, changes)
	}
}
