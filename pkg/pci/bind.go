// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/podlace/podlace/pkg/fault"
)

// Timeouts of writes to sysfs, which may hang: VFIO releases a function only when its user closes it.
const (
	bindTimeout   = 30 * time.Second
	resizeTimeout = 2 * time.Minute // a VF takes a fraction of a second
	settleTime    = 3 * time.Second // for the effect to show after a write has returned
	settlePoll    = 2 * time.Millisecond
)

var errNoEffect = errors.New("the kernel accepted the write, but it had no effect")

// Bind binds a VF to a loaded driver, whatever other drivers match it, and first unbinds its present driver. It is a no-op if the VF
// has that driver already. After a failure it rebinds the previous driver, and the error says whether that succeeded. It takes until
// ctx ends, at most 30 s, and as long again for the rebinding. The caller must know that the VF is not in use.
func Bind(ctx context.Context, sysfs string, a Address, driver string) error {
	return withVFControl(ctx, sysfs, a, bindTimeout, func(ctx context.Context, c control) error {
		if err := c.checkLoaded(driver); err != nil {
			return fmt.Errorf("bind %s to %s: %w", a, driver, err)
		}
		return c.bind(ctx, driver)
	})
}

// Unbind unbinds a VF from its driver. It is a no-op without one. It takes until ctx ends, at most 30 s.
func Unbind(ctx context.Context, sysfs string, a Address) error {
	return withVFControl(ctx, sysfs, a, bindTimeout, func(ctx context.Context, c control) error { return c.unbindCurrent(ctx) })
}

// control changes one function.
type control struct {
	root    *os.Root
	address Address
	folder  string
}

func withControl(ctx context.Context, sysfs string, a Address, limit time.Duration, f func(context.Context, control) error) error {
	root, err := os.OpenRoot(sysfs)
	if err != nil {
		return fmt.Errorf("PCI function %s: %w", a, err)
	}
	defer root.Close()
	c := control{root, a, devicesFolder + "/" + a.String()}
	if info, err := root.Stat(c.folder); err != nil || !a.IsValid() || !info.IsDir() {
		return fmt.Errorf("PCI function %s: is not there: %w", a, errors.Join(err, fs.ErrNotExist))
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return f(ctx, c)
}

// withVFControl is controlled for VFs and fails for every other function: unbinding a PF would delete its VFs, and could disconnect the
// node.
func withVFControl(ctx context.Context, sysfs string, a Address, limit time.Duration, f func(context.Context, control) error) error {
	return withControl(ctx, sysfs, a, limit, func(ctx context.Context, c control) error {
		target, err := readLink(c.root, c.folder+"/physfn", "")
		if err == nil {
			var pf Address
			if pf, err = ParseAddress(target); err == nil && pf == a {
				err = errLink
			}
		}
		if err != nil {
			return fmt.Errorf("PCI function %s is no VF, its driver stays: %w", a, err)
		}
		return f(ctx, c)
	})
}

// checkLoaded refuses a driver that is not loaded.
func (c control) checkLoaded(driver string) error {
	if driver == "" || strings.HasPrefix(driver, ".") || strings.Contains(driver, "/") || checkWord(driver) != nil {
		return errors.New("want the name of a driver")
	}
	if _, err := c.root.Stat(driversFolder + "/" + driver); err != nil {
		return fmt.Errorf("the driver is not loaded: %w", err)
	}
	return nil
}

func (c control) bind(ctx context.Context, driver string) error {
	failed := func(err error) error { return fmt.Errorf("bind %s to %s: %w", c.address, driver, err) }
	former, err := c.driver()
	if err != nil || former == driver {
		return err
	}
	override, err := c.override()
	if err != nil {
		return failed(err)
	}
	if err = c.changeDriver(ctx, driver); err == nil {
		// The VF keeps its driver until the probe; drivers_probe of other functions is not affected.
		if err = c.setOverride(ctx, override); err != nil {
			return fmt.Errorf("%s is bound to %s: %w", c.address, driver, err)
		}
		return nil
	}
	// The error may be that ctx has ended.
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), bindTimeout)
	defer cancel()
	if back := c.restoreFormer(undo, former, override); back != nil {
		return failed(fmt.Errorf("%w; and it could not be bound to %s again: %w", err, orNone(former), back))
	}
	return failed(fmt.Errorf("%w; it is bound to %s again", err, orNone(former)))
}

