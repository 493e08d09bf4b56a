// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"crypto/rand"
	"errors"
	"net"
	"net/netip"
	"time"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// dadTimeout bounds duplicate address detection, which takes one to two seconds (RFC 4862 section 5.4, one probe and its delay).
const dadTimeout = 10 * time.Second

// wiring is layer 2 of an attachment: the bridge and both ends of the veth pair.
type wiring struct{ bridge, host, pod kernel.Link }

// wire makes the bridge when it is missing, and the veth pair, still down.
func (j *job) wire() (w wiring, err error) {
	if w.bridge, err = j.ensureBridge(); err != nil {
		return w, err
	}
	veth := kernel.Veth{Host: j.att.HostVeth(), HostMAC: j.att.MAC("host"), Pod: j.r.IfName, PodMAC: j.cfg.MAC, MTU: j.cfg.MTU,
		Netns: j.r.Netns, Master: w.bridge.Index}
	if veth.PodMAC == nil {
		veth.PodMAC = j.att.MAC("pod")
	}
	index, err := j.host.AddVeth(veth)
	if err != nil {
		return w, err
	}
	w.pod, _, err = j.pod.Link(j.r.IfName)
	w.host = kernel.Link{Index: index, Name: veth.Host, MAC: veth.HostMAC, MTU: w.pod.MTU}
	return w, err
}

func (j *job) ensureBridge() (kernel.Link, error) {
	name := j.cfg.Bridge
	link, ok, err := j.host.Link(name)
	if err == nil && !ok {
		if err = j.host.AddBridge(name, randomMAC(), j.cfg.MTU); err == nil || isExist(err) {
			link, ok, err = j.host.Link(name)
		}
	}
	if err == nil && !ok {
		err = plugin.Errorf(plugin.CodeDevice, "bridge %s was deleted by somebody else", name)
	}
	if err != nil {
		return link, err
	}
	if link.Kind != "bridge" {
		return link, plugin.Errorf(plugin.CodeDevice, "%q already exists but is not a bridge, it is a %s", name, link.Kind)
	}
	if err := j.host.Set(j.quiet(name)...); err != nil {
		return link, err
	}
	if j.cfg.Promisc && !link.Promis {
		if err := j.host.SetPromisc(link); err != nil {
			return link, err
		}
	}
	if !link.Up {
		return link, j.host.SetUp(link)
	}
	return link, nil
}

// quiet keeps an interface from learning addresses and routes that a pod announces (CVE-2020-10749), and from the second or two of
// duplicate address detection for its link-local address. It must be set before the link is up.
func (j *job) quiet(name string) []kernel.Sysctl {
	conf := "ipv6/conf/" + name + "/"
	dad := "0"
	settings := []kernel.Sysctl{{Path: conf + "accept_ra", Value: "0"}}
	if j.cfg.DAD {
		dad = "1"
		settings = append(settings, kernel.Sysctl{Path: conf + "enhanced_dad", Value: "1"})
	}
	return append(settings, kernel.Sysctl{Path: conf + "accept_dad", Value: dad})
}

// randomMAC returns a locally administered unicast address.
func randomMAC() net.HardwareAddr {
	mac := make(net.HardwareAddr, 6)
	_, _ = rand.Read(mac)
	mac[0] = mac[0]&^1 | 2
	return mac
}

// configure brings both ends up with addresses and routes: first the pod side, so that the port of the bridge forwards from the
// moment the host side comes up.
func (j *job) configure(w wiring, l layer3) error {
	if err := j.host.Set(j.quiet(w.host.Name)...); err != nil {
		return err
	}
	if err := j.pod.Set(j.podSettings(l)...); err != nil {
		return err
	}
	for _, a := range l.addresses {
		if err := j.pod.AddAddress(w.pod, a, j.cfg.DAD); err != nil {
			return err
		}
	}
	if !j.cfg.LeaveDown {
		if err := j.pod.SetUp(w.pod); err != nil {
			return err
		}
	}
	if err := j.configurePort(w); err != nil {
		return err
	}
	if j.cfg.Gateway {
		if err := j.gateway(w.bridge, l); err != nil {
			return err
		}
	}
	for _, route := range l.routes {
		if err := j.pod.AddRoute(w.pod, route); err != nil {
			return err
		}
	}
	if j.cfg.DAD {
		return j.pod.WaitForDAD(w.pod, dadTimeout)
	}
	return nil
}

