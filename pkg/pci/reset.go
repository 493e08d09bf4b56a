// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"time"
)

// resetTimeout is the timeout for the reset of a PCI function. A reset normally takes up to 100 ms (PCI Express Base Specification, section
// 6.6.2).
const resetTimeout = 10 * time.Second

// ResetFunction resets a VF. The kernel chooses the reset method, and prefers a function level reset (FLR). ResetFunction returns an error
// for a PCI function with a driver. With some drivers, a reset blocks forever, and the process that requested the reset then also blocks
// forever. ResetFunction waits at most 10 s. A reset that hangs cannot be interrupted, and the process that requested the reset cannot exit
// before the reset ends.
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
