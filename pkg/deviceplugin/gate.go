// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"fmt"
	"sync"

	"github.com/podlace/podlace/pkg/claim"
)

// gate prevents the allocation of devices while their owners are being determined. Allocate holds it for reading; refresh and changes of
// devices hold it for writing. It is locked before all other locks.
type gate struct {
	sync.RWMutex
	changing    map[string]bool // devices that are being changed; no pod gets them
	allocations *allocations
	claims      *claim.Cache
}

func newGate(checkpoint, claims, root string) *gate {
	return &gate{changing: map[string]bool{}, allocations: newAllocations(checkpoint), claims: claim.NewCache(claims, root)}
}

// checkUnclaimed returns an error if a claim has one of the devices, or may have it. The offer may be older than the claim's record.
func (g *gate) checkUnclaimed(ids map[string]bool) error {
	records, err := g.claims.List()
	for _, r := range records {
		for id := range ids {
			if r.Has(id) {
				return fmt.Errorf("device %s belongs to %s", id, r)
			}
		}
	}
	if err != nil {
		return fmt.Errorf("find the devices of claims: %w", err)
	}
	return nil
}

// checkFree returns an error if one of the devices is being changed.
func (g *gate) checkFree(ids map[string]bool) error {
	for id := range ids {
		if g.changing[id] {
			return fmt.Errorf("device %s is being changed: it gets another driver, or its PF another number of VFs", id)
		}
	}
	return nil
}

// change changes devices that no pod has and that no other call is changing. check returns an error if a device is in use. No device is
// allocated while check runs.
func (g *gate) change(ids []string, check, change func() error) error {
	wanted := map[string]bool{}
	for _, id := range ids {
		wanted[id] = true
	}
	g.Lock()
	err := g.checkFree(wanted)
	if err != nil {
		err = fmt.Errorf("%w: %w", errInUse, err)
	} else {
		err = check()
	}
	for _, id := range ids {
		if err == nil {
			g.changing[id] = true
		}
	}
	g.Unlock()
	if err != nil {
		return err
	}
	defer func() {
		g.Lock()
		defer g.Unlock()
		for _, id := range ids {
			delete(g.changing, id)
		}
	}()
	return change()
}
