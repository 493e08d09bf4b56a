// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// setUpGateway adds the gateway addresses to the bridge and enables forwarding on the node.
func (j *job) setUpGateway(w wiring, l layer3) error {
	bridge := w.gateway
	if err := j.ensureOwnEntry(bridge); err != nil {
		return err
	}
	for _, gw := range l.gateways {
		// The note file's name contains the prefix length, which saves a slow search in the kernel's list of all addresses.
		_, noted := attachment.ReadNote(j.att.Network, gatewayNote(bridge, gw))
		if err := enableForwarding(j.host, bridge, gw.Addr().Is4(), !noted); err != nil {
			return err
		}
		has, err := j.host.HasAddress(bridge, gw.Addr())
		if err != nil {
			return err
		}
		if has && noted {
			continue
		}
		if err := j.addGateway(bridge, gw, l.gateways); err != nil {
			return err
		}
		if gw.Addr().Is4() {
			continue
		}
		if err := j.awaitAddresses(&j.host.NS, bridge, gw); err != nil {
			j.r.Log.Warn("the gateway address cannot be used; pods reach the node once it can", "gateway", gw, "bridge", bridge.Name, "error", err)
		}
	}
	return nil
}

// gatewayNote returns the name of the note file which says that this network added a gateway address to a bridge.
func gatewayNote(bridge kernel.Link, gw netip.Prefix) string {
	return "gateway-" + bridge.Name + "-" + strings.Replace(gw.String(), "/", "_", 1)
}

// addGateway removes conflicting addresses from the bridge and adds the gateway address. If the network has a note file about a conflicting
// address, this is its old gateway address, which is removed once no pod uses it; otherwise it belongs to another program.
func (j *job) addGateway(bridge kernel.Link, gw netip.Prefix, wanted []netip.Prefix) error {
	addresses, err := j.host.Addresses(bridge)
	if err != nil {
		return err
	}
	others := slices.DeleteFunc(slices.Clone(addresses), func(a netip.Prefix) bool { return slices.Contains(wanted, a) })
	gone, err := j.gatewaysToRemove(bridge, gw, others)
	if err != nil {
		return err
	}
	for _, other := range gone {
		if err := j.removeGateway(bridge, other); err != nil {
			return err
		}
	}
	if !slices.Contains(addresses, gw) {
		if err := j.host.AddAddress(bridge, gw, j.cfg.DAD); err != nil && !isExist(err) {
			return err
		}
		j.fresh = true
	}
	j.warnOfSecondBridge(bridge, gw)
	return attachment.WriteNote(j.att.Network, gatewayNote(bridge, gw), "")
}

// GatewaysConflict reports whether a bridge cannot have both addresses: two IPv4 addresses, or IPv6 addresses of overlapping subnets.
func GatewaysConflict(a, b netip.Prefix) bool {
	return a.Addr().Is4() == b.Addr().Is4() && (a.Addr().Is4() || a.Overlaps(b))
}

// RecordedGateways are the gateway addresses that a bridge needs for an attachment.
type RecordedGateways struct {
	attachment.Key
	Pod      string
	Bridge   string
	Gateways []netip.Prefix
}

// Gateways returns the gateway addresses in all records, and an error about the unreadable ones.
func Gateways() (list []RecordedGateways, err error) {
	pods, err := attachment.States[state](attachment.AllOf("bridge"))
	for _, pod := range pods {
		list = append(list, RecordedGateways{pod.Key, pod.Pod, pod.State.Bridge, pod.State.Gateways})
	}
	return list, err
}

// gatewaysToRemove returns those of the others that must leave the bridge when it gets the gateway address gw.
func (j *job) gatewaysToRemove(bridge kernel.Link, gw netip.Prefix, others []netip.Prefix) (gone []netip.Prefix, err error) {
	for _, other := range others {
		if other.Addr().Is4() != gw.Addr().Is4() {
			continue
		}
		if !GatewaysConflict(other, gw) {
			// The bridge can have both. This one goes only if an earlier configuration of the network added it and no pod uses it.
			if _, noted := attachment.ReadNote(j.att.Network, gatewayNote(bridge, other)); !noted || j.mayReplace(bridge, other, gw) != nil {
				continue
			}
		} else if !j.cfg.ForceAddress {
			if err := j.mayReplace(bridge, other, gw); err != nil {
				return nil, err
			}
		}
		gone = append(gone, other)
	}
	return gone, nil
}

