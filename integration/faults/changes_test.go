// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"fmt"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
)

// toleratesFailure reports whether a plugin may succeed although a change failed. Some failures do no harm: stale UDP connections time out
// in the kernel anyway; with iptables, only hostPorts on 127.0.0.1 need an nftables table; the last assigned address is only a hint;
// without its boot file, host-local only fails to recognize leases of an earlier boot. A DEL that cannot save its progress must still
// succeed, as must one whose VF has left the pod: the journal keeps what could not be restored.
func (c pluginCall) toleratesFailure(change string) bool {
	switch {
	case strings.HasPrefix(change, "conntrack "), strings.Contains(change, "/last_reserved_ip."), strings.HasSuffix(change, "/podlace_boot"):
		return true
	case c.verb != "ADD" && strings.HasPrefix(change, "write /run/podlace/"):
		return true
	case c.plugin == "sriov" && c.verb != "ADD" && strings.HasPrefix(change, "link ") && !strings.Contains(change, " net1 "):
		return true
	}
	// Podlace writes the device info file for other programs only. DEL restores the VF even if the file cannot be removed.
	if strings.HasPrefix(change, "remove /var/run/k8s.cni.cncf.io/devinfo/cni/") {
		return true
	}
	return c.conf["backend"] == "iptables" && change == "nft add table podlace_hostport"
}

// forEachChange runs a subtest for each kernel or file change of a successful plugin call, or for a fifth of them.
func (w faultWorld) forEachChange(c pluginCall, changes []string, test func(w faultWorld, n int)) {
	w.Helper()
	if len(changes) == 0 && c.plugin != "bandwidth" { // bandwidth may change nothing, because its devices disappear with the bridge's link
		w.Errorf("%s %s makes no change that could fail", c.plugin, c.verb)
	}
	stride := harness.Some(5, 1)
	for i, op := range changes {
		if i%stride != (len(changes)-1)%stride { // the last change is always in the sample
			continue
		}
		w.Run(fmt.Sprintf("%s %s %d %s", c.plugin, c.verb, i+1, op), func(t *testing.T) { test(w.inSubtest(t), i+1) })
	}
}

// runFault lets change number n of a plugin call fail. It returns false if the call still succeeds.
func (w faultWorld) runFault(c pluginCall, n int) (failed bool) {
	w.Helper()
	o := c.runFailing(w, n)
	if o.exit == 0 {
		if len(o.changes) < n || !c.toleratesFailure(o.changes[n-1]) {
			w.Errorf("the injected fault was not reported: %q", o.changes)
		}
		return false
	}
	o.checkRefused(w, c, n)
	return true
}

// changesOf returns the changes of a plugin's ADD.
func (w faultWorld) changesOf(i int) []string {
	w.Helper()
	changes := w.callOf(i, "ADD", w.addChain(i)).mustRun(w).changes
	w.delChain(i + 1)
	return changes
}

// TestAdd (C-39, F-11, F-31, F-32): a failed ADD leaves the node as it was without any DEL, and the next ADD works.
func TestAdd(t *testing.T) {
	forEachChain(t, func(w faultWorld) {
		for i := range w.chain {
			changes := w.changesOf(i)
			add := w.callOf(i, "ADD", w.addChain(i))
			before := w.take()
			w.forEachChange(add, changes, func(w faultWorld, n int) {
				if w.runFault(add, n) {
					w.checkSame(before)
				} else {
					w.callOf(i, "DEL", nil).mustRun(w)
				}
			})
			result := add.mustRun(w).stdout
			w.callOf(i, "CHECK", result).mustRun(w)
			w.delChain(i + 1)
			w.checkSame(w.base)
		}
	})
}

// TestAddAfterFault (F-11) looks for leftovers of a failed ADD that no snapshot shows but that could make the next ADD fail. TestFirst
// covers the whole chain.
func TestAddAfterFault(t *testing.T) {
	forEachShortChain(t, func(w faultWorld) {
		for i := range w.chain {
			changes := w.changesOf(i)
			add := w.callOf(i, "ADD", w.addChain(i))
			w.forEachChange(add, changes, func(w faultWorld, n int) {
				w.runFault(add, n)
				w.callOf(i, "DEL", nil).mustRun(w)
				result := add.mustRun(w).stdout
				w.callOf(i, "CHECK", result).mustRun(w)
				w.callOf(i, "DEL", nil).mustRun(w)
			})
			w.delChain(i + 1)
			w.checkSame(w.base)
		}
	})
}

// TestDel (C-53, F-11, F-31): the DEL after a failed one removes the remaining state. A failed DEL's error has no phrase that a runtime
// takes for success.
func TestDel(t *testing.T) { testRemoval(t, "DEL") }

// TestGC (F-11): the GC after a failed one removes the remaining state. The pod is not in the list of valid attachments.
func TestGC(t *testing.T) { testRemoval(t, "GC") }

func testRemoval(t *testing.T, verb string) {
	forEachChain(t, func(w faultWorld) {
		for i, s := range w.chain {
			if s.plugin == "loopback" && verb == "GC" {
				continue // the plugin keeps no state
			}
			w.addCollectable(i + 1)
			c := w.callOf(i, verb, nil)
			changes := c.mustRun(w).changes
			w.delChain(i + 1)
			w.checkSame(w.base)
			w.forEachChange(c, changes, func(w faultWorld, n int) {
				w.addCollectable(i + 1)
				w.runFault(c, n)
				c.mustRun(w)
				if s.plugin == "sriov" { // sriov needs nothing more from host-local
					w.addChain(1)
					w.delChain(1)
				}
				w.delChain(i) // the preceding plugins
				w.checkSame(w.base)
			})
		}
	})
}

func (w faultWorld) addCollectable(n int) {
	w.Helper()
	w.addChain(n)
	if err := kerneltest.Age(kerneltest.StateDirs()...); err != nil {
		w.Fatal(err)
	}
}

// TestNoChange (C-68, C-72): CHECK and STATUS leave the node as it is.
func TestNoChange(t *testing.T) {
	forEachChain(t, func(w faultWorld) {
		result := w.addChain(len(w.chain))
		for i := range w.chain {
			for _, verb := range []string{"CHECK", "STATUS"} {
				if o := w.callOf(i, verb, result).mustRun(w); len(o.changes) > 0 {
					w.Errorf("%s %s makes changes: %q", w.chain[i].plugin, verb, o.changes)
				}
			}
		}
		w.delChain(len(w.chain))
		w.checkSame(w.base)
	})
}
