// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"errors"
	"fmt"
	"log/slog"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
	"github.com/podlace/podlace/pkg/plugin"
)

// gatewayName returns the name of the link with the gateway addresses: the bridge, or the gateway link of a VLAN.
func (c Config) gatewayName() string {
	if c.VLANs.ID == 0 || !c.Gateway || c.IPAM == "" {
		return c.Bridge
	}
	return vlanGateway(c.Bridge, c.VLANs.ID)
}

// vlanGateway returns the name of a VLAN's gateway link.
func vlanGateway(bridge string, vlan uint16) string { return fmt.Sprintf("%s.%d", bridge, vlan) }

// ensureGatewayLink returns the link for the gateway addresses, which it creates if necessary. Without a VLAN it is the bridge; otherwise
// it is one end of a veth pair, whose other end is a bridge port in that VLAN. All pods of the VLAN share the pair, so no DEL deletes it.
// ADDs may run concurrently, so each one creates and configures only what is missing.
func (j *job) ensureGatewayLink(bridge kernel.Link, name string, v VLANs) (kernel.Link, error) {
	if name == bridge.Name {
		return bridge, nil
	}
	portName := attachment.Key{IfName: name}.HostVeth()
	link, ok, err := j.host.Link(name)
	if err == nil && !ok {
		pair := kernel.Veth{Host: portName, HostMAC: randomMAC(), Pod: name, PodMAC: randomMAC(), MTU: bridge.MTU,
			Master: bridge.Index}
		if _, err := j.host.AddVeth(pair); err != nil && !isExist(err) {
			return link, err
		}
		link, ok, err = j.host.Link(name)
	}
	if err == nil && !ok {
		err = plugin.Errorf(plugin.CodeDevice, "another program deleted %s, or the name %s is taken", name, portName)
	}
	if err != nil {
		return link, err
	}
	port, ok, err := j.portOf(link)
	if err != nil {
		return link, err
	}
	if !ok || port.Master != 0 && port.Master != bridge.Index {
		return link, plugin.WithHint(plugin.Errorf(plugin.CodeDevice,
			"%s cannot be the gateway of VLAN %d: want a veth whose other end is a port of %s", name, v.ID, bridge.Name),
			"another program made it; rename or delete it")
	}
	if err := j.ensureGatewayPort(bridge, link, port, v); err != nil {
		return link, err
	}
	return link, EnsureVLANGateway(j.host, rulesOf(bridge.Name, link))
}

func rulesOf(bridge string, link kernel.Link) VLANGateway {
	return VLANGateway{Bridge: bridge, Link: link.Name, MAC: link.MAC}
}

// gatewayLink returns the name of the gateway link of the pod's VLAN, or "" if it has none.
func (st state) gatewayLink() string {
	if st.VLANs.ID == 0 || len(st.Gateways) == 0 {
		return ""
	}
	return vlanGateway(st.Bridge, st.VLANs.ID)
}

// missingGatewayRules returns the rules of the pod's VLAN gateway. lost is true if the kernel lacks them although the gateway link exists.
func (st state) missingGatewayRules(host *kernel.Node) (rules VLANGateway, lost bool, err error) {
	name := st.gatewayLink()
	if name == "" {
		return rules, false, nil
	}
	link, ok, err := host.Link(name)
	if err != nil || !ok {
		return rules, false, err
	}
	rules = rulesOf(st.Bridge, link)
	err = compareVLANGateway(host, rules)
	if plugin.IsDifferent(err) {
		return rules, true, nil
	}
	return rules, false, err
}

