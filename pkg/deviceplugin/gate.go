// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"fmt"
	"sync"
)

// gate keeps devices from being handed out while it is decided whose they are: Allocate holds it for reading, refresh and whoever changes a
// device for writing. It is taken before all other locks.
type gate struct {
	sync.RWMutex
	preparing map[string]bool // devices that are being changed, whom nobody gets meanwhile
	handOuts  *handOuts
}

func newGate(checkpoint string) *gate {
	return &gate{preparing: map[string]bool{}, handOuts: newHandOuts(checkpoint)}
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

// change changes devices that nobody has: check is an error if somebody has one, and is asked while nothing is handed out.
func (g *gate) change(ids []string, check, change func() error) error {
	g.Lock()
	err := check()
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
