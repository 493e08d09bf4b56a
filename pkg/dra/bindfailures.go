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

// retryBind is how long a device whose driver could not be bound in time is left alone.
const retryBind = 5 * time.Minute

// bindTimeout is the kind of fault of such a device.
const bindTimeout = "bind-timeout"

// bindFailures are the devices whose drivers were not bound in time.
type bindFailures struct {
	mu sync.Mutex
	of map[pci.Address]bindFailure
}

type bindFailure struct {
	at  time.Time
	err error
}

// note remembers how a bind went. Only one that did not end in time counts: the kernel may work on it still.
func (b *bindFailures) note(a pci.Address, err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !errors.Is(err, context.DeadlineExceeded) {
		delete(b.of, a)
		return
	}
	if b.of == nil {
		b.of = map[pci.Address]bindFailure{}
	}
	b.of[a] = bindFailure{time.Now(), err}
}

// recent returns the error of a bind that did not end in time, for retryBind.
func (b *bindFailures) recent(a pci.Address) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if f, ok := b.of[a]; ok && time.Since(f.at) < retryBind {
		return fmt.Errorf("driver: tried again after %s: %w", retryBind, f.err)
	}
	return nil
}

// faults adds to the faults of devices those whose driver was not bound in time.
func (b *bindFailures) faults(of map[string]Fault) map[string]Fault {
	b.mu.Lock()
	defer b.mu.Unlock()
	var found map[string]Fault
	for a, f := range b.of {
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
