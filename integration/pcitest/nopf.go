// SPDX-License-Identifier: Apache-2.0

package pcitest

import (
	"os"
	"path/filepath"
	"testing"
)

// Passthrough makes a VF in a generated sysfs look like one that a virtual machine got without its PF.
func Passthrough(t testing.TB, sysfs, vf string) {
	t.Helper()
	folder := Folder(t, sysfs, vf)
	links, err := filepath.Glob(filepath.Join(folder, "physfn/virtfn*"))
	must(t, err)
	for _, link := range links {
		if target, _ := os.Readlink(link); filepath.Base(target) == vf {
			must(t, os.Remove(link))
		}
	}
	must(t, os.Remove(filepath.Join(folder, "physfn")))
}

// Setting is settings of a VF as JSON, with the key that a function without a PF cannot have, or "".
type Setting struct {
	JSON      string
	Interface string // with a network driver
	Userspace string // with vfio-pci
}

// SettingsWithoutPF is the table to which every program that judges settings must agree.
func SettingsWithoutPF() []Setting {
	return []Setting{
		{`"vlan": 100`, "vlan", "vlan"},
		{`"vlan": 100, "vlanQoS": 3, "vlanProto": "802.1ad"`, "vlan", "vlan"},
		{`"spoofchk": "off"`, "spoofchk", "spoofchk"},
		{`"trust": "on"`, "trust", "trust"},
		{`"linkState": "enable"`, "linkState", "linkState"},
		{`"minTxRate": 10`, "minTxRate", "minTxRate"},
		{`"maxTxRate": 100, "mtu": 1400`, "maxTxRate", "maxTxRate"},
		{`"mac": "02:00:00:00:00:01"`, "", "mac"},
		{`"vlan": 0, "maxTxRate": 0`, "", ""},
		{`"mtu": 1400, "ifName": "fast"`, "", ""},
	}
}
