// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"cmp"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
)

// minMTU6 is the minimum link MTU of IPv6 (RFC 8200 section 5).
const minMTU6 = 1280

// defaultMTU is the kernel's MTU of a new bridge (ETH_DATA_LEN in include/uapi/linux/if_ether.h).
const defaultMTU = 1500

// madeNote returns the name of a network's note file about the origin of a bridge. This note file says that ADD created the bridge and
// pinned its MTU. The note file contains the bridge's MAC, because another bridge may later have the same name.
func madeNote(bridge string) string { return "made-" + bridge }

// ensureMTU lowers the bridge's MTU to the MTU of the pods, because the node would otherwise send packets that are too large for them. It
// leaves the MTU of a bridge that another program created, but pins it if the pods' MTU is below the minimum of IPv6: the kernel would
// lower the bridge's MTU to that of its ports, and the bridge would lose its IPv6 addresses.
func (j *job) ensureMTU(bridge *kernel.Link, made bool) error {
	small := j.cfg.MTU != 0 && j.cfg.MTU < minMTU6
	if !made && !small && !j.lowersMTU(*bridge) {
		return nil
	}
	ours, err := attachment.HasNote(madeNote(bridge.Name), bridge.MAC.String())
	if err != nil || !made && ours == small {
		return err
	}
	unlock, err := attachment.Waiting.Node("mtu")
	if err != nil {
		return err
	}
	defer unlock()
	now, ok, err := j.host.LinkByIndex(bridge.Index) // another process may have changed the MTU
	if err := errIfDeleted(bridge.Name, ok, err); err != nil {
		return err
	}
	switch {
	case made:
		bridge.MTU = j.newBridgeMTU()
	case ours && now.MTU <= j.cfg.MTU:
		bridge.MTU = now.MTU
		return nil
	case ours:
		bridge.MTU = j.cfg.MTU
	default:
		bridge.MTU = now.MTU
	}
	if err := j.host.PinMTU(now, bridge.MTU); err != nil || !made {
		return err
	}
	return j.att.WriteNote(madeNote(bridge.Name), bridge.MAC.String())
}

// newBridgeMTU returns the MTU of a bridge that ADD creates. The bridge is created with another MTU and gets this one by a second request,
// which pins it. If ADD is killed before, the kernel adjusts the MTU to that of the first port.
func (j *job) newBridgeMTU() int { return cmp.Or(j.cfg.MTU, defaultMTU) }

func (j *job) lowersMTU(bridge kernel.Link) bool {
	return j.cfg.MTU >= minMTU6 && j.cfg.MTU < bridge.MTU
}
