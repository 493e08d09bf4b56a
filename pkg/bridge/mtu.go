// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
)

// minMTU6 is the minimum link MTU of IPv6 (RFC 8200 section 5).
const minMTU6 = 1280

// ensureMTU lowers the MTU of Podlace's bridge to that of the pods, because the node would send them packets that are too large. The MTU of
// another program's bridge is never lowered. A new bridge is pinned, and so is another program's if the pods' MTU is below the minimum of
// IPv6, because the kernel would lower the bridge to the pods' MTU and remove its IPv6 addresses. A bridge of Podlace that is down counts
// as new: it may come from a killed ADD that had not pinned it yet.
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
	// Another process may have changed it.
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

// lowersMTU reports whether the bridge is Podlace's and has a larger MTU than the pods.
func (j *job) lowersMTU(bridge kernel.Link) bool {
	return bridge.Made() && j.cfg.MTU >= minMTU6 && j.cfg.MTU < bridge.MTU
}
