// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"context"
	"errors"
	"fmt"
	"strconv"
)

// SetNumVFs changes the number of VFs of a PF to n, after removing all existing ones as the kernel requires. The caller ensures that no
// program uses them. It is a no-op if the PF already has n VFs, and an error if sriov_numvfs is n but the PF has more. SetNumVFs stops
// when ctx ends or after two minutes.
func SetNumVFs(ctx context.Context, sysfs string, pf Address, n int) error {
	return withControl(ctx, sysfs, pf, resizeTimeout, func(ctx context.Context, c control) error {
		if err := c.resize(ctx, n); err != nil {
			return fmt.Errorf("give %s %d VFs: %w", pf, n, err)
		}
		return nil
	})
}

func (c control) resize(ctx context.Context, n int) error {
	total, err := c.count("sriov_totalvfs")
	if isMissing(err) {
		return fmt.Errorf("it is no PF: %w", err)
	}
	if err == nil && (n < 0 || n > total) {
		err = fmt.Errorf("it can have 0 to %d", total)
	}
	if err != nil {
		return err
	}
	now, err := c.count("sriov_numvfs")
	if err != nil {
		return err
	}
	if now == n {
		return c.checkCounts(n)
	}
	if now > 0 {
		if err := c.setNumVFs(ctx, 0); err != nil {
			return err
		}
	}
	if n == 0 {
		return nil
	}
	if err = c.setNumVFs(ctx, n); err != nil && now > 0 {
		return fmt.Errorf("its previous %d VFs have been removed: %w", now, err)
	}
	return err
}

// checkCounts returns an error if the PF has more VFs than sriov_numvfs, n. Writing the same number again would not remove them.
func (c control) checkCounts(n int) error {
	s, err := Scan(c.root.Name())
	if err != nil {
		return err
	}
	if d, _ := s.Device(c.address); d.NumVFs > n {
		return fmt.Errorf("sriov_numvfs is %d but %d VFs exist", n, d.NumVFs)
	}
	return nil
}

// setNumVFs writes n to sriov_numvfs and waits until the PF has links to n VFs.
func (c control) setNumVFs(ctx context.Context, n int) error {
	if err := c.writeFile(ctx, c.folder+"/sriov_numvfs", strconv.Itoa(n)); err != nil {
		return err
	}
	links := 0
	err := waitUntil(ctx, func() (bool, error) {
		names, err := listFolder(c.root, c.folder)
		links = 0
		for _, name := range names {
			if _, ok := parseVF(name); ok {
				links++
			}
		}
		return links == n, err
	})
	if errors.Is(err, errNoEffect) {
		return fmt.Errorf("wait for %d VFs, have %d: %w", n, links, err)
	}
	return err
}

func (c control) count(name string) (int, error) {
	text, err := readAttribute(c.root, c.folder+"/"+name)
	if err != nil {
		return 0, err
	}
	n, err := parseCount(text)
	if err != nil {
		return 0, fmt.Errorf("%s: %w", name, err)
	}
	return n, nil
}
