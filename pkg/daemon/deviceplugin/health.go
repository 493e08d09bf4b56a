// SPDX-License-Identifier: Apache-2.0

package deviceplugin

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/podlace/podlace/pkg/daemon/dra"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/pci"
)

const (
	// failAfter is how long a fault must last before it is reported. A link that renegotiates its speed is up again sooner.
	failAfter = 3 * time.Second
	// recoverAfter is how long a device must be without fault before it is reported as healthy again.
	recoverAfter = 10 * time.Second
	// errorsLast is how long a device is faulty after a PCI Express error.
	errorsLast = time.Minute
)

// deviceHealth computes the reported health of devices from their current faults, with a delay.
type deviceHealth struct {
	files      nodeFiles
	conditions map[pci.Address]*deviceCondition
}

// claimUsage is which devices claims or pods use. The health of a device depends on that.
type claimUsage struct {
	owned  map[string]bool       // devices in use, by ID; true for those of claims, whose driver is always correct, as the claim chose it
	leaked func(pci.Device) bool // the interface is in another network namespace
	former map[string]string     // by ID, the driver of a pod's device before the pod, which its conflist may have changed
	// unrestored says, by ID, what of the settings of a device's last pod could not be undone, unless that harms no other pod.
	unrestored map[string]string
}

// deviceCondition contains the reported and the current health of one device.
type deviceCondition struct {
	reported  dra.Fault // reported fault; zero if healthy
	changedAt time.Time // time when the current health began to differ from the reported health; zero if both are the same
	errors    uint64    // highest error count so far
	failed    time.Time // when the error count last rose
}

func newHealth(files nodeFiles) *deviceHealth {
	return &deviceHealth{files: files, conditions: map[pci.Address]*deviceCondition{}}
}

// update returns the reported faults of the pools' devices by ID, and when to call it again, or the zero time if no change is pending.
func (h *deviceHealth) update(
	now time.Time, s *pci.Snapshot, pools []pool.Pool, by claimUsage,
) (faults map[string]dra.Fault, again time.Time) {
	faults = map[string]dra.Fault{}
	seen := map[pci.Address]*deviceCondition{}
	for _, p := range pools {
		for _, d := range p.Devices {
			found, errors := h.faultOf(s, p.Resource, d, by), errorsOf(s, d.Device)
			c := h.conditions[d.Address]
			if c == nil {
				c = &deviceCondition{reported: found, errors: errors} // no pod has a new device, so its fault is reported at once
			}
			seen[d.Address] = c
			next := c.update(now, found, errors)
			if !isHealthy(c.reported) {
				faults[d.Address.String()] = c.reported
			}
			if !next.IsZero() && (again.IsZero() || next.Before(again)) {
				again = next
			}
		}
	}
	h.conditions = seen
	return faults, again
}

func isHealthy(f dra.Fault) bool { return f == dra.Fault{} }

// Kinds of faults that package dra does not define.
const (
	noDriver     = "no-driver"
	otherDriver  = "other-driver"
	unreadable   = "unreadable"
	noPF         = "no-pf"
	pfUnreadable = "pf-unreadable"
	pciErrors    = "pci-errors"
	noFiles      = "no-device-files"
	unrestored   = "unrestored"
)

// faultOf returns the current fault of a resource's device, or the zero value if a pod can use it.
func (h *deviceHealth) faultOf(s *pci.Snapshot, r *pool.Resource, d pool.Device, by claimUsage) dra.Fault {
	driver, id := r.Driver, d.Address.String()
	claimed, owned := by.owned[id]
	if claimed || d.Whole > 0 || by.former[id] == driver {
		driver = ""
	}
	found := deviceFault(s, driver, d)
	if found.Kind == dra.LinkDown && r.LinkDown == pool.NoTaint {
		found = dra.Fault{}
	}
	if missing := h.files.missingFile(d); isHealthy(found) && missing != "" {
		found = dra.Fault{Kind: noFiles, Text: missing}
	}
	if why := by.unrestored[id]; isHealthy(found) && why != "" {
		found = dra.Fault{Kind: unrestored, Text: "it is not restored after its last pod: " + why}
	}
	if isHealthy(found) && r.API == pool.DRA && !owned && by.leaked != nil && by.leaked(d.Device) {
		found = dra.Fault{Kind: dra.Held, Text: "its interface is in another network namespace, although no claim has the device"}
	}
	return found
}

// update updates the reported fault, and returns when it may change without an event.
func (c *deviceCondition) update(now time.Time, found dra.Fault, errors uint64) (again time.Time) {
	if errors > c.errors {
		c.errors, c.failed = errors, now
	}
	failing := !c.failed.IsZero() && now.Before(c.failed.Add(errorsLast))
	if failing && isHealthy(found) {
		found = dra.Fault{Kind: pciErrors, Text: fmt.Sprintf("PCI Express reported errors, %d since boot", c.errors)}
	}
	if isHealthy(found) != isHealthy(c.reported) && !failing {
		if c.changedAt.IsZero() {
			c.changedAt = now
		}
		if due := c.changedAt.Add(c.delay()); now.Before(due) {
			return due
		}
	}
	c.reported, c.changedAt = found, time.Time{}
	if failing {
		return c.failed.Add(errorsLast)
	}
	return time.Time{}
}

func (c *deviceCondition) delay() time.Duration {
	if isHealthy(c.reported) {
		return failAfter
	}
	return recoverAfter
}

// deviceFault returns the current fault of a device, or the zero value if a pod can use it.
func deviceFault(s *pci.Snapshot, driver string, d pool.Device) dra.Fault {
	switch {
	case d.Unreadable != "":
		return dra.Fault{Kind: unreadable, Text: d.Unreadable}
	case d.Driver == "":
		return dra.Fault{Kind: noDriver, Text: "no driver is bound"}
	case driver != "" && d.Driver != driver:
		text := fmt.Sprintf("its driver is %s, not %s", d.Driver, driver)
		if d.IsPF() {
			text += "; the daemon does not change the driver of a PF"
		}
		return dra.Fault{Kind: otherDriver, Text: text}
	}
	pf := d.Device
	if d.HasNoPF() {
		return dra.Fault{} // its interface is down on the node, so its link is unknown
	}
	if d.IsVF() {
		var ok bool
		if pf, ok = s.Device(d.PF); !ok {
			return dra.Fault{Kind: noPF, Text: fmt.Sprintf("its PF %s is missing", d.PF)}
		}
	}
	switch {
	case pf.Unreadable != "":
		return dra.Fault{Kind: pfUnreadable, Text: fmt.Sprintf("its PF %s: %s", pf.Address, pf.Unreadable)}
	case slices.Contains(pf.Down, d.Port):
		return dra.Fault{Kind: dra.LinkDown, Text: fmt.Sprintf("the link of %s is down", d.Port)}
	case len(pf.Interfaces) > 0 && !pf.Carrier: // the PF does not tell which port a VF uses
		return dra.Fault{Kind: dra.LinkDown, Text: fmt.Sprintf("the link of %s is down", strings.Join(pf.Interfaces, ", "))}
	}
	return dra.Fault{}
}

// errorsOf returns the PCI Express errors of a device and its PF, through which a VF's traffic passes.
func errorsOf(s *pci.Snapshot, d pci.Device) uint64 {
	pf, _ := s.Device(d.PF)
	return d.Errors + pf.Errors
}

func (d *daemon) reportedFaults() map[string]string {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.faults
}
