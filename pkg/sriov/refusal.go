// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"fmt"

	"github.com/podlace/podlace/pkg/pci"
)

// Refusal returns why ADD refuses a VF because of its card, and what to do; why is "" if it does not. The device plugin offers such a VF
// nevertheless, because another plugin can attach it.
func Refusal(vf, pf pci.Device) (why, remedy string) {
	if !vf.IsVF() {
		pf = vf
	}
	switch {
	case vf.LinkType == pci.InfiniBand:
		return "setting the GUID and the partition keys of an InfiniBand VF is not supported",
			`attach such VFs with ib-sriov under Multus, or offer only "linkTypes": ["ether"]`
	case pf.Switchdev:
		return fmt.Sprintf("PF %s is in switchdev mode, in which the packets of its VFs end at representors on the node", pf.Address),
			fmt.Sprintf("run 'devlink dev eswitch set pci/%s mode legacy', or attach the VFs with ovs-cni under Multus", pf.Address)
	}
	return "", ""
}
