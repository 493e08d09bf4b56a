// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"strconv"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
)

// minMTU6 is the minimum link MTU of IPv6 (RFC 8200 section 5).
const minMTU6 = 1280

// mtuNote returns the name of the note file about a bridge's MTU. All networks of the node share this note file. This note file says that a
// process is pinning the MTU of a bridge to the value in the file. The note file is needed because pinning takes two netlink requests.
func mtuNote(bridge string) string { return "mtu-" + bridge }

// madeNote returns the name of a network's note file about the origin of a bridge. This note file says that ADD created the bridge and
// pinned its MTU. The note file contains the bridge's MAC, because another bridge may later have the same name.
func madeNote(bridge string) string { return "made-" + bridge }

// ensureMTU lowers the bridge's MTU to the MTU of the pods. With a larger MTU, the node would send packets that are too large for the pods.
// The MTU of a bridge that another program created is never lowered. If the pods' MTU is below the minimum of IPv6, ensureMTU pins the
// current MTU of the bridge. Without pinning, the kernel would lower the bridge's MTU to the pods' MTU, and the bridge would lose its IPv6
// addresses.
func (j *job) ensureMTU(bridge *kernel.Link, made bool) error {
	_, owed := attachment.ReadNodeNote(mtuNote(bridge.Name))
	small := j.cfg.MTU != 0 && j.cfg.MTU < minMTU6
	if !made && !owed && !small && !j.lowersMTU(*bridge) {
		return nil
	}
	noted, err := attachment.HasNote(madeNote(bridge.Name), bridge.MAC.String())
	if err != nil {
		return err
	}
	ours := made || noted
	if pin := made || small && !ours; pin || owed || ours && j.lowersMTU(*bridge) {
		return j.setMTU(bridge, made, ours, pin)
	}
	return nil
}

func (j *job) lowersMTU(bridge kernel.Link) bool {
	return j.cfg.MTU >= minMTU6 && j.cfg.MTU < bridge.MTU
}

// setMTU changes the MTU while it holds the lock for all MTU changes of bridges. The MTU is read again under the lock, since another
// process may have changed it.
func (j *job) setMTU(bridge *kernel.Link, made, ours, pin bool) error {
	unlock, err := attachment.Waiting.Node("mtu")
	if err != nil {
		return err
	}
	defer unlock()
	now, ok, err := j.host.LinkByIndex(bridge.Index)
	if err := errIfDeleted(bridge.Name, ok, err); err != nil {
		return err
	}
	bridge.MTU = now.MTU
	mtu, owed := interruptedMTU(now)
	if owed && !made {
		pin, bridge.MTU = true, mtu
	}
	if ours && j.lowersMTU(*bridge) {
		bridge.MTU = j.cfg.MTU
	}
	if pin && bridge.MTU == now.MTU {
		if err := attachment.WriteNodeNote(mtuNote(bridge.Name), strconv.Itoa(bridge.MTU)); err != nil {
			return err
		}
		owed = true
	}
	if pin || bridge.MTU != now.MTU {
		if err := j.host.PinMTU(now, bridge.MTU); err != nil {
			return err
		}
	}
	if made {
		if err := j.att.WriteNote(madeNote(bridge.Name), bridge.MAC.String()); err != nil {
			return err
		}
	}
	if !owed {
		return nil
	}
	return attachment.RemoveNodeNote(mtuNote(bridge.Name))
}

// interruptedMTU returns the MTU that a bridge should have. Normally interruptedMTU returns the current MTU. If a process was killed
// between the two netlink requests that pin the MTU, the result is the value that the process wanted to pin. If an admin changed the MTU
// after the process was killed, interruptedMTU returns the current MTU. The second result is true if a process was killed between the two
// requests.
func interruptedMTU(bridge kernel.Link) (mtu int, owed bool) {
	note, owed := attachment.ReadNodeNote(mtuNote(bridge.Name))
	if mtu, err := strconv.Atoi(note); err == nil && bridge.MTU == kernel.MTUBeside(mtu) {
		return mtu, owed
	}
	return bridge.MTU, owed
}
