// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"cmp"
	"fmt"
	"time"

	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/pool"
)

const (
	// failAfter is how long something has to be wrong with a device before the kubelet is told: a link that is negotiated anew comes back
	// within that time.
	failAfter = 3 * time.Second
	// recoverAfter is how long a device has to be in order before it is given away again.
	recoverAfter = 10 * time.Second
	// errorsLast is how long a device counts as broken after PCI Express has reported an error of it.
	errorsLast = time.Minute
)

// health turns what is wrong with devices at a moment into what the kubelet is told.
type health struct {
	files nodeFiles
	of    map[pci.Address]*condition
}

// condition is a device's.
type condition struct {
	told   string    // what is wrong, as the kubelet was told; "" for healthy
	other  time.Time // since when it is otherwise than told, zero for not at all
	errors uint64    // the highest count of errors so far
	failed time.Time // when it last rose
}

func newHealth(files nodeFiles) *health {
	return &health{files: files, of: map[pci.Address]*condition{}}
}

// judge returns what is wrong with the devices of pools, by ID, and when to ask again, zero if nothing is about to change.
func (h *health) judge(now time.Time, s *pci.Snapshot, pools []pool.Pool) (faults map[string]string, again time.Time) {
	faults = map[string]string{}
	seen := map[pci.Address]*condition{}
	for _, p := range pools {
		for _, d := range p.Devices {
			found, errors := cmp.Or(fault(s, p.Resource.Driver, d.Device), h.files.missing(d)), errorsOf(s, d.Device)
			c := h.of[d.Address]
			if c == nil {
				c = &condition{told: found, errors: errors} // nobody has it yet: the truth, at once
			}
			seen[d.Address] = c
			next := c.judge(now, found, errors)
			if c.told != "" {
				faults[d.Address.String()] = c.told
			}
			if !next.IsZero() && (again.IsZero() || next.Before(again)) {
				again = next
			}
		}
	}
	h.of = seen
	return faults, again
}

// judge decides what to tell, and returns when that may become something else.
func (c *condition) judge(now time.Time, found string, errors uint64) (again time.Time) {
	if errors > c.errors {
		c.errors, c.failed = errors, now
	}
	failing := !c.failed.IsZero() && now.Before(c.failed.Add(errorsLast))
	if failing && found == "" {
		found = fmt.Sprintf("PCI Express reported errors, %d since boot", c.errors)
	}
	switch {
	case (found == "") == (c.told == ""):
		if found != "" {
			c.told = found
		}
		c.other = time.Time{}
	case failing:
		c.told, c.other = found, time.Time{}
	case c.other.IsZero():
		c.other = now
		fallthrough
	default:
		if due := c.other.Add(c.patience()); now.Before(due) {
			return due
		}
		c.told, c.other = found, time.Time{}
	}
	if failing {
		return c.failed.Add(errorsLast)
	}
	return time.Time{}
}

func (c *condition) patience() time.Duration {
	if c.told == "" {
		return failAfter
	}
	return recoverAfter
}

// fault tells why a pod could not use a device, "" if it can.
func fault(s *pci.Snapshot, driver string, d pci.Device) string {
	switch {
	case d.Unreadable != "":
		return d.Unreadable
	case d.Driver == "":
		return "no driver is bound"
	case driver != "" && d.Driver != driver:
		if !d.IsVF() {
			return fmt.Sprintf("its driver is %s, not %s; only VFs are bound to another driver", d.Driver, driver)
		}
		return fmt.Sprintf("its driver is %s, not %s", d.Driver, driver)
	}
	pf := d
	if d.IsVF() {
		var ok bool
		if pf, ok = s.Device(d.PF); !ok {
			return fmt.Sprintf("its PF %s is gone", d.PF)
		}
	}
	switch {
	case pf.Unreadable != "":
		return fmt.Sprintf("its PF %s: %s", pf.Address, pf.Unreadable)
	case len(pf.Interfaces) > 0 && !pf.Carrier:
		return fmt.Sprintf("the link of %s is down", pf.Interfaces[0])
	}
	return ""
}

// errorsOf counts a device's errors and those of its PF, through which it sends.
func errorsOf(s *pci.Snapshot, d pci.Device) uint64 {
	pf, _ := s.Device(d.PF)
	return d.Errors + pf.Errors
}
