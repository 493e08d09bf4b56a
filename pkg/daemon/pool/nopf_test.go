// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"fmt"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/pci"
)

// TestUplinkNeverOffered checks that a function without a PF that the node uses is in no pool, however the configuration names it.
func TestUplinkNeverOffered(t *testing.T) {
	for _, why := range []string{"has the address 10.0.0.1/24", "has a route", "is a port of br0", "is the lower interface of eno0.5"} {
		for _, api := range []string{"device-plugin", "dra"} {
			for _, selectors := range []string{"", `,"selectors":{}`, `,"selectors":{"pciAddresses":["0000:40:00.0"]}`,
				`,"selectors":[{"vendors":["14e4"],"devices":["1592"]},{"pfNames":["eno0"]},{"rootDevices":["0000:40:00.0"]}]`} {
				for _, pfs := range []string{"", `,"pfs":[{"pfName":"eno0","numVfs":0,"offerPf":true}]`} {
					c := mustParse(t, fmt.Sprintf(`{"resourceList":[{"resourceName":"r","api":%q%s}]%s}`, api, selectors, pfs))
					env := Env{InUse: map[string]string{"eno0": why}}
					if got := formatPools(Assign(c, workerMachine(), env)); strings.Contains(got+" ", " n ") {
						t.Errorf("%s %s %s, %s: %s", api, selectors, pfs, why, got)
					}
				}
			}
		}
	}
}

// TestInterfaceElsewhere checks that a function without a PF whose interface is in a namespace that is no pod's is not offered.
func TestInterfaceElsewhere(t *testing.T) {
	c := mustParse(t, `{"resourceList":[{"resourceName":"r","selectors":{"pciAddresses":["0000:40:00.0"]}}]}`)
	s := workerMachine()
	for i := range s.Devices {
		if s.Devices[i].HasNoPF() {
			s.Devices[i].Interfaces = nil
		}
	}
	a, _ := pci.ParseAddress("0000:40:00.0")
	for want, held := range map[string]map[pci.Address]string{"r:": {}, "r: n": {a: "r"}} {
		if got := formatPools(Assign(c, s, Env{Held: held})); got != want {
			t.Errorf("%v: %s, want %s", held, got, want)
		}
	}
	if got := formatPools(Assign(c, s, Env{})); got != "r: n" {
		t.Errorf("while the pods' devices are unknown: %s", got)
	}
}

func TestVirtioNeverOffered(t *testing.T) {
	s := workerMachine()
	for i := range s.Devices {
		if s.Devices[i].HasNoPF() {
			s.Devices[i].Driver = "virtio-pci"
		}
	}
	c := mustParse(t, `{"resourceList":[{"resourceName":"r","selectors":{"pciAddresses":["0000:40:00.0"]}}]}`)
	if got := formatPools(Assign(c, s, Env{})); got != "r:" {
		t.Error(got)
	}
}

// TestSettingsWithoutPF checks that a resource offers no function without a PF and no PF if its settings are those of VFs, and that Explain
// and Findings say so.
func TestSettingsWithoutPF(t *testing.T) {
	for _, s := range pcitest.SettingsWithoutPF() {
		for driver, key := range map[string]string{"": s.Interface, `"driver":"vfio-pci",`: s.Userspace} {
			for name, kind := range map[string]struct{ address, says string }{"n": {"0000:40:00.0", "it has no PF, which alone can set " + key},
				"A": {"0000:10:00.0", "it is a PF, and only VFs have " + key}} {
				if strings.Contains(s.JSON, `"mac"`) { // a resource cannot set it
					continue
				}
				c := mustParse(t, fmt.Sprintf(`{"resourceList":[{"resourceName":"r","api":"dra",%s"selectors":{"pciAddresses":[%q]},"vf":{%s}}],
					"pfs":[{"pfName":"ens1f0","numVfs":4,"offerWhole":true}]}`, driver, kind.address, s.JSON))
				want := "intel.com/r offered: meets resourceList[0].selectors"
				if key != "" {
					want = "not offered: " + kind.says
				}
				if got := explainDevice(c, name, Env{})[0]; !strings.HasPrefix(got, want) {
					t.Errorf("%s, %s, %s: %s, want %s", kind.address, s.JSON, driver, got, want)
				}
				found := fmt.Sprint(Findings(c, workerMachine(), Env{}))
				if strings.Contains(found, "no device on this node matches; "+kind.address+": "+kind.says) != (key != "") {
					t.Errorf("%s, %s, %s: %s", kind.address, s.JSON, driver, found)
				}
			}
		}
	}
}
