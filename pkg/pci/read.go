// SPDX-License-Identifier: Apache-2.0

package pci

import (
	"fmt"
	"io/fs"
	"os"
)

// Read reads only the address, class, driver, interfaces and RDMA devices of one PCI function, and is therefore quick. If the PCI function
// is a VF, Read also reads the PF. For a PCI function that is not a VF, the second result of Read is the zero value. Read does not read the
// number of VFs, the IOMMU group, files below /dev, or the state of interfaces such as speed and MTU. Read returns fs.ErrNotExist if the
// PCI function does not exist or is not a network card.
func Read(sysfs string, a Address) (d, pf Device, err error) { return read(sysfs, a, true) }

// Inspect reads the same properties of one PCI function as Scan, except the number of queue pairs.
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
