// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"fmt"
	"sync"

	"github.com/podlace/podlace/pkg/claim"
)

// gate keeps devices from being handed out while it is decided whose they are: Allocate holds it for reading, refresh and whoever changes a
// device for writing. It is taken before all other locks.
type gate struct {
	sync.RWMutex
	preparing map[string]bool // devices that are being changed, which no pod gets meanwhile
	handOuts  *handOuts
	claims    *claim.Cache
}

func newGate(checkpoint, claims, root string) *gate {
	return &gate{preparing: map[string]bool{}, handOuts: newHandOuts(checkpoint), claims: claim.NewCache(claims, root)}
}

// unclaimed is an error if a claim has one of the devices, or may have: the offer may be older than the record of the claim.
func (g *gate) unclaimed(ids map[string]bool) error {
	records, err := g.claims.List()
	for _, r := range records {
		for id := range ids {
			if r.Has(id) {
				return fmt.Errorf("device %s is of %s", id, r)
			}
		}
	}
	if err != nil {
		return fmt.Errorf("whether a claim has a device: %w", err)
	}
	return nil
}

// free is an error if one of the devices is being changed.
func (g *gate) free(ids map[string]bool) error {
	for id := range ids {
		if g.preparing[id] {
			return fmt.Errorf("device %s is getting another driver, or its PF other VFs", id)
		}
	}
	return nil
}

// change changes devices that no pod has and that no other call changes: check is an error if somebody has one, and is asked while nothing
// is handed out.
func (g *gate) change(ids []string, check, change func() error) error {
	wanted := map[string]bool{}
	for _, id := range ids {
		wanted[id] = true
	}
	g.Lock()
	err := g.free(wanted)
	if err != nil {
		err = fmt.Errorf("%w: %w", errInUse, err)
	} else {
		err = check()
	}
	for _, id := range ids {
		if err == nil {
			g.preparing[id] = true
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
			delete(g.preparing, id)
		}
	}()
	return change()
}
