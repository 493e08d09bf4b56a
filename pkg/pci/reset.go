// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"
)

// resetTimeout bounds a reset of a function, which has 100 ms for it (PCI Express Base Specification, section 6.6.2).
const resetTimeout = 10 * time.Second

// ResetFunction resets a VF by what the kernel knows for it, a function level reset (FLR) where it can. One that has a driver is refused:
// some drivers then wait for ever, and with them the process that asked. It waits for at most 10 s; nothing can stop the kernel, so that
// the process may not end before it is done.
func ResetFunction(ctx context.Context, sysfs string, a Address) error {
	return controlledVF(ctx, sysfs, a, resetTimeout, func(ctx context.Context, c control) error {
		if driver, err := c.driver(); err != nil || driver != "" {
			return errors.Join(err, fmt.Errorf("reset %s: it has the driver %s: take it away first", a, orNone(driver)))
		}
		if _, err := c.root.Stat(c.folder + "/reset"); errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("reset %s: the kernel knows no way to reset it", a)
		}
		return c.write(ctx, c.folder+"/reset", "1")
	})
}
