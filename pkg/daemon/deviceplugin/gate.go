// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"fmt"
	"sync"

	"github.com/podlace/podlace/pkg/claim"
)

// allocationGate prevents allocations while the daemon determines the owners of devices: Allocate locks it for reading, a refresh or a
// change of devices for writing. It is locked before any other lock.
type allocationGate struct {
	sync.RWMutex
	changing    map[string]bool // devices that are being changed; no pod gets them
	allocations *pendingAllocations
	claims      *claim.Cache
}

func newGate(checkpoint, claims, root string) *allocationGate {
	return &allocationGate{changing: map[string]bool{}, allocations: newAllocations(checkpoint), claims: claim.NewCache(claims, root)}
}

// checkUnclaimed returns an error if a claim has, or may have, one of the devices since it was offered to the kubelet.
func (g *allocationGate) checkUnclaimed(ids map[string]bool) error {
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
func (g *allocationGate) checkFree(ids map[string]bool) error {
	for id := range ids {
		if g.changing[id] {
			return fmt.Errorf("device %s is being changed: it gets another driver, or its PF another number of VFs", id)
		}
	}
	return nil
}

// runChange calls change for devices that no pod has and no other call is changing. Before that, check returns an error if a device is
// in use; nothing is allocated while it runs.
func (g *allocationGate) runChange(ids []string, check, change func() error) error {
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
