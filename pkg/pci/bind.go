// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/podlace/podlace/pkg/fault"
)

// Timeouts for writes to files in sysfs. A write to sysfs may hang. For example, VFIO waits until the process that uses a PCI function has
// closed its file.
const (
	bindTimeout   = 30 * time.Second
	resizeTimeout = 2 * time.Minute // a VF takes a fraction of a second
	settleTime    = 3 * time.Second // for the effect to show after a write has returned
	settlePoll    = 2 * time.Millisecond
)

var errNoEffect = errors.New("the kernel accepted the write, but it had no effect")

// Bind unbinds a VF from its current driver and binds it to the given driver, or to none for "". The kernel must already have loaded it. Bind
// sets driver_override, so that no other matching driver can bind the VF. Bind is a no-op if the VF already has the driver. If Bind cannot
// bind the new driver, it binds the previous driver again. The error also says whether the previous driver is bound again. Bind stops when
// ctx ends, or after 30 s. Rebinding the previous driver can take another 30 s. Before Bind, the caller must ensure that no program uses
// the VF.
func Bind(ctx context.Context, sysfs string, a Address, driver string) error {
	return withVFControl(ctx, sysfs, a, bindTimeout, func(ctx context.Context, c control) error {
		if driver == "" {
			return c.unbindCurrent(ctx)
		}
		if err := c.checkLoaded(driver); err != nil {
			return fmt.Errorf("bind %s to %s: %w", a, driver, err)
		}
		return c.bind(ctx, driver)
	})
}

// Unbind unbinds a VF from its driver. Unbind is a no-op if the VF has no driver. Unbind stops when ctx ends, or after 30 s.
func Unbind(ctx context.Context, sysfs string, a Address) error { return Bind(ctx, sysfs, a, "") }

// The type control changes one PCI function through sysfs.
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

// withVFControl does the same as withControl, but only for a VF. For any other PCI function, withVFControl returns an error. If a PF were
// unbound, the kernel would delete its VFs, and the node could lose its network connection.
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

// checkLoaded returns an error if the driver is not loaded.
func (c control) checkLoaded(driver string) error {
	if _, err := parseWord(driver); err != nil || strings.HasPrefix(driver, ".") || strings.Contains(driver, "/") {
		return errors.New("want the name of a driver")
	}
	if _, err := c.root.Stat(driversFolder + "/" + driver); err != nil {
		return fmt.Errorf("the driver is not loaded: %w", err)
	}
	return nil
}

func (c control) bind(ctx context.Context, driver string) error {
	failed := func(err error) error { return fmt.Errorf("bind %s to %s: %w", c.address, driver, err) }
	former, err := c.currentDriver()
	if err != nil || former == driver {
		return err
	}
	override, err := c.currentOverride()
	if err != nil {
		return failed(err)
	}
	if err = c.changeDriver(ctx, driver); err == nil {
		// Resetting driver_override does not unbind the VF, because the kernel uses driver_override only when it probes the PCI function.
		if err = c.setOverride(ctx, override); err != nil {
			return fmt.Errorf("%s is bound to %s: %w", c.address, driver, err)
		}
		return nil
	}
	// The code that undoes a failed bind needs its own context, because ctx may have ended.
	undo, cancel := context.WithTimeout(context.WithoutCancel(ctx), bindTimeout)
	defer cancel()
	if back := c.restoreFormer(undo, former, override); back != nil {
		return failed(fmt.Errorf("%w; and it could not be bound to %s again: %w", err, orNone(former), back))
	}
	return failed(fmt.Errorf("%w; it is bound to %s again", err, orNone(former)))
}

func (c control) restoreFormer(ctx context.Context, former, override string) error {
	now, err := c.currentDriver()
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
	return cmp.Or(driver, "no driver")
}

// changeDriver sets driver_override, unbinds the PCI function, and makes the kernel probe the PCI function. changeDriver also works if
// sriov_drivers_autoprobe is 0. If sriov_drivers_autoprobe is 0, a write to the driver's file "bind" would fail.
func (c control) changeDriver(ctx context.Context, driver string) error {
	if err := c.setOverride(ctx, driver); err != nil {
		return err
	}
	if err := c.unbindCurrent(ctx); err != nil {
		return err
	}
	if err := c.writeFile(ctx, probeFile, c.address.String()); err != nil {
		return err
	}
	return c.awaitDriver(ctx, driver)
}

// unbindCurrent unbinds the PCI function from its driver.
func (c control) unbindCurrent(ctx context.Context) error {
	now, err := c.currentDriver()
	if err != nil || now == "" {
		return err
	}
	if err := c.writeFile(ctx, driversFolder+"/"+now+"/unbind", c.address.String()); err != nil {
		return err
	}
	return c.awaitDriver(ctx, "")
}

// currentDriver returns the driver to which the PCI function is bound, or "" if no driver is bound.
func (c control) currentDriver() (string, error) {
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

// currentOverride returns the value of driver_override, or "" if driver_override is not set. While driver_override is set, only the driver
// with this name can bind the PCI function.
func (c control) currentOverride() (string, error) {
	name, err := readAttribute(c.root, c.folder+"/driver_override")
	if name == "(null)" {
		name = ""
	}
	return name, err
}

func (c control) setOverride(ctx context.Context, driver string) error {
	if now, err := c.currentOverride(); err == nil && now == driver {
		return nil
	}
	return c.writeFile(ctx, c.folder+"/driver_override", driver)
}

// writeFile writes to a file below sysfs. A write to sysfs returns only after the kernel has made the change, and the write cannot be
// interrupted. When ctx ends, writeFile returns although the write may still be running.
func (c control) writeFile(ctx context.Context, file, value string) error {
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

// awaitDriver waits until the PCI function is bound to the driver. If the last argument is "", awaitDriver waits until no driver is bound
// to the PCI function.
func (c control) awaitDriver(ctx context.Context, driver string) error {
	now := ""
	err := waitUntil(ctx, func() (ok bool, err error) {
		now, err = c.currentDriver()
		return now == driver, err
	})
	if errors.Is(err, errNoEffect) {
		return fmt.Errorf("wait for %s, have %s: %w", orNone(driver), orNone(now), err)
	}
	return err
}

// waitUntil calls the given function repeatedly until it returns true or an error. After settleTime, waitUntil returns errNoEffect.
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
