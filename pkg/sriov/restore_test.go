// SPDX-License-Identifier: Apache-2.0

package sriov

import "testing"

// TestNamesInOrder (F-31): an ADD is killed while it removes alternative names. DEL then restores the alternative names in the same order
// as before the ADD.
func TestNamesInOrder(t *testing.T) {
	l := newLab(t)
	l.allocate(vf0)
	l.add("a")
	l.addSysfsName(vf0, "net1")
	l.retrieveLink()
	must(t, l.host.AddAltName(l.link("net1"), "other-ens0f0v0"))
	l.del("a")
}