func (j *job) podSettings(l layer3) []kernel.Sysctl {
	name := j.r.IfName
	settings := append(j.quiet(name), kernel.Sysctl{Path: "ipv4/conf/" + name + "/arp_notify", Value: "1"})
	if l.has6() {
		settings = append(settings,
			kernel.Sysctl{Path: "ipv6/conf/lo/disable_ipv6", Value: "0"},
			kernel.Sysctl{Path: "ipv6/conf/" + name + "/disable_ipv6", Value: "0"},
			kernel.Sysctl{Path: "ipv6/conf/" + name + "/keep_addr_on_down", Value: "1"})
	}
	return settings
}

func (j *job) configurePort(w wiring) error {
	if j.cfg.Hairpin {
		if err := j.host.SetHairpin(w.host, true); err != nil {
			return err
		}
	}
	if j.cfg.Isolated {
		if err := j.host.SetIsolated(w.host, true); err != nil {
			return err
		}
	}
	if err := j.host.LeadGroup(w.host); err != nil {
		return err
	}
	return j.host.SetUp(w.host)
}

// gateway puts the gateway addresses on the bridge and lets the node forward.
func (j *job) gateway(bridge kernel.Link, l layer3) error {
	forward := map[bool]kernel.Sysctl{true: {Path: "ipv4/ip_forward", Value: "1"}, false: {Path: "ipv6/conf/all/forwarding", Value: "1"}}
	for _, gw := range l.gateways {
		settings := []kernel.Sysctl{forward[gw.Addr().Is4()]}
		if gw.Addr().Is6() {
			settings = append(settings, kernel.Sysctl{Path: "ipv6/conf/" + bridge.Name + "/disable_ipv6", Value: "0"})
		}
		if err := j.host.Set(settings...); err != nil {
			return err
		}
		if err := j.gatewayAddress(bridge, gw); err != nil {
			return err
		}
	}
	return nil
}

// gatewayAddress puts one gateway address on the bridge. Only when it is not there yet, which is so at the first pod of a network, the
// other addresses of the bridge are looked at: another IPv4 address, or an IPv6 address whose subnet overlaps, is from
// another configuration.
func (j *job) gatewayAddress(bridge kernel.Link, gw netip.Prefix) error {
	has, err := j.host.HasAddress(bridge, gw.Addr())
	if err != nil {
		return err
	}
	if !has {
		if err := j.soleGateway(bridge, gw); err != nil {
			return err
		}
	}
	err = j.host.AddAddress(bridge, gw, j.cfg.DAD)
	if isExist(err) {
		return nil
	}
	if err == nil && has { // with another prefix length
		if err = j.soleGateway(bridge, gw); err != nil {
			err = errors.Join(err, j.host.DelAddress(bridge, gw))
		}
	}
	return err
}

func (j *job) soleGateway(bridge kernel.Link, gw netip.Prefix) error {
	addresses, err := j.host.Addresses(bridge)
	if err != nil {
		return err
	}
	for _, other := range addresses {
		if other == gw || other.Addr().Is4() != gw.Addr().Is4() || gw.Addr().Is6() && !other.Overlaps(gw) {
			continue
		}
		if !j.cfg.ForceAddress {
			return plugin.WithHint(plugin.Errorf(plugin.CodeAddressTaken, "%s already has the address %s, want %s", bridge.Name, other, gw),
				"another subnet was configured for this bridge: remove the address with 'ip addr del %s dev %s', or set forceAddress", other, bridge.Name)
		}
		if err := j.host.DelAddress(bridge, other); err != nil {
			return err
		}
	}
	return nil
}
