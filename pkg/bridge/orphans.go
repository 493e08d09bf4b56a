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

// The type `port` contains data about a live attachment whose bridge was deleted: the host side and the recorded state.
type port struct {
	link kernel.Link
	state
}

// orphanedPorts returns the host sides that are attached to no bridge, although the record says that they were ports of this bridge.
// orphanedPorts reads the records of all networks. The caller calls orphanedPorts only if the bridge is missing, is down, or is not the
// recorded bridge. ADD sets a bridge up as its last step. A bridge that is down may therefore come from a killed ADD that had not attached
// the orphaned ports yet.
func (j *job) orphanedPorts() ([]port, error) {
	pods, err := attachment.States[state](attachment.AllOf(j.r.Plugin))
	if err != nil {
		return nil, err
	}
	var lost []port
	for _, pod := range pods {
		st := pod.State
		if st.Bridge != j.cfg.Bridge || st.Unfinished || st.Index == 0 {
			continue
		}
		link, ok, err := j.host.LinkByIndex(st.Index)
		if err != nil {
			return nil, err
		}
		if ok && link.Name == pod.HostVeth() && link.Master == 0 {
			lost = append(lost, port{link, st})
		}
	}
	return lost, nil
}

// previousMAC returns the MAC of the deleted bridge. If the new bridge gets this MAC, the pods' neighbour entries stay valid. If no port is
// orphaned, previousMAC returns a random MAC.
func previousMAC(lost []port) net.HardwareAddr {
	for _, p := range lost {
		if mac, err := net.ParseMAC(p.BridgeMAC); err == nil && len(mac) == 6 && mac[0]&1 == 0 {
			return mac
		}
	}
	return randomMAC()
}

// adopt() prepares a bridge that is new to the network: it pins the bridge's MAC and attaches the orphaned ports. The network's note file
// contains the ifindex and the MAC of the bridge that the network already uses. A bridge with the same name but another ifindex or MAC is
// new to the network, even if this bridge is up.
func (j *job) adopt(bridge kernel.Link, made bool, lost []port) error {
	note, identity := "bridge-"+bridge.Name, fmt.Sprint(bridge.Index, " ", bridge.MAC)
	last, noted := j.att.Noted(note)
	if noted && last == identity {
		j.reattach(bridge, lost)
		return nil
	}
	if err := j.pinMAC(bridge, made); err != nil {
		return err
	}
	if noted && bridge.Up {
		var err error
		if lost, err = j.orphanedPorts(); err != nil {
			return err
		}
	}
	j.reattach(bridge, lost)
	return j.att.Note(note, identity)
}

// pinMAC sets the bridge's current MAC explicitly, so that the kernel does not change it any more. An unpinned bridge always has the lowest
// MAC of its ports. After a change of the bridge's MAC, pods send packets to the previous MAC for some seconds. If an ADD of any network
// created the bridge, the MAC is already pinned. The reference plugin pins the MAC whenever it adds a gateway address.
func (j *job) pinMAC(bridge kernel.Link, made bool) error {
	if made {
		return nil
	}
	ours, err := attachment.NotedAs(madeNote(bridge.Name), bridge.MAC.String())
	if err != nil || ours {
		return err
	}
	return j.host.SetMAC(bridge, bridge.MAC)
}

// reattach() attaches the orphaned ports to the bridge again, with their settings and their gateway addresses. Errors are only logged,
// because the current ADD is for another pod.
func (j *job) reattach(bridge kernel.Link, lost []port) {
	for _, p := range lost {
		err := j.reattachPort(bridge, p)
		j.r.Log.Warn("attached a pod again after its bridge was deleted", "bridge", bridge.Name, "port", p.link.Name, "error", err)
	}
}

func (j *job) reattachPort(bridge kernel.Link, p port) error {
	errs := []error{join(j.host, bridge, p.link, p.state)}
	gateway, err := j.ensureGatewayLink(bridge, cmp.Or(p.gatewayLink(), bridge.Name), p.VLANs)
	if err != nil {
		return errors.Join(append(errs, err)...)
	}
	has, err := j.host.Addresses(gateway)
	errs = append(errs, err)
	for _, gw := range p.Gateways {
		if slices.Contains(has, gw) {
			continue
		}
		if gw.Addr().Is6() {
			errs = append(errs, j.host.Set(kernel.Sysctl{Path: "ipv6/conf/" + gateway.Name + "/disable_ipv6", Value: "0"}))
		}
		if err := j.host.AddAddress(gateway, gw, j.cfg.DAD); err != nil && !isExist(err) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
