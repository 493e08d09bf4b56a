// SPDX-License-Identifier: Apache-2.0

package kubernetes_test

import (
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// agentsKilled kills agents at random moments, including their start, while pods are created and deleted. The kubelet restarts the
// container each time within a second (maxContainerRestartPeriod).
func (l *life) agentsKilled(t *testing.T) {
	var monitors []*monitor
	for _, n := range l.machines()[1:] {
		monitors = append(monitors, l.monitor(t, n))
	}
	tr, ch := l.traffic(t, pairs()...), l.churn(t)
	begin := time.Now()
	var killing sync.WaitGroup
	for i, node := range l.machines()[1:] {
		killing.Go(func() {
			moments := rand.New(rand.NewPCG(142, uint64(i)))
			for pid, k := 0, i; k < *kills; k += len(monitors) {
				await(t, "agent on "+node, func() bool { next := l.agent(t, node); return next != 0 && next != pid })
				time.Sleep(time.Duration(moments.Int64N(int64(500 * time.Millisecond))))
				pid = l.signal(t, node, pid, unix.SIGKILL)
			}
		})
	}
	killing.Wait()
	took := time.Since(begin)
	l.settled(t)
	lost, _ := tr.end(t, "")
	ch.end(t)
	changes := 0
	for _, m := range monitors {
		changes += m.end(t)
	}
	t.Logf("%d agents killed in %.0f s; %d changes of routes and nexthops", *kills, took.Seconds(), changes)
	if lost != 0 || changes != 0 {
		t.Errorf("%d packets lost and %d changes of routes and nexthops, want none", lost, changes)
	}
	l.lossIsSeen(t)
}

// lossIsSeen checks that the tests of life would detect losses.
func (l *life) lossIsSeen(t *testing.T) {
	t.Helper()
	m := l.monitor(t, "node1")
	tr := l.traffic(t, pairs()...)
	pid := l.signal(t, "node1", 0, unix.SIGSTOP)
	l.run(t, "exec", "node1", "ip", "route", "delete", l.podCIDR(t, "node2", "4"))
	time.Sleep(100 * pace)
	if err := unix.Kill(pid, unix.SIGCONT); err != nil {
		t.Fatal(err)
	}
	await(t, "route again", func() bool { return m.count("route") > 0 })
	others, lost := tr.end(t, "node2")
	if changes := m.end(t); others != 0 || lost < 50 || changes < 2 {
		t.Errorf("without a route of node1 to node2 %d packets were lost and %d of the other nodes, with %d changes, want many, 0 and at least 2", lost, others, changes)
	}
}
