// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"
)

// resetTimeout limits the reset of a function, which may take 100 ms (PCI Express Base Specification, section 6.6.2).
const resetTimeout = 10 * time.Second

// ResetFunction resets a VF by the kernel's method, a function level reset (FLR) if possible. It refuses a function with a driver,
// because some drivers then block for ever, together with the calling process. It waits for at most 10 s; the kernel cannot be
// interrupted, so the process may not end before the reset does.
func ResetFunction(ctx context.Context, sysfs string, a Address) error {
	return withVFControl(ctx, sysfs, a, resetTimeout, func(ctx context.Context, c control) error {
		if driver, err := c.driver(); err != nil || driver != "" {
			return errors.Join(err, fmt.Errorf("reset %s: it has the driver %s: unbind it first", a, orNone(driver)))
		}
		if _, err := c.root.Stat(c.folder + "/reset"); errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("reset %s: the kernel has no method to reset it", a)
		}
		return c.write(ctx, c.folder+"/reset", "1")
	})
}
