// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"errors"
	"strings"
	"testing"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/poddevices"
)

// TestUnclaimed checks that a VF that a claim got after it was offered is not allocated to a container.
func TestUnclaimed(t *testing.T) {
	folder := t.TempDir()
	g := newGate("", folder, "")
	ids := map[string]bool{vf00: true}
	if err := g.checkUnclaimed(ids); err != nil {
		t.Fatal(err)
	}
	c := &poddevices.Claim{UID: "c-0", Namespace: "shop", Name: "nic", Request: "nic", Pool: "node", Device: "x"}
	r := claim.Record{State: claim.Preparing, Devices: []poddevices.Device{{Resource: "example.com/one", ID: vf00, Claim: c}}}
	if err := claim.Write(folder, r); err != nil {
		t.Fatal(err)
	}
	if err := g.checkUnclaimed(ids); err == nil || !strings.Contains(err.Error(), vf00+" belongs to claim shop/nic") {
		t.Errorf("got %v", err)
	}
	if err := g.checkUnclaimed(map[string]bool{vf01: true}); err != nil {
		t.Error(err)
	}
}

// TestGateChangesOnce checks that one call at a time changes a device. Otherwise, one could give a VF to a claim while another removes
// the PF's VFs.
func TestGateChangesOnce(t *testing.T) {
	g := newGate("", "/nonexistent", "")
	ok := func() error { return nil }
	err := g.runChange([]string{vf00, vf01}, ok, func() error {
		if err := g.runChange([]string{vf01}, ok, ok); !errors.Is(err, errInUse) {
			t.Errorf("a second change of %s meanwhile: got %v", vf01, err)
		}
		return g.runChange([]string{vf10}, ok, ok)
	})
	if err != nil {
		t.Error(err)
	}
	if err := g.runChange([]string{vf01}, ok, ok); err != nil {
		t.Errorf("after the change: %v", err)
	}
}
