// SPDX-License-Identifier: Apache-2.0

package dra

import (
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/pci"
)

// TestSettingsWithoutPF checks that Prepare refuses settings of VFs for a function without a PF and for a PF, and their attributes.
func TestSettingsWithoutPF(t *testing.T) {
	const pf0 = "0000:11:00.0"
	l := newDRALab(t)
	pcitest.Passthrough(t, l.sysfs, vf0)
	s, err := pci.Scan(l.sysfs)
	must(t, err)
	for _, address := range []string{vf0, pf0, vf1} {
		a, _ := pci.ParseAddress(address)
		device, _ := s.Device(a)
		for driver, userspace := range map[string]bool{"": false, "vfio-pci": address != pf0} { // a PF keeps its driver
			d := pool.Device{Device: device}
			if address == pf0 {
				d.Whole = 3
			}
			i := Inventory{Snapshot: s, Pools: []pool.Pool{{Name: fast, Resource: &pool.Resource{Prefix: "example.com", Name: "fast", API: pool.DRA,
				Driver: driver}, Devices: []pool.Device{d}}}}
			l.Update(i)
			of := i.attributesOf(fast, d)
			kind, says, name := "vf", "", "ens0f0"
			switch address {
			case vf0:
				kind, says, name = "no-pf", "the allocated function of example.com/fast has no PF on its node, which alone can set it: set it on the hypervisor", vf0
			case pf0:
				kind, says = "pf", `the allocated function of example.com/fast is a PF, and only VFs have this setting: select kind == "vf"`
			}
			if *of["kind"].StringValue != kind || *of["pf"].StringValue != name {
				t.Errorf("%s: kind %s, pf %s", address, *of["kind"].StringValue, *of["pf"].StringValue)
			}
			for _, row := range pcitest.SettingsWithoutPF() {
				key := row.Interface
				if userspace {
					key = row.Userspace
				}
				c := newClaim("c-1", "web", deviceResult("a", address))
				c.Status.Allocation.Devices.Config = configs{fromClass(row.JSON)}
				if _, err := l.planClaim(c, nil); key == "" || says == "" {
					must(t, err)
				} else if err == nil || !strings.Contains(err.Error(), "."+key+": ") || !strings.HasSuffix(err.Error(), says) {
					t.Errorf("%s, %q, %s: %v, want %s", address, driver, row.JSON, err, says)
				}
			}
		}
	}
}

// TestPFKeepsItsDriver checks that Prepare refuses to bind a PF to another driver.
func TestPFKeepsItsDriver(t *testing.T) {
	const pf = "0000:11:00.0"
	l := newDRALab(t)
	s, err := pci.Scan(l.sysfs)
	must(t, err)
	a, _ := pci.ParseAddress(pf)
	d, _ := s.Device(a)
	r := &pool.Resource{Prefix: "example.com", Name: "fast", API: pool.DRA}
	l.Update(Inventory{Snapshot: s, Pools: []pool.Pool{{Name: fast, Resource: r, Devices: []pool.Device{{Device: d, Whole: 4}}}}})
	const refused = "cannot change the driver of device " + pf + " from ice to vfio-pci: it is a PF"
	for driver, want := range map[string]string{"ice": "", "vfio-pci": refused} {
		c := newClaim("c-1", "web", deviceResult("a", pf))
		c.Status.Allocation.Devices.Config = configs{fromClass(`"driver":"` + driver + `"`)}
		if _, err := l.planClaim(c, nil); (err == nil) != (want == "") || err != nil && !strings.HasSuffix(err.Error(), want) {
			t.Errorf("%s: %v, want %s", driver, err, want)
		}
	}
}
