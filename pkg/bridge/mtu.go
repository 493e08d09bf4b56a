// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
)

// minMTU6 is the minimum link MTU of IPv6 (RFC 8200 section 5).
const minMTU6 = 1280

// ensureMTU lowers the bridge's MTU to the MTU of the pods. With a larger MTU, the node would send packets that are too large for the pods.
// The MTU of a bridge that another program created is never lowered. ensureMTU pins the MTU of a new bridge, and of another program's
// bridge if the pods' MTU is below the minimum of IPv6. Without pinning, the kernel would lower the bridge's MTU to the pods' MTU, and the
// bridge would lose its IPv6 addresses. A bridge of Podlace that is down may come from a killed ADD that had not pinned the MTU yet.
func (j *job) ensureMTU(bridge *kernel.Link) error {
	pin := bridge.Made() && !bridge.Up || !bridge.Made() && j.cfg.MTU != 0 && j.cfg.MTU < minMTU6
	if !pin && !j.lowersMTU(*bridge) {
		return nil
	}
	unlock, err := attachment.Waiting.Node(bridges)
	if err != nil {
		return err
	}
	defer unlock()
	// Another process may have changed the MTU.
	now, ok, err := j.host.LinkByIndex(bridge.Index)
	if err := errIfDeleted(bridge.Name, ok, err); err != nil {
		return err
	}
	if bridge.MTU = now.MTU; j.lowersMTU(*bridge) {
		bridge.MTU = j.cfg.MTU
	} else if !pin {
		return nil
	}
	return j.host.PinMTU(now, bridge.MTU)
}

// lowersMTU reports whether the bridge is one of Podlace with a larger MTU than the pods.
func (j *job) lowersMTU(bridge kernel.Link) bool {
	return bridge.Made() && j.cfg.MTU >= minMTU6 && j.cfg.MTU < bridge.MTU
}
