// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"slices"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
)

// orphan is the host side of a live attachment whose bridge was deleted, with the recorded state.
type orphan struct {
	link kernel.Link
	state
}

// findOrphans returns the host sides without a bridge that were ports of this one, according to the records of any network. It is called
// only if the bridge is missing, is down, or is not the recorded one. ADD sets a bridge up as its last step, so one that is down may come
// from a killed ADD that had not restored the orphans yet.
func (j *job) findOrphans() (orphans []orphan, err error) {
	pods, err := attachment.States[state](attachment.AllOf(j.r.Plugin))
	if err != nil {
		return nil, err
	}
	for _, pod := range finished(pods) {
		if pod.State.Bridge != j.cfg.Bridge {
			continue
		}
		link, ok, err := recordedPort(j.host, pod)
		if err != nil {
			return nil, err
		}
		if ok && link.Master == 0 {
			orphans = append(orphans, orphan{link, pod.State})
		}
	}
	return orphans, nil
}

// previousMAC returns the MAC of the deleted bridge, with which the pods' neighbour entries stay valid, or a random one without orphans.
func previousMAC(orphans []orphan) net.HardwareAddr {
	for _, o := range orphans {
		if mac, err := net.ParseMAC(o.BridgeMAC); err == nil && len(mac) == 6 && mac[0]&1 == 0 {
			return mac
		}
	}
	return randomMAC()
}

// prepareNewBridge pins the MAC of a bridge that is new to the network and restores the orphans. A bridge is new, even if it is up, if its
// ifindex or MAC differs from that in the network's note file.
func (j *job) prepareNewBridge(bridge kernel.Link, orphans []orphan) error {
	note, identity := identityOf(bridge)
	last, noted := attachment.ReadNote(j.att.Network, note)
	if noted && last == identity {
		j.restoreOrphans(bridge, orphans)
		return nil
	}
	// An unpinned bridge takes the lowest MAC of its ports. When it changes, pods send to the previous one for some seconds. The reference
	// plugin pins the MAC whenever it adds a gateway address.
	if !bridge.Made() {
		if err := j.host.SetMAC(bridge, bridge.MAC); err != nil {
			return err
		}
	}
	if noted && bridge.Up {
		var err error
		if orphans, err = j.findOrphans(); err != nil {
			return err
		}
	}
	j.restoreOrphans(bridge, orphans)
	return attachment.WriteNote(j.att.Network, note, identity)
}

// identityOf returns the name of the note file of a network's bridge, and its content.
func identityOf(bridge kernel.Link) (note, identity string) {
	return "bridge-" + bridge.Name, fmt.Sprint(bridge.Index, " ", bridge.MAC)
}

// downBridge returns the pod's bridge if it is down. It ignores a bridge that is new to the network, because ADD sets it up after it has
// attached the other pods.
func (st state) downBridge(host *kernel.Node, network string) (link kernel.Link, down bool, err error) {
	link, ok, err := host.Link(st.Bridge)
	if err != nil || !ok || link.Up {
		return link, false, err
	}
	note, identity := identityOf(link)
	noted, _ := attachment.ReadNote(network, note)
	return link, noted == identity, nil
}

// restoreOrphans attaches orphans to the bridge with settings and gateway addresses. It only logs errors, because ADD is for another pod.
func (j *job) restoreOrphans(bridge kernel.Link, orphans []orphan) {
	for _, o := range orphans {
		err := j.restoreOrphan(bridge, o)
		j.r.Log.Warn("attached a pod again after its bridge was deleted", "bridge", bridge.Name, "port", o.link.Name, "error", err)
	}
}

func (j *job) restoreOrphan(bridge kernel.Link, o orphan) error {
	errs := []error{restorePort(j.host, bridge, o.link, o.state)}
	gateway, err := j.ensureGatewayLink(bridge, cmp.Or(o.gatewayLink(), bridge.Name), o.VLANs)
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	has, err := j.host.Addresses(gateway)
	errs = append(errs, err)
	for _, gw := range o.Gateways {
		if !slices.Contains(has, gw) {
			errs = append(errs, restoreGateway(j.host, gateway, gw, j.cfg.DAD))
		}
	}
	return errors.Join(errs...)
}
