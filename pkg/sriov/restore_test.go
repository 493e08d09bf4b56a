// SPDX-License-Identifier: Apache-2.0

package sriov

import "testing"

// TestNamesInOrder (F-31): an ADD that was killed while it removed alternative names does not change their order.
func TestNamesInOrder(t *testing.T) {
	l := newLab(t)
	l.allocate(vf0)
	l.add("a")
	l.called(vf0, "net1")
	l.leave()
	must(t, l.host.AddAltName(l.link("net1"), "other-ens0f0v0"))
	l.del("a")
}
