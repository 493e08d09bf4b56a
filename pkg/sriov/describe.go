// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"encoding/json"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/pci"
)

// Attached is a VF of an attachment.
type Attached struct {
	Address pci.Address
	Name    string // interface name in the pod; "" if a user space program has the VF
	MAC     string
}

// VFs returns the VFs in a record of the plugin.
func VFs(rec attachment.Record) (list []Attached, err error) {
	var st state
	err = json.Unmarshal(rec.State, &st)
	for _, v := range st.VFs {
		list = append(list, Attached{v.Address, v.Name, v.MAC})
	}
	return list, err
}
