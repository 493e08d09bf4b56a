// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/podlace/podlace/pkg/pci"
)

// retryBind is the pause before the next attempt to bind a driver, after an attempt timed out.
const retryBind = 5 * time.Minute

// bindTimeout is the kind of fault of a device whose driver could not be bound in time.
const bindTimeout = "bind-timeout"

// bindFailure is an attempt to bind a device's driver that timed out.
type bindFailure struct {
	at  time.Time
	err error
}

func (f bindFailure) isRecent() bool { return time.Since(f.at) < retryBind }

// recordBind records a bind that timed out. It counts as a fault of the device, because the kernel may still be binding. Any other result
// deletes the record.
func (d *Driver) recordBind(a pci.Address, err error) {
	d.change(func() {
		if delete(d.bindFailures, a); errors.Is(err, context.DeadlineExceeded) {
			d.bindFailures[a] = bindFailure{time.Now(), err}
		}
	})
}

// recentBindFailure returns an error if binding the driver of a device timed out less than retryBind ago.
func (d *Driver) recentBindFailure(a pci.Address) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	if f := d.bindFailures[a]; f.isRecent() {
		return fmt.Errorf("bind the driver: the last attempt timed out; retrying after %s: %w", retryBind, f.err)
	}
	return nil
}
