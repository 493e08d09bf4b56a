// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"strconv"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
)

// minMTU6 is the minimum link MTU of IPv6 (RFC 8200 section 5).
const minMTU6 = 1280

// mtuNote is the node's note, with the value, that a process is about to pin the MTU of a bridge. Pinning takes two requests.
func mtuNote(bridge string) string { return "mtu-" + bridge }

// madeNote is the network's note that it created a bridge and pinned its MTU. It holds the MAC, because another bridge may get the same
// name.
func madeNote(bridge string) string { return "made-" + bridge }

// ensureMTU lowers the bridge's MTU to the pods' MTU, or else the node would send packets that are too large for the pods. It does not
// lower the MTU of a bridge that another program created. If the pods' MTU is below the minimum of IPv6, it pins the MTU of any bridge.
// Otherwise the kernel would lower the bridge's MTU, and the node would lose its IPv6 addresses.
func (j *job) ensureMTU(bridge *kernel.Link, made bool) error {
	_, owed := attachment.NodeNoted(mtuNote(bridge.Name))
	small := j.cfg.MTU != 0 && j.cfg.MTU < minMTU6
	if !made && !owed && !small && !j.lowersMTU(*bridge) {
		return nil
	}
	noted, err := attachment.NotedAs(madeNote(bridge.Name), bridge.MAC.String())
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

// setMTU sets the MTU under the lock for MTU changes of bridges. It reads the MTU again, since another process may have changed it.
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
		if err := attachment.NoteNode(mtuNote(bridge.Name), strconv.Itoa(bridge.MTU)); err != nil {
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
		if err := j.att.Note(madeNote(bridge.Name), bridge.MAC.String()); err != nil {
			return err
		}
	}
	if !owed {
		return nil
	}
	return attachment.UnnoteNode(mtuNote(bridge.Name))
}

// interruptedMTU returns the MTU of a bridge. If a process was killed between the two requests of pinning, it returns the value that this
// process was about to pin, unless an admin set another MTU since. owed reports whether a process was interrupted.
func interruptedMTU(bridge kernel.Link) (mtu int, owed bool) {
	note, owed := attachment.NodeNoted(mtuNote(bridge.Name))
	if mtu, err := strconv.Atoi(note); err == nil && bridge.MTU == kernel.MTUBeside(mtu) {
		return mtu, owed
	}
	return bridge.MTU, owed
}
