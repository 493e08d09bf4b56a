// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"errors"
	"os"
	"regexp"
	"testing"

	"github.com/google/nftables"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/integration/snapshot"
	"github.com/podlace/podlace/pkg/cli/sandbox"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/kernel"
)

// wipeNode resets the node to its state before the first pod.
func (w faultWorld) wipeNode() {
	w.Helper()
	host, err := kernel.Host()
	if err != nil {
		w.Fatal(err)
	}
	defer host.Close()
	errs := []error{os.RemoveAll("/run/podlace"), os.RemoveAll("/var/lib/cni"),
		host.Set(kernel.Sysctl{Path: "ipv4/ip_forward", Value: "0"}, kernel.Sysctl{Path: "ipv6/conf/all/forwarding", Value: "0"})}
	for _, s := range w.chain {
		if name, ok := s.conf["bridge"].(string); ok {
			errs = append(errs, host.DelLink(name))
		}
	}
	c, err := nftables.New()
	if err == nil {
		c.FlushRuleset()
		err = c.Flush()
	}
	if err := errors.Join(append(errs, err)...); err != nil {
		w.Fatal(err)
	}
}

// sharedState matches what the first pod creates for all pods. It may remain after a failed ADD.
func sharedState() *regexp.Regexp {
	return regexp.MustCompile(`^host: (nft |order of nft |iptables |sysctl |folder |neighbour |link ft-|(address|route|qdisc|forwarding entry) .* dev ft-|` +
		`file .*/(lock|(\.[a-z]+)?\.lock|\.iptables|\.podlace_guard|\.(masqueraded|(gateway|bridge)-[^/]+)|last_reserved_ip\.\d+|podlace_boot)$)`)
}

// TestFirst (F-11) lets single changes fail in ADD of a node's first pod: a fifth of them or, with FAULTS=all, each. Nothing that belongs
// to the pod alone remains, and the next ADD creates what shared state is missing.
func TestFirst(t *testing.T) {
	for _, backend := range []string{"nftables", "iptables"} {
		t.Run(backend, func(t *testing.T) {
			if backend == "iptables" && (!iptables.Installed(true) || !iptables.Installed(false)) {
				t.Skip("SKIPPED: iptables is not installed")
			}
			w := faultWorld{T: t, chain: fullChain(backend)[:2], pod: kerneltest.NewPod(t)}
			w.opt = snapshot.Options{Pods: []*sandbox.Pod{w.pod}, Dirs: harness.StateDirs(), Ignore: sharedState()}
			defer w.wipeNode()
			for i := range w.chain {
				w.wipeNode()
				changes := w.changesOf(i)
				w.forEachChange(w.callOf(i, "ADD", nil), changes, func(w faultWorld, n int) {
					w.wipeNode()
					add := w.callOf(i, "ADD", w.addChain(i))
					before := w.take()
					if w.runFault(add, n) {
						w.checkSame(before)
					} else {
						w.callOf(i, "DEL", nil).mustRun(w)
					}
					result := add.mustRun(w).stdout
					w.callOf(i, "CHECK", result).mustRun(w)
					w.checkMTU(i)
					w.delChain(i + 1)
				})
			}
		})
	}
}

// checkMTU checks that a bridge has its original MTU even if the plugin failed to pin it. It is a no-op for a plugin without a bridge.
func (w faultWorld) checkMTU(plugin int) {
	w.Helper()
	name, ok := w.chain[plugin].conf["bridge"].(string)
	if !ok {
		return
	}
	host, err := kernel.Host()
	if err != nil {
		w.Fatal(err)
	}
	defer host.Close()
	link, ok, err := host.Link(name)
	if err != nil || !ok || link.MTU != 1500 {
		w.Errorf("%s: mtu %d, %v", name, link.MTU, err)
	}
}
