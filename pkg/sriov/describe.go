// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"fmt"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/pci"
)

// Attached describes a VF of an attachment.
type Attached struct {
	Address pci.Address
	Name    string // interface name in the pod; "" if a user space program has the VF
	MAC     string
}

// VFs returns the VFs in an attachment record of plugin sriov.
func VFs(rec attachment.Record) (list []Attached, err error) {
	st, err := attachment.StateOf[attachmentState](rec)
	for _, v := range st.VFs {
		list = append(list, Attached{v.Address, v.Name, v.MAC})
	}
	return list, err
}

// Objects returns the VFs of an attachment record, one in each line.
func Objects(rec attachment.Record) (lines []string, err error) {
	st, err := attachment.StateOf[attachmentState](rec)
	for _, v := range st.VFs {
		line := fmt.Sprintf("VF %s as %s in the pod", v.Address, v.Name)
		if v.Userspace != "" {
			line = fmt.Sprintf("VF %s with driver %s", v.Address, v.Userspace)
		}
		if v.MAC != "" {
			line += ", MAC " + v.MAC
		}
		for _, a := range v.Addresses {
			line += ", address " + a.String()
		}
		lines = append(lines, line)
	}
	return lines, err
}
