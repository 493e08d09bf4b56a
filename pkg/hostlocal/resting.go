// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"encoding/json"
	"net/netip"
	"slices"
)

// restFile lists the most recently released addresses. It is in the index folder.
const restFile = "released"

// maxResting limits the number of remembered released addresses.
const maxResting = 256

// resting returns the most recently released addresses, oldest first. They are assigned again only if no other address is free, so that a
// peer of a deleted pod does not immediately reach another pod. Without the file only that preference is lost.
func (x *index) resting() (list []netip.Addr) {
	if x.dir == nil {
		return nil
	}
	data, _ := x.dir.Read(restFile)
	if json.Unmarshal(data, &list) != nil {
		return nil
	}
	return list
}

// addResting remembers released addresses.
func (x *index) addResting(released []netip.Addr) {
	if len(released) > 0 {
		list := append(x.resting(), released...)
		x.setResting(list[max(0, len(list)-maxResting):])
	}
}

// removeResting removes an address that is being assigned from the list.
func (x *index) removeResting(addr netip.Addr) {
	if list := x.resting(); slices.Contains(list, addr) {
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
