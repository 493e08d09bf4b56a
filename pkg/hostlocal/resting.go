// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"encoding/json"
	"net/netip"
	"slices"
)

// restFile is the name of a file in the index folder. The file contains the addresses that were released most recently.
const restFile = "released"

// maxResting is the maximum number of addresses in the file of released addresses.
const maxResting = 256

// restingAddresses returns the addresses that were released most recently. The list begins with the address that was released first. ADD
// assigns a recently released address only if no other address is free. If ADD assigned a released address at once, a peer of the deleted
// pod could reach the new pod by mistake. If the file of released addresses is lost, ADD may assign a recently released address at once.
func (x *index) restingAddresses() (list []netip.Addr) {
	if x.dir == nil {
		return nil
	}
	data, _ := x.dir.Read(restFile)
	if json.Unmarshal(data, &list) != nil {
		return nil
	}
	return list
}

// addResting adds addresses to the file of released addresses.
func (x *index) addResting(released []netip.Addr) {
	if len(released) > 0 {
		list := append(x.restingAddresses(), released...)
		x.setResting(list[max(0, len(list)-maxResting):])
	}
}

// removeResting removes an address from the file of released addresses. ADD calls removeResting before it assigns the address.
func (x *index) removeResting(addr netip.Addr) {
	if list := x.restingAddresses(); slices.Contains(list, addr) {
		x.setResting(slices.DeleteFunc(list, func(a netip.Addr) bool { return a == addr }))
	}
}

func (x *index) setResting(list []netip.Addr) {
	data, err := json.Marshal(list)
	if err == nil && x.dir != nil {
		err = x.write(restFile, data)
	}
	if err != nil {
		x.leases.log.Warn("the released addresses could not be stored", "error", err)
	}
}
