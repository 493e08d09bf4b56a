// SPDX-License-Identifier: Apache-2.0

package faults

import (
	"fmt"
	"strings"
	"testing"

	"github.com/podlace/podlace/pkg/kernel/kerneltest"
)

// tolerates tells a change whose failure is logged and fails nothing: stale UDP connections end by themselves, and without nftables the
// iptables backend goes without 127.0.0.1. Which address comes next is a preference. The index of the leases is rebuilt from them when it
// could not be written; ADD alone says so, and gives its leases back. So
// it is with the note in a record of what DEL has done.
func (c call) tolerates(change string) bool {
	switch {
	case strings.HasPrefix(change, "conntrack "), strings.Contains(change, "/last_reserved_ip."), strings.HasSuffix(change, "/released"):
		return true
	case c.verb != "ADD" && (strings.Contains(change, "/.podlace/") || strings.HasPrefix(change, "write /run/podlace/")):
		return true
	}
	// What cannot be removed is for others to read, and keeps no VF from coming home.
	if strings.HasPrefix(change, "remove /var/run/k8s.cni.cncf.io/devinfo/cni/") {
		return true
	}
	return c.conf["backend"] == "iptables" && change == "nft add table podlace_hostport"
}

// forEachChange runs test for each change that a call makes without a fault, as a subtest that names it.
func (w world) forEachChange(c call, changes []string, test func(w world, n int)) {
	w.Helper()
	if len(changes) == 0 && c.plugin != "bandwidth" { // its devices go with the bridge's link
		w.Errorf("%s %s makes no change that could fail", c.plugin, c.verb)
	}
	for i, op := range changes {
		w.Run(fmt.Sprintf("%s %s %d %s", c.plugin, c.verb, i+1, op), func(t *testing.T) { test(w.in(t), i+1) })
	}
}

// fault runs a call with a fault. failed is false when the change is one that may fail.
func (w world) fault(c call, n int) (failed bool) {
	w.Helper()
	o := c.run(w, n)
	if o.exit == 0 {
		if len(o.changes) < n || !c.tolerates(o.changes[n-1]) {
			w.Errorf("the fault was not told: %q", o.changes)
		}
		return false
	}
	o.refused(w, c, n)
	return true
}

// changesOf returns the changes that the ADD of a plugin makes.
func (w world) changesOf(i int) []string {
	w.Helper()
	changes := w.call(i, "ADD", w.add(i)).ok(w).changes
	w.del(i + 1)
	return changes
}

// TestAdd (C-39, F-11, F-31, F-32): a failed ADD leaves everything as it was, without any DEL, and the next ADD works.
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

// TestAddAfterFault (F-11): what a failed ADD left could still hinder the next one, though no oracle sees it. TestFirst does the same for
// the whole chain.
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

// TestDel (C-53, F-11, F-31): after a DEL that failed anywhere the next one finishes, and no error is one that runtimes take for success.
func TestDel(t *testing.T) { testRemoval(t, "DEL") }

// TestGC (F-11): the same for GC, which deletes the pod because the list of valid attachments lacks it.
func TestGC(t *testing.T) { testRemoval(t, "GC") }

func testRemoval(t *testing.T, verb string) {
	forEachChain(t, func(w world) {
		for i, s := range w.chain {
			if s.plugin == "loopback" && verb == "GC" {
				continue // has nothing of its own
			}
			w.addOld(i + 1)
			c := w.call(i, verb, nil)
			changes := c.ok(w).changes
			w.del(i + 1)
			w.same(w.base)
			w.forEachChange(c, changes, func(w world, n int) {
				w.addOld(i + 1)
				w.fault(c, n)
				c.ok(w)
				if s.plugin == "sriov" { // which has nothing to ask host-local for any more; the next pod rebuilds the index
					w.add(1)
					w.del(1)
				}
				w.del(i) // of the plugins before
				w.same(w.base)
			})
		}
	})
}

// addOld is add, and GC may collect at once what it made.
func (w world) addOld(n int) {
	w.Helper()
	w.add(n)
	if err := kerneltest.Age(kerneltest.StateDirs()...); err != nil {
		w.Fatal(err)
	}
}

// TestNoChange (C-68, C-72): CHECK and STATUS only look.
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