// restoreVLANGateways writes the missing rules of the pods' VLAN gateways.
func restoreVLANGateways(host *kernel.Node, log *slog.Logger, pods []attachment.Of[state]) error {
	var errs []error
	seen := map[string]bool{"": true}
	for _, pod := range pods {
		name := pod.State.gatewayLink()
		if seen[name] {
			continue
		}
		seen[name] = true
		rules, lost, err := pod.State.missingGatewayRules(host)
		if lost {
			log.Info("the rules of a VLAN's gateway were missing or changed and are restored from the records", "gateway", name)
			if err = vlanSchema().Install(rules.elements()); err == nil {
				err = noteTable(nft.VLANTable)
			}
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// portOf returns the other end of a veth pair if it is on the node.
func (j *job) portOf(link kernel.Link) (port kernel.Link, ok bool, err error) {
	if link.Kind != "veth" {
		return port, false, nil
	}
	return j.host.PeerOf(link, nil)
}

func (j *job) ensureGatewayPort(bridge, link, port kernel.Link, v VLANs) error {
	if port.Master == 0 { // the bridge was deleted and created again
		if err := j.host.SetMaster(port, bridge); err != nil {
			return err
		}
	}
	has, err := j.host.PortVLANs(port)
	if err != nil {
		return err
	}
	if err := j.host.ChangeVLANs(port, v.ofGateway(bridge, has), v.onGateway()); err != nil {
		return err
	}
	for _, l := range []kernel.Link{link, port} {
		if l.Up {
			continue
		}
		if err := j.host.Set(hardenedSysctls(l.Name, j.cfg.DAD)...); err != nil {
			return err
		}
		if err := j.host.SetUp(l); err != nil {
			return err
		}
	}
	return nil
}

// onGateway returns the VLANs that the bridge port of a VLAN gateway should have.
func (v VLANs) onGateway() kernel.VLANs {
	return kernel.VLANs{{ID: v.ID, PVID: true, Untagged: true}}
}

// ofGateway returns the VLANs of the gateway's port that CHECK and ADD compare. With preserveDefaultVlan it leaves out the bridge's default
// VLAN, which the reference plugin keeps on this port without any effect.
func (v VLANs) ofGateway(bridge kernel.Link, has kernel.VLANs) kernel.VLANs {
	if v.KeepDefault && bridge.DefaultVLAN != v.ID {
		return has.Without(bridge.DefaultVLAN)
	}
	return has
}

// observeGatewayLink returns the gateway link, or the error with which CHECK fails.
func (j *job) observeGatewayLink(bridge kernel.Link) (kernel.Link, error) {
	name := j.cfg.gatewayName()
	if name == bridge.Name {
		return bridge, nil
	}
	link, ok, err := j.host.Link(name)
	if err != nil {
		return link, err
	}
	port, isPair, err := j.portOf(link)
	switch {
	case err != nil:
		return link, err
	case !ok:
		return link, plugin.Differs("%s, the gateway of VLAN %d, is missing", name, j.cfg.VLANs.ID)
	case !isPair || port.Master != bridge.Index:
		return link, plugin.Differs("%s, the gateway of VLAN %d, is not connected to %s", name, j.cfg.VLANs.ID, bridge.Name)
	case !link.Up || !port.Up:
		return link, plugin.Differs("%s, the gateway of VLAN %d, or its port is down", name, j.cfg.VLANs.ID)
	}
	has, err := j.host.PortVLANs(port)
	if err != nil {
		return link, err
	}
	if has, want := j.cfg.VLANs.ofGateway(bridge, has), j.cfg.VLANs.onGateway(); has.String() != want.String() {
		return link, plugin.Differs("port %s of the gateway %s has the VLANs %s; want %s", port.Name, name, has, want)
	}
	return link, compareVLANGateway(j.host, rulesOf(bridge.Name, link))
}

// portsInVLANOf returns the bridge's ports in the VLAN of a gateway link, without the gateway's own port.
func (j *job) portsInVLANOf(gateway kernel.Link) ([]string, error) {
	bridge, ok, err := j.host.Link(j.cfg.Bridge)
	if err != nil || !ok {
		return nil, err
	}
	ports, err := j.host.Ports(bridge)
	if err != nil || !bridge.FiltersVLANs {
		return ports, err
	}
	vlan := bridge.DefaultVLAN
	if gateway.Index != bridge.Index {
		vlan = j.cfg.VLANs.ID
	}
	var out []string
	for _, name := range ports {
		port, ok, err := j.host.Link(name)
		if err != nil {
			return nil, err
		}
		if !ok || port.Index == gateway.Peer {
			continue
		}
		if has, err := j.host.PortVLANs(port); err != nil {
			return nil, err
		} else if has.Has(vlan) {
			out = append(out, name)
		}
	}
	return out, nil
}
