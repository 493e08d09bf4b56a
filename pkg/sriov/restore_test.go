// SPDX-License-Identifier: Apache-2.0

package sriov

import "testing"

// TestNamesInOrder: after an ADD that is killed while it removes alternative names, DEL restores them in their former order.
func TestNamesInOrder(t *testing.T) {
	l := newLab(t)
	l.allocate(vf0)
	l.add("a")
	l.addSysfsName(vf0, "net1")
	l.retrieveLink()
	must(t, l.host.AddAltName(l.link("net1"), "other-ens0f0v0"))
	l.del("a")
}
