// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"bytes"
	"crypto/rand"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// addressTimeout limits the wait for a new address. Duplicate address detection takes one to two seconds: one probe and a delay (RFC 4862
// section 5.4). Without it, an address is usable after less than a millisecond on an idle node.
const addressTimeout = 10 * time.Second

// wiring is the links of an attachment: the bridge, both ends of the veth pair, and the link with the gateway addresses, which is the
// bridge or the gateway link of a VLAN.
type wiring struct{ bridge, host, pod, gateway kernel.Link }

// createLinks creates the bridge if it is missing, and the veth pair, which stays down.
func (j *job) createLinks() (w wiring, err error) {
	if j.cfg.AutoMTU && j.cfg.MTU == 0 {
		if j.cfg.MTU, err = j.host.UplinkMTU(); err != nil {
			return w, err
		}
	}
	if w.bridge, err = j.ensureBridge(); err != nil {
		return w, err
	}
	if w.gateway, err = j.ensureGatewayLink(w.bridge, j.cfg.gatewayName(), j.cfg.VLANs); err != nil {
		return w, err
	}
	for _, link := range []kernel.Link{w.bridge, w.gateway} {
		if j.cfg.MAC != nil && bytes.Equal(j.cfg.MAC, link.MAC) {
			return w, plugin.Errorf(plugin.CodeConfig, "mac %s: interface %s of the node has it; choose another", j.cfg.MAC, link.Name)
		}
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

// ensureBridge returns the bridge, which it creates if it is missing. As its last step, it sets the bridge up. Another program's bridge,
// of which a port may be the node's uplink, keeps all settings that no key of the configuration names.
func (j *job) ensureBridge() (kernel.Link, error) {
	link, made, orphans, err := j.findBridge()
	if err != nil {
		return link, err
	}
	j.fresh = made
	if link.Kind != "bridge" {
		return link, plugin.Errorf(plugin.CodeDevice, "%q already exists but is not a bridge, it is a %s: rename or delete it", j.cfg.Bridge, link.Kind)
	}
	if err := j.ensureFiltering(&link); err != nil {
		return link, err
	}
	if err := j.ensureMTU(&link); err != nil {
		return link, err
	}
	if link.Made() {
		if err := j.host.Set(link.Lacks(hardenedSysctls(j.cfg.Bridge, j.cfg.DAD)...)...); err != nil {
			return link, err
		}
	}
	if j.cfg.Promisc && !link.Promis {
		if err := j.host.SetPromisc(link, true); err != nil {
			return link, err
		}
	}
	if err := j.prepareNewBridge(link, orphans); err != nil {
		return link, err
	}
	if !link.Up {
		return link, j.host.SetUp(link)
	}
	return link, nil
}

// findBridge returns the bridge and the orphans of a deleted one. made is true if the bridge was missing and findBridge created it.
func (j *job) findBridge() (link kernel.Link, made bool, orphans []orphan, err error) {
	name := j.cfg.Bridge
	link, ok, err := j.host.Link(name)
	if err == nil && (!ok || !link.Up) {
		orphans, err = j.findOrphans()
	}
	if err != nil || ok {
		return link, false, orphans, err
	}
	vlans := j.cfg.VLANs.used() || slices.ContainsFunc(orphans, func(o orphan) bool { return o.VLANs.used() })
	// A Service with a backend on the client's own bridge works only if iptables rules see the backend's bridged answer. Otherwise the
	// client gets it directly, although it expects the Service's address.
	filtered := j.cfg.Gateway && j.cfg.gatewayName() == name
	if err = j.host.AddBridge(name, previousMAC(orphans), j.cfg.MTU, filtered, vlans); err != nil && !isExist(err) {
		return link, false, nil, err
	}
	made = err == nil
	link, ok, err = j.host.Link(name)
	return link, made, orphans, errIfDeleted(name, ok, err)
}

// errIfDeleted returns an error if a bridge that existed shortly before is missing.
func errIfDeleted(name string, ok bool, err error) error {
	if err == nil && !ok {
		err = plugin.Errorf(plugin.CodeDevice, "another program deleted bridge %s; the next ADD creates it", name)
	}
	return err
}

// hardenedSysctls returns sysctls that keep an interface from learning addresses and routes from pods (CVE-2020-10749). They must be set
// before the link is up. Unless enabledad is set, they also switch off duplicate address detection, which would delay the link-local
// address by one to two seconds.
func hardenedSysctls(name string, dad bool) []kernel.Sysctl {
	conf := "ipv6/conf/" + name + "/"
	acceptDAD := "0"
	settings := []kernel.Sysctl{{Path: conf + "accept_ra", Value: "0"}}
	if dad {
		acceptDAD = "1"
		settings = append(settings, kernel.Sysctl{Path: conf + "enhanced_dad", Value: "1"})
	}
	return append(settings, kernel.Sysctl{Path: conf + "accept_dad", Value: acceptDAD})
}

// randomMAC returns a locally administered unicast MAC address.
func randomMAC() net.HardwareAddr {
	mac := make(net.HardwareAddr, 6)
	_, _ = rand.Read(mac)
	mac[0] = mac[0]&^1 | 2
	return mac
}

// setMAC sets the pod's MAC to the one that AddressMAC computes from its first address, unless the configuration has a MAC. Neighbours'
// cached entries then stay valid when a new pod gets the address. With an external IPAM plugin the MAC stays, because the plugin may have
// sent it to a DHCP server.
func (j *job) setMAC(w *wiring, l layer3) error {
	if j.cfg.MAC != nil || !j.shared || len(l.Addresses) == 0 {
		return nil
	}
	w.pod.MAC = j.att.AddressMAC(l.Addresses[0].Addr())
	return j.pod.SetMAC(w.pod, w.pod.MAC)
}

// configure sets both ends of the veth pair up, and adds the addresses and routes. The pod's end comes first, so that the bridge port
// forwards frames as soon as the host side is up.
func (j *job) configure(w wiring, l layer3) error {
	// A bridge port needs no IPv6 address. With IPv6, the kernel would add three routes for each host side, and it walks all routes at
	// every link change.
	if err := j.host.Set(kernel.Sysctl{Path: "ipv6/conf/" + w.host.Name + "/disable_ipv6", Value: "1"}); err != nil {
		return err
	}
	if err := j.pod.Set(j.podSettings(w.pod, l)...); err != nil {
		return err
	}
	if err := j.pod.SetARPNotify(w.pod); err != nil {
		return err
	}
	for _, a := range l.Addresses {
		if err := j.pod.AddAddress(w.pod, a, j.cfg.DAD); err != nil {
			return err
		}
		if err := j.host.ForgetNeighbour(w.gateway, a.Addr(), w.pod.MAC); err != nil {
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
		if err := j.setUpGateway(w, l); err != nil {
			return err
		}
	}
	for _, route := range l.Routes {
		if err := j.pod.AddRoute(w.pod, route); err != nil {
			return err
		}
	}
	if j.cfg.LeaveDown {
		return nil
	}
	if err := j.awaitCarrier(w); err != nil {
		return err
	}
	return j.awaitAddresses(j.pod, w.pod, l.Addresses...)
}

// carrierTimeout limits the wait for the carrier, whose state the kernel updates only once a second if many links change
// (net/core/link_watch.c). A timeout is not an error: the carrier comes later, or an admin has set a link down.
const carrierTimeout = 3 * time.Second

// awaitCarrier waits until frames can pass between the pod, the bridge port and the gateway link.
func (j *job) awaitCarrier(w wiring) error {
	until := time.Now().Add(carrierTimeout)
	if err := j.pod.AwaitCarrier(w.pod, until); err != nil {
		return err
	}
	if err := j.host.AwaitCarrier(w.host, until); err != nil || w.gateway.Runs {
		return err
	}
	return j.host.AwaitCarrier(w.gateway, until) // this is its first port
}

// awaitAddresses waits until the kernel answers requests for the new addresses of a link. It only logs a timeout, because an error would
// make the runtime repeat the ADD, which is more work for a node that is still adding thousands of addresses.
func (j *job) awaitAddresses(in *kernel.NS, link kernel.Link, addresses ...netip.Prefix) error {
	if j.cfg.DAD {
		if err := in.WaitForDAD(link, addressTimeout); err != nil {
			return err
		}
	}
	until := time.Now().Add(addressTimeout)
	for _, a := range addresses {
		if err := in.AwaitAddress(a.Addr(), until); err != nil {
			j.r.Log.Warn("a new address cannot be reached yet; no action is needed", "interface", link.Name, "error", err)
		}
	}
	return nil
}

// podSettings returns the sysctls for the pod's interface. Without an IPv6 address or route they switch IPv6 off, because the link-local
// address would bypass policies for the pod's IPv4 address (CVE-2024-32473), and the kernel would announce it and the MAC to every bridge
// port. The other IPv6 sysctls take effect if the pod enables IPv6 later.
func (j *job) podSettings(pod kernel.Link, l layer3) []kernel.Sysctl {
	conf := "ipv6/conf/" + j.r.IfName + "/"
	settings := append(hardenedSysctls(j.r.IfName, j.cfg.DAD), kernel.Sysctl{Path: conf + "accept_redirects", Value: "0"})
	if j.cfg.AntiSpoof { // the guard allows the link-local address of the MAC
		settings = append(settings, kernel.Sysctl{Path: conf + "addr_gen_mode", Value: "0"})
	}
	switch {
	case l.Has6():
		settings = append(settings,
			kernel.Sysctl{Path: "ipv6/conf/lo/disable_ipv6", Value: "0"},
			kernel.Sysctl{Path: conf + "disable_ipv6", Value: "0"},
			kernel.Sysctl{Path: conf + "keep_addr_on_down", Value: "1"})
	case !l.routes6():
		settings = append(settings, kernel.Sysctl{Path: conf + "disable_ipv6", Value: "1"})
	}
	return pod.Lacks(settings...)
}

func (j *job) configurePort(w wiring) error {
	if err := setPort(j.host, w.bridge, w.host, j.cfg.VLANs, kernel.BridgePort{Hairpin: j.cfg.Hairpin, Isolated: j.cfg.Isolated}); err != nil {
		return err
	}
	return j.host.SetUpLeader(w.host, j.alias())
}

// setPort sets the VLANs and flags of a pod's port while it is down.
func setPort(host *kernel.Node, bridge, port kernel.Link, vlans VLANs, flags kernel.BridgePort) error {
	if vlans.used() {
		if err := setVLANs(host, bridge, port, vlans); err != nil {
			return err
		}
	}
	return host.SetPort(port, flags)
}

// maxAlias is the maximum length of a link alias, which is IFALIASZ without the terminating zero (include/uapi/linux/if.h).
const maxAlias = 255

// alias returns the link alias of the host side, which 'ip link' prints: the pod's name or, if it is unknown, the container ID, and the
// interface name unless it is eth0.
func (j *job) alias() string {
	name := j.r.Pod.String()
	if name == "" {
		name = j.r.ContainerID
	}
	if j.r.IfName != "eth0" {
		name += " " + j.r.IfName
	}
	return plugin.Plain(name, maxAlias)
}
