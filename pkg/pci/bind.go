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

// Limits for writes to sysfs, which may hang: VFIO, for example, waits until the process that uses a PCI function has closed its file.
const (
	bindTimeout   = 30 * time.Second
	resizeTimeout = 2 * time.Minute // a VF takes a fraction of a second
	settleTime    = 3 * time.Second // for the effect to show after a write has returned
	settlePoll    = 2 * time.Millisecond
)

// ErrNotLoaded is the error of Bind if the kernel has no driver of that name.
var ErrNotLoaded = errors.New("the driver is not loaded")

var errNoEffect = errors.New("the kernel accepted the write, but it had no effect")

// Bind unbinds a VF from its driver and binds it to the given one, which must be loaded, or to none for "". It sets driver_override, so
// that no other matching driver binds the VF, and is a no-op if the VF already has the driver. After a failure, it binds the previous
// driver again, and the error says whether that worked. Bind stops when ctx ends or after 30 s, and going back can take another 30 s.
// The caller ensures that no program uses the VF.
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

// control changes one PCI function through sysfs.
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

// withVFControl is withControl for VFs and functions without a PF. It refuses a PF: unbinding it would delete its VFs and could cut the
// node off its network.
func withVFControl(ctx context.Context, sysfs string, a Address, limit time.Duration, f func(context.Context, control) error) error {
	return withControl(ctx, sysfs, a, limit, func(ctx context.Context, c control) error {
		target, err := readLink(c.root, c.folder+"/physfn", "")
		if errors.Is(err, fs.ErrNotExist) {
			if _, e := c.root.Stat(c.folder + "/sriov_totalvfs"); errors.Is(e, fs.ErrNotExist) {
				return f(ctx, c)
			}
		}
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

func (c control) checkLoaded(driver string) error {
	if _, err := parseWord(driver); err != nil || strings.HasPrefix(driver, ".") || strings.Contains(driver, "/") {
		return errors.New("want the name of a driver")
	}
	if _, err := c.root.Stat(driversFolder + "/" + driver); err != nil {
		return fmt.Errorf("%w: %w", ErrNotLoaded, err)
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
		// A reset of driver_override leaves the VF bound, because the kernel uses it only to probe the function.
		if err = c.setOverride(ctx, override); err != nil {
			return fmt.Errorf("%s is bound to %s: %w", c.address, driver, err)
		}
		return nil
	}
	// Undoing needs a context of its own, because ctx may have ended.
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

// changeDriver sets driver_override, unbinds the function and makes the kernel probe it, which works also if sriov_drivers_autoprobe is
// 0. A write to the driver's "bind" would then fail.
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

// currentDriver returns the driver to which the function is bound, or "".
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

// currentOverride returns driver_override, or "" if it is not set. If set, only the driver of this name can bind the function.
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

// writeFile writes to a file below sysfs. The write returns only after the kernel's change and cannot be interrupted, so it may still
// be running when writeFile returns because ctx has ended.
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

// awaitDriver waits until the function is bound to the driver, or to none for "".
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

// waitUntil calls `so` until it returns true or an error, or returns errNoEffect after settleTime.
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
