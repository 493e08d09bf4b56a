// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"sync"
	"time"

	"github.com/podlace/podlace/pkg/pci"
)

// retryBind is the pause before the next attempt to bind a driver, after an attempt timed out.
const retryBind = 5 * time.Minute

// bindTimeout is the kind of fault of a device whose driver could not be bound in time.
const bindTimeout = "bind-timeout"

// bindFailures lists the devices for which binding a driver timed out.
type bindFailures struct {
	mu        sync.Mutex
	byAddress map[pci.Address]bindFailure
}

type bindFailure struct {
	at  time.Time
	err error
}

// recordBind records that an attempt to bind a device's driver timed out. After a timeout, the kernel may still be binding the driver. For
// any other result, recordBind deletes the recorded timeout of the device.
func (b *bindFailures) recordBind(a pci.Address, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !errors.Is(err, context.DeadlineExceeded) {
		delete(b.byAddress, a)
		return
	}
	if b.byAddress == nil {
		b.byAddress = map[pci.Address]bindFailure{}
	}
	b.byAddress[a] = bindFailure{time.Now(), err}
}

// recentFailure returns an error if binding the driver of a device timed out less than retryBind ago.
func (b *bindFailures) recentFailure(a pci.Address) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if f, ok := b.byAddress[a]; ok && time.Since(f.at) < retryBind {
		return fmt.Errorf("bind the driver: the last attempt timed out; retrying after %s: %w", retryBind, f.err)
	}
	return nil
}

// addFaults returns the given faults together with the faults of devices for which binding a driver timed out.
func (b *bindFailures) addFaults(of map[string]Fault) map[string]Fault {
	b.mu.Lock()
	defer b.mu.Unlock()
	all := map[string]Fault{}
	maps.Copy(all, of)
	for a, f := range b.byAddress {
		if time.Since(f.at) < retryBind {
			all[a.String()] = Fault{Kind: bindTimeout, Text: f.err.Error()}
		}
	}
	return all
}
