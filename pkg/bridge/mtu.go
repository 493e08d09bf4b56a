// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"strconv"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
)

// minMTU6 is what IPv6 needs of a link (RFC 8200 section 5).
const minMTU6 = 1280

// mtuNote is the mark of the node that the MTU of a bridge is about to be pinned, and holds its value: to pin it takes two requests.
func mtuNote(bridge string) string { return "mtu-" + bridge }

// madeNote is the mark of the network that it made a bridge, and pinned its MTU. It holds the MAC: another may have the name by now.
func madeNote(bridge string) string { return "made-" + bridge }

// ensureMTU gives the bridge the MTU of its pods when that is smaller, or else the node would send them what they cannot take: not a bridge
// that somebody else made. But pods must not take the node's IPv6 addresses from any bridge by a smaller MTU than IPv6 needs.
func (j *job) ensureMTU(bridge *kernel.Link, made bool) error {
	_, owed := attachment.NodeNoted(mtuNote(bridge.Name))
	small := j.cfg.MTU != 0 && j.cfg.MTU < minMTU6
	if !made && !owed && !small && !j.lowers(*bridge) {
		return nil
	}
	noted, err := attachment.NotedAs(madeNote(bridge.Name), bridge.MAC.String())
	if err != nil {
		return err
	}
	ours := made || noted
	if pin := made || small && !ours; pin || owed || ours && j.lowers(*bridge) {
		return j.setMTU(bridge, made, ours, pin)
	}
	return nil
}

func (j *job) lowers(bridge kernel.Link) bool { return j.cfg.MTU >= minMTU6 && j.cfg.MTU < bridge.MTU }

// setMTU does so under the lock that all take who change the MTU of a bridge: meanwhile it may be another than it seemed.
func (j *job) setMTU(bridge *kernel.Link, made, ours, pin bool) error {
	unlock, err := attachment.Waiting.Node("mtu")
	if err != nil {
		return err
	}
	defer unlock()
	now, ok, err := j.host.LinkByIndex(bridge.Index)
	if err := stillThere(bridge.Name, ok, err); err != nil {
		return err
	}
	bridge.MTU = now.MTU
	mtu, owed := interruptedMTU(now)
	if owed && !made {
		pin, bridge.MTU = true, mtu
	}
	if ours && j.lowers(*bridge) {
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

// interruptedMTU returns the MTU of a bridge, or the one that a process was about to pin when it was killed between the two requests,
// unless an admin set another since; owed reports whether there was such a process.
func interruptedMTU(bridge kernel.Link) (mtu int, owed bool) {
	note, owed := attachment.NodeNoted(mtuNote(bridge.Name))
	if mtu, err := strconv.Atoi(note); err == nil && bridge.MTU == kernel.MTUBeside(mtu) {
		return mtu, owed
	}
	return bridge.MTU, owed
}
