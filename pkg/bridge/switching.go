// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"bytes"
	"errors"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// lacksOwnEntry reports whether a bridge lacks its own MAC in its forwarding database, as after 'bridge fdb flush'. It then sends frames
// for the node to its ports, and learns its MAC from any pod that forges it. Other links, such as the gateway link of a VLAN, need no
// entry, nor does a bridge that is no member of its default VLAN.
func lacksOwnEntry(host *kernel.Node, bridge kernel.Link) (bool, error) {
	if bridge.Kind != "bridge" {
		return false, nil
	}
	if in, err := inDefaultVLAN(host, bridge); err != nil || !in {
		return false, err
	}
	index, known, err := host.FixedPort(bridge, bridge.MAC)
	return known && index != bridge.Index, err
}

// inDefaultVLAN reports whether a bridge is a member of its default VLAN, in which it gets the frames of pods without VLANs.
func inDefaultVLAN(host *kernel.Node, bridge kernel.Link) (bool, error) {
	if !bridge.FiltersVLANs {
		return true, nil
	}
	has, err := host.PortVLANs(bridge)
	return has.Has(bridge.DefaultVLAN), err
}

// ensureOwnEntry restores the own MAC in the forwarding database of a bridge with gateway addresses.
func (j *job) ensureOwnEntry(bridge kernel.Link) error {
	lost, err := lacksOwnEntry(j.host, bridge)
	if err != nil || !lost {
		return err
	}
	j.r.Log.Warn("the bridge's own MAC was missing in its forwarding database: its pods did not reach their gateway", "bridge", bridge.Name)
	return j.host.AddOwnEntry(bridge)
}

// checkSwitching returns an error if the bridge keeps frames from the pod or from its gateway.
func (j *job) checkSwitching(w wiring, l layer3) error {
	if len(l.gateways) > 0 {
		if err := errors.Join(j.checkGatewayLink(w.gateway), j.checkNeighbours(w, l)); err != nil {
			return err
		}
	}
	if j.cfg.VLANs.used() || w.bridge.FiltersVLANs && w.bridge.DefaultVLAN == 0 {
		return nil
	}
	index, _, err := j.host.FixedPort(w.bridge, w.pod.MAC)
	if err == nil && index != 0 && index != w.host.Index {
		err = plugin.WithHint(plugin.Differs("an entry in the forwarding database of %s leads frames for the pod's MAC %s away from %s",
			w.bridge.Name, w.pod.MAC, w.host.Name), "another program added it: find it with 'bridge fdb get %s br %s'", w.pod.MAC, w.bridge.Name)
	}
	return err
}

// checkNeighbours returns an error if the node has a permanent neighbour entry with another MAC for an address of the pod.
func (j *job) checkNeighbours(w wiring, l layer3) error {
	for _, a := range l.Addresses {
		mac, err := j.host.PermanentNeighbour(w.gateway, a.Addr())
		if err != nil {
			return err
		}
		if mac != nil && !bytes.Equal(mac, w.pod.MAC) {
			return plugin.WithHint(plugin.Differs("a permanent neighbour entry leads the node's packets for %s to %s, not to the pod's %s",
				a.Addr(), mac, w.pod.MAC), "'ip neigh del %s dev %s' removes it", a.Addr(), w.gateway.Name)
		}
	}
	return nil
}

func (j *job) checkGatewayLink(gateway kernel.Link) error {
	if gateway.IgnoresARP {
		return plugin.Differs("%s does not answer ARP requests for the gateway (net.ipv4.conf.%s.arp_ignore=8)", gateway.Name, gateway.Name)
	}
	if gateway.Traits.NoARP {
		return plugin.WithHint(plugin.Differs("%s does not answer ARP requests for the gateway", gateway.Name),
			"'ip link set %s arp on' ends that", gateway.Name)
	}
	if lost, err := lacksOwnEntry(j.host, gateway); err != nil {
		return err
	} else if lost {
		return plugin.WithHint(plugin.Differs("%s lacks its own MAC in its forwarding database: pods do not reach their gateway", gateway.Name),
			reloadHint)
	}
	if in, err := inDefaultVLAN(j.host, gateway); err != nil || in || gateway.DefaultVLAN == 0 {
		return err
	}
	return plugin.WithHint(plugin.Differs("%s is no member of its default VLAN %d: pods do not reach their gateway", gateway.Name, gateway.DefaultVLAN),
		"'bridge vlan add dev %s vid %d pvid untagged self' ends that", gateway.Name, gateway.DefaultVLAN)
}
