// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"
)

// resetTimeout is far above the 100 ms that a reset normally takes (PCI Express Base Specification, section 6.6.2).
const resetTimeout = 10 * time.Second

// ResetFunction resets a VF by the kernel's choice of method, preferably a function level reset (FLR). It refuses a VF that is bound to a
// driver, because with some drivers the reset never ends. ResetFunction waits at most 10 s, but a reset that hangs cannot be interrupted,
// and the calling process cannot exit before the reset ends.
func ResetFunction(ctx context.Context, sysfs string, a Address) error {
	return withVFControl(ctx, sysfs, a, resetTimeout, func(ctx context.Context, c control) error {
		if driver, err := c.currentDriver(); err != nil || driver != "" {
			return errors.Join(err, fmt.Errorf("reset %s: it has the driver %s: unbind it first", a, orNone(driver)))
		}
		if _, err := c.root.Stat(c.folder + "/reset"); errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("reset %s: the kernel has no method to reset it", a)
		}
		return c.writeFile(ctx, c.folder+"/reset", "1")
	})
}
