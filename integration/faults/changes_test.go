// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"fmt"
	"strings"
	"testing"

	"github.com/podlace/podlace/pkg/kernel/kerneltest"
)

// tolerates reports whether a failure of the change is only logged and the call succeeds. Stale UDP connections expire by themselves.
// Without nftables, the iptables backend does without 127.0.0.1. The next address to assign is only a preference. The index is rebuilt
// from the leases if it could not be written; only ADD reports that, and releases its leases. The note of a finished DEL in a record
// is optional as well.
func (c call) tolerates(change string) bool {
	switch {
	case strings.HasPrefix(change, "conntrack "), strings.Contains(change, "/last_reserved_ip."), strings.HasSuffix(change, "/released"):
		return true
	case c.verb != "ADD" && (strings.Contains(change, "/.podlace/") || strings.HasPrefix(change, "write /run/podlace/")):
		return true
	}
	// Only other programs read this file. It does not prevent the restoration of a VF.
	if strings.HasPrefix(change, "remove /var/run/k8s.cni.cncf.io/devinfo/cni/") {
		return true
	}
	return c.conf["backend"] == "iptables" && change == "nft add table podlace_hostport"
}

// forEachChange runs test for each change of a successful call, as a subtest with the change's name.
func (w world) forEachChange(c call, changes []string, test func(w world, n int)) {
	w.Helper()
	if len(changes) == 0 && c.plugin != "bandwidth" { // its devices disappear with the bridge's link
		w.Errorf("%s %s makes no change that could fail", c.plugin, c.verb)
	}
	for i, op := range changes {
		w.Run(fmt.Sprintf("%s %s %d %s", c.plugin, c.verb, i+1, op), func(t *testing.T) { test(w.in(t), i+1) })
	}
}

// fault runs a call in which change n fails. failed is false if the call tolerates the failure.
func (w world) fault(c call, n int) (failed bool) {
	w.Helper()
	o := c.run(w, n)
	if o.exit == 0 {
		if len(o.changes) < n || !c.tolerates(o.changes[n-1]) {
			w.Errorf("the injected fault was not reported: %q", o.changes)
		}
		return false
	}
	o.refused(w, c, n)
	return true
}

// changesOf returns the changes that a plugin's ADD makes.
func (w world) changesOf(i int) []string {
	w.Helper()
	changes := w.call(i, "ADD", w.add(i)).ok(w).changes
	w.del(i + 1)
	return changes
}

// TestAdd (C-39, F-11, F-31, F-32): a failed ADD leaves everything as before, without any DEL, and the next ADD works.
func TestAdd(t *testing.T) {
	forEachChain(t, func(w world) {
		for i := range w.chain {
			changes := w.changesOf(i)
			add := w.call(i, "ADD", w.add(i))
			before := w.take()
			w.forEachChange(add, changes, func(w world, n int) {
				if w.fault(add, n) {
					w.same(before)
				} else {
					w.call(i, "DEL", nil).ok(w)
				}
			})
			result := add.ok(w).stdout
			w.call(i, "CHECK", result).ok(w)
			w.del(i + 1)
			w.same(w.base)
		}
	})
}

// TestAddAfterFault (F-11) looks for leftovers of a failed ADD that no oracle sees but that would hinder the next ADD. TestFirst does
// the same for the whole chain.
func TestAddAfterFault(t *testing.T) {
	forEachShortChain(t, func(w world) {
		for i := range w.chain {
			changes := w.changesOf(i)
			add := w.call(i, "ADD", w.add(i))
			w.forEachChange(add, changes, func(w world, n int) {
				w.fault(add, n)
				w.call(i, "DEL", nil).ok(w)
				result := add.ok(w).stdout
				w.call(i, "CHECK", result).ok(w)
				w.call(i, "DEL", nil).ok(w)
			})
			w.del(i + 1)
			w.same(w.base)
		}
	})
}

// TestDel (C-53, F-11, F-31): after a failed DEL the next DEL finishes, and runtimes take no error for success.
func TestDel(t *testing.T) { testRemoval(t, "DEL") }

// TestGC (F-11) does the same for GC. GC deletes the pod because the list of valid attachments lacks it.
func TestGC(t *testing.T) { testRemoval(t, "GC") }

func testRemoval(t *testing.T, verb string) {
	forEachChain(t, func(w world) {
		for i, s := range w.chain {
			if s.plugin == "loopback" && verb == "GC" {
				continue // the plugin keeps no state
			}
			w.addCollectable(i + 1)
			c := w.call(i, verb, nil)
			changes := c.ok(w).changes
			w.del(i + 1)
			w.same(w.base)
			w.forEachChange(c, changes, func(w world, n int) {
				w.addCollectable(i + 1)
				w.fault(c, n)
				c.ok(w)
				if s.plugin == "sriov" { // sriov needs nothing more from host-local; the next pod rebuilds the index
					w.add(1)
					w.del(1)
				}
				w.del(i) // the preceding plugins
				w.same(w.base)
			})
		}
	})
}

// addCollectable runs add and makes the new files old enough for GC.
func (w world) addCollectable(n int) {
	w.Helper()
	w.add(n)
	if err := kerneltest.Age(kerneltest.StateDirs()...); err != nil {
		w.Fatal(err)
	}
}

// TestNoChange (C-68, C-72): CHECK and STATUS change nothing.
func TestNoChange(t *testing.T) {
	forEachChain(t, func(w world) {
		result := w.add(len(w.chain))
		for i := range w.chain {
			for _, verb := range []string{"CHECK", "STATUS"} {
				if o := w.call(i, verb, result).ok(w); len(o.changes) > 0 {
					w.Errorf("%s %s makes changes: %q", w.chain[i].plugin, verb, o.changes)
				}
			}
		}
		w.del(len(w.chain))
		w.same(w.base)
	})
}
