// SPDX-License-Identifier: Apache-2.0

package upgrade

import (
	"testing"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/harness/card"
)

// TestUpgradeVF: each version can check a pod with a VF that the other one attached, and return the VF to the node. The VF's journal passes
// between them.
func TestUpgradeVF(t *testing.T) {
	older, newer := versions(t)
	n := newNode(t, "10-podlace-sriov-main.conflist")
	card.New(t, 1)
	harness.Shell(t, "ip addr add 192.0.2.1/24 dev "+card.Name(0)+"peer")
	n.vfLife(older, older) // creates what all pods share
	n.vfLife(newer, newer)
	free := harness.Watch(t)
	for _, c := range [][2]*version{{older, newer}, {newer, older}} {
		n.vfLife(c[0], c[1])
		free.Clean(t, n.step)
	}
}

// vfLife attaches a pod by one version and ends it by another.
func (n *node) vfLife(by, ender *version) {
	n.Helper()
	n.then("VF attached by the "+by.name+" programs, detached by the "+ender.name+" ones", func() {
		n.install(by)
		p := &pod{Pod: harness.NewPod(n, by.name+"-"+ender.name)}
		a := attachment{n.networks[0], harness.Attachment(p.Pod, p.Name, nil)}
		p.attachments = []attachment{a}
		n.pods = append(n.pods, p)
		n.verb("ADD", a.network, a.rt)
		card.Tell(n)
		by.format = p.format(n)
		n.install(ender)
		n.status()
		n.collect()
		if len(n.readable()) > 0 {
			n.verb("CHECK", a.network, a.rt)
		}
		if err := harness.Ping(nil, harness.IPv4Of(n.T, p.Pod), harness.TrafficLimit); err != nil {
			n.wrong("no traffic through the VF: %v", err)
		}
		n.verb("DEL", a.network, a.rt)
		card.Tell(n)
		n.pods = nil
	})
}
