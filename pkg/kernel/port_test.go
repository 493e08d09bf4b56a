// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
)

// TestBridgePort: SetPort changes only the flags that differ, and Link returns them.
func TestBridgePort(t *testing.T) {
	w := newWire(t)
	all := BridgePort{true, true, true, true, true, true, true}
	for _, want := range []BridgePort{{}, {Hairpin: true}, {Hairpin: true, Isolated: true}, {Isolated: true}, {Locked: true}, {NoFlood: true},
		{NoMulticastFlood: true}, {NoBroadcastFlood: true}, {NoLearning: true}, all, {}} {
		port := mustLink(t, w.host, w.hostSide.Name)
		kerneltest.Must(t, w.host.SetPort(port, want))
		if got := mustLink(t, w.host, w.hostSide.Name).Port; got != want {
			t.Errorf("got %+v; want %+v", got, want)
		}
	}
	for _, want := range []bool{false, true} {
		if got := mustLink(t, w.host, w.hostSide.Name).Reserved; got != want {
			t.Errorf("the port hands reserved addresses to the bridge: %t, want %t", got, want)
		}
		kerneltest.Must(t, w.host.SetReserved(w.hostSide))
	}
	kerneltest.Must(t, w.host.ResetReserved(w.hostSide))
	if mustLink(t, w.host, w.hostSide.Name).Reserved {
		t.Error("the mask stays")
	}
	if got := all.Unlike(BridgePort{Isolated: true}); got != "hairpin true, locked true, flood false, mcast_flood false, bcast_flood false, learning false" {
		t.Error(got)
	}
	for state, want := range map[PortState]string{0: "disabled", PortForwarding: "forwarding", 4: "blocking", 9: "9"} {
		if state.String() != want {
			t.Errorf("%d is %s", state, state)
		}
	}
}
