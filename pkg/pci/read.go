// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"fmt"
	"io/fs"
	"os"
)

// Read reads the address, class, driver, interfaces and RDMA devices of one PCI function, and of its PF if it is a VF; pf is the zero
// value otherwise. To be quick, it omits the number of VFs, the IOMMU group, files below /dev, and the state of interfaces such as
// speed and MTU. It returns fs.ErrNotExist if the function does not exist or is not a network card.
func Read(sysfs string, a Address) (d, pf Device, err error) { return read(sysfs, a, true) }

// Inspect reads of one PCI function what Scan reads, except the number of queue pairs.
func Inspect(sysfs string, a Address) (d Device, err error) {
	d, _, err = read(sysfs, a, false)
	return d, err
}

func read(sysfs string, a Address, brief bool) (d, pf Device, err error) {
	root, err := os.OpenRoot(sysfs)
	if err != nil {
		return d, pf, fmt.Errorf("PCI function %s: %w", a, err)
	}
	defer root.Close()
	s := scanner{root: root, indexes: map[pair]int{}, brief: brief}
	if a.IsValid() {
		s.addFunction(a)
	}
	if len(s.devices) == 1 && s.devices[0].IsVF() {
		s.addFunction(s.devices[0].PF)
	}
	for _, found := range s.joinDevices() { // a VF whose PF is gone counts as gone
		if found.Address == a {
			d = found
		} else {
			pf = found
		}
	}
	if !d.Address.IsValid() {
		return d, pf, fmt.Errorf("PCI function %s: is not there, or of no network card: %w", a, fs.ErrNotExist)
	}
	return d, pf, nil
}
