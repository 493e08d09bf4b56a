// SPDX-License-Identifier: Apache-2.0

package upgrade

import (
	"fmt"
	"net"
	"testing"

	"github.com/podlace/podlace/conf"
	"github.com/podlace/podlace/integration/harness"
)

// TestUpgrade starts 20 pods with the older programs, replaces these while the pods run, and later puts them back. Each version must keep
// and restore what the other's pods need, and end them without a trace.
func TestUpgrade(t *testing.T) {
	older, newer := versions(t)
	for backend, conflist := range harness.InOrder(map[string]string{"nftables": conf.Default, "iptables": "10-podlace-iptables.conflist"}) {
		t.Run(backend, func(t *testing.T) {
			harness.NeedBackend(t, backend)
			n := newNode(t, conflist, "10-podlace-l2.conflist")
			n.serve()
			empty := n.oracle(older, newer, older)

			n.then("start with the old programs", func() { n.install(older); n.fill("old", 20); n.serves() })
			n.then("upgrade", func() { n.install(newer); n.works() })
			n.maintain()
			n.then("new pods", func() { n.fill("new", 6); n.serves() })
			n.then("end of 10 old pods by the new programs", func() { n.end(n.pods[10:20]...); n.serves() })
			n.then("return to the old programs", func() { n.install(older); n.works() })
			n.maintain()
			n.then("more pods of the old programs", func() { n.fill("more", 4); n.serves() })
			n.then("end of all pods by the old programs", func() { n.end(n.pods...); n.fixMACs() })
			empty.Clean(t, n.step)
		})
	}
}

// fill starts pods, and opens connections between the pods of each half.
func (n *node) fill(name string, count int) {
	n.Helper()
	first := len(n.pods)
	for i := range count {
		n.add(fmt.Sprintf("%s-%02d", name, i), first+i)
	}
	n.connect(n.pods[first : first+count/2])
	n.connect(n.pods[first+count/2:])
}

// maintain runs the verbs that keep the pods' state, and those that restore it after a flush.
func (n *node) maintain() {
	n.Helper()
	since := n.step
	n.then(since+", STATUS and GC", func() { n.status(); n.collect(); n.serves() })
	n.then(since+", flush", n.checkedFlush)
	n.then(since+", STATUS after the flush", func() { n.status(); n.works() })
	n.then(since+", another flush", n.checkedFlush)
	n.then(since+", podlace reload after the flush", func() { n.reload(); n.serves() })
}

// checkedFlush flushes the rules and checks that the pods need them, without which later checks of hostPorts and spoofing protection would
// prove nothing.
func (n *node) checkedFlush() {
	n.Helper()
	n.flush()
	p := n.pods[0]
	at := net.JoinHostPort(harness.NodeV4, fmt.Sprint(p.port))
	if _, err := harness.Dial(n.lan, at, harness.Patience(true)); err == nil {
		n.wrong("the hostPort of %s still answers", p.Name)
	}
	if !spoofs(n, p) {
		n.wrong("%s still cannot send from another address", p.Name)
	}
}
