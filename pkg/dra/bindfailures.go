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

// retryBind is the pause before another bind of a device after a timeout.
const retryBind = 5 * time.Minute

// bindTimeout is the kind of fault after such a timeout.
const bindTimeout = "bind-timeout"

// bindFailures are the devices whose bind timed out.
type bindFailures struct {
	mu        sync.Mutex
	byAddress map[pci.Address]bindFailure
}

type bindFailure struct {
	at  time.Time
	err error
}

// record records the result of a bind. Only a timeout is kept, because the kernel may still be working on the bind.
func (b *bindFailures) record(a pci.Address, err error) {
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

// recent returns the error of a bind that timed out within retryBind.
func (b *bindFailures) recent(a pci.Address) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if f, ok := b.byAddress[a]; ok && time.Since(f.at) < retryBind {
		return fmt.Errorf("bind the driver: the last attempt timed out; retrying after %s: %w", retryBind, f.err)
	}
	return nil
}

// faults returns the given faults together with those of devices whose bind timed out.
func (b *bindFailures) faults(of map[string]Fault) map[string]Fault {
	b.mu.Lock()
	defer b.mu.Unlock()
	var found map[string]Fault
	for a, f := range b.byAddress {
		if time.Since(f.at) >= retryBind {
			continue
		}
		if len(found) == 0 {
			found = map[string]Fault{}
			maps.Copy(found, of)
		}
		found[a.String()] = Fault{Kind: bindTimeout, Text: f.err.Error()}
	}
	if found == nil {
		return of
	}
	return found
}