// removeGateway removes a gateway address of an earlier configuration from the bridge. It also empties the note file with the masquerade
// configuration, so that the next ADD rewrites the masquerade sets from the records, without the old subnet.
func (j *job) removeGateway(bridge kernel.Link, gw netip.Prefix) error {
	unlock, err := j.att.LockNetwork() // otherwise a STATUS between the two steps would restore the address
	if err != nil {
		return err
	}
	defer unlock()
	if err := errors.Join(j.host.DelAddress(bridge, gw), attachment.RemoveNotes(gatewayNote(bridge, gw))); err != nil {
		return err
	}
	if _, noted := attachment.ReadNote(j.att.Network, masqueradeNote); !noted {
		return nil
	}
	return attachment.WriteNote(j.att.Network, masqueradeNote, "")
}

// warnOfSecondBridge logs a warning if another bridge of this network still has the gateway address, as after a change of the key "bridge".
// While both bridges have pods, the node reaches only those of one.
func (j *job) warnOfSecondBridge(bridge kernel.Link, gw netip.Prefix) {
	notes := attachment.ListNotes(j.att.Network, "gateway-")
	for _, note := range notes {
		former := strings.TrimPrefix(note, "gateway-")
		former, is := strings.CutSuffix(former, strings.TrimPrefix(gatewayNote(kernel.Link{}, gw), "gateway-"))
		if !is || former == bridge.Name {
			continue
		}
		link, ok, err := j.host.Link(former)
		var addresses []netip.Prefix
		if err == nil && ok {
			addresses, err = j.host.Addresses(link)
		}
		if err == nil && slices.Contains(addresses, gw) {
			j.r.Log.Warn("another bridge of the network has the same gateway address: the node reaches the pods of only one bridge; "+
				"recreate the pods of the old bridge, then delete it", "gateway", gw.Addr(), "bridge", bridge.Name, "former", former)
		}
	}
}

// mayReplace returns nil if a network of Podlace added the gateway address and no pod uses it, otherwise the reason to keep it.
func (j *job) mayReplace(bridge kernel.Link, old, gw netip.Prefix) error {
	taken := plugin.Errorf(plugin.CodeAddressTaken, "%s already has the address %s, want %s", bridge.Name, old, gw)
	network, noted, err := attachment.NetworkWithNote(gatewayNote(bridge, old))
	if err != nil {
		return err
	}
	if !noted {
		return plugin.WithHint(taken, "Podlace did not add it: if nothing needs it, remove it with 'ip addr del %s dev %s'; "+
			"forceAddress does that by itself", old, bridge.Name)
	}
	user, err := j.findUser(bridge, old)
	if err != nil || user == "" {
		return err
	}
	if network != j.att.Network {
		return plugin.WithHint(taken, "it is of network %s, and %s uses it: networks with different IPv4 subnets need bridges of their own; "+
			"forceAddress cuts its pods off", network, user)
	}
	return plugin.WithHint(taken, "the subnet was changed from %s to %s while %s uses the old one: delete the pods of the old subnet, "+
		"or set forceAddress, which cuts them off", old.Masked(), gw.Masked(), user)
}

// findUser describes a pod on the bridge with an address in the gateway's subnet, or returns "". A port without a record counts as such a
// pod. It reads all records on the node.
func (j *job) findUser(bridge kernel.Link, gw netip.Prefix) (string, error) {
	pods, err := attachment.States[state](attachment.AllOf(j.r.Plugin))
	if err != nil {
		return "", err
	}
	ports, err := j.portsInVLANOf(bridge)
	if err != nil {
		return "", err
	}
	for _, pod := range pods {
		at := slices.Index(ports, pod.HostVeth())
		if at < 0 {
			continue
		}
		ports = slices.Delete(ports, at, at+1)
		if pod.Key == j.att.Key {
			continue
		}
		for _, a := range pod.State.Addresses {
			if gw.Masked().Contains(a.Addr()) && a.Bits() == gw.Bits() {
				return fmt.Sprintf("%s with %s", podText(pod.Record), a), nil
			}
		}
	}
	if len(ports) > 0 {
		return "port " + ports[0] + ", which has no record of Podlace,", nil
	}
	return "", nil
}

func podText(rec attachment.Record) string {
	if rec.Pod == "" {
		return "container " + rec.ContainerID
	}
	return "pod " + rec.Pod + " (container " + rec.ContainerID + ")"
}