func (c control) restoreFormer(ctx context.Context, former, override string) error {
	now, err := c.driver()
	switch {
	case err != nil:
	case former == "":
		err = c.unbindCurrent(ctx)
	case now != former:
		err = c.changeDriver(ctx, former)
	}
	return errors.Join(err, c.setOverride(ctx, override))
}

func orNone(driver string) string {
	if driver == "" {
		return "no driver"
	}
	return driver
}

// changeDriver unbinds the function and lets the kernel choose the driver by the override. That also works if sriov_drivers_autoprobe is
// off, where the driver's own bind file does not.
func (c control) changeDriver(ctx context.Context, driver string) error {
	if err := c.setOverride(ctx, driver); err != nil {
		return err
	}
	if err := c.unbindCurrent(ctx); err != nil {
		return err
	}
	if err := c.write(ctx, probeFile, c.address.String()); err != nil {
		return err
	}
	return c.await(ctx, driver)
}

// unbindCurrent unbinds the function from its driver.
func (c control) unbindCurrent(ctx context.Context) error {
	now, err := c.driver()
	if err != nil || now == "" {
		return err
	}
	if err := c.write(ctx, driversFolder+"/"+now+"/unbind", c.address.String()); err != nil {
		return err
	}
	return c.await(ctx, "")
}

// driver returns the bound driver, or "".
func (c control) driver() (string, error) {
	name, err := readLink(c.root, c.folder+"/driver", "drivers")
	if errors.Is(err, fs.ErrNotExist) {
		if _, err := c.root.Stat(c.folder); err != nil {
			return "", fmt.Errorf("%s has gone: %w", c.address, err)
		}
		return "", nil
	}
	if err != nil {
		return "", fmt.Errorf("driver of %s: %w", c.address, err)
	}
	return name, nil
}

// override returns driver_override, the only driver that may bind the function, or "".
func (c control) override() (string, error) {
	name, err := readAttribute(c.root, c.folder+"/driver_override")
	if name == "(null)" {
		name = ""
	}
	return name, err
}

func (c control) setOverride(ctx context.Context, driver string) error {
	if now, err := c.override(); err == nil && now == driver {
		return nil
	}
	return c.write(ctx, c.folder+"/driver_override", driver)
}

// write writes to a file below sysfs. The kernel acts before the write returns, and nothing can interrupt it.
func (c control) write(ctx context.Context, file, value string) error {
	return fault.Change(fmt.Sprintf("write %q to %s", value, file), func() error {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		done := make(chan error, 1)
		go func() { done <- writeAttribute(c.root, file, value) }()
		select {
		case err := <-done:
			return err
		case <-ctx.Done():
			return fmt.Errorf("the kernel has not finished, something uses the function: %w", ctx.Err())
		}
	})
}

// await waits until the function is bound to the driver, or to none.
func (c control) await(ctx context.Context, driver string) error {
	now := ""
	err := waitUntil(ctx, func() (ok bool, err error) {
		now, err = c.driver()
		return now == driver, err
	})
	if errors.Is(err, errNoEffect) {
		return fmt.Errorf("wait for %s, have %s: %w", orNone(driver), orNone(now), err)
	}
	return err
}

// waitUntil waits until a condition holds.
func waitUntil(ctx context.Context, so func() (bool, error)) error {
	for end := time.Now().Add(settleTime); ; {
		if ok, err := so(); ok || err != nil {
			return err
		}
		if time.Now().After(end) {
			return errNoEffect
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("%w: %w", errNoEffect, ctx.Err())
		case <-time.After(settlePoll):
		}
	}
}
