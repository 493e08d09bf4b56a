// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"cmp"
	"errors"
	"log/slog"
	"net/netip"
	"time"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// compareForwarding returns plugin.Differs if the node does not forward packets from a gateway link. byAdmin is true if forwarding is off
// for this link alone, which an admin may want.
func compareForwarding(host *kernel.Node, gateway kernel.Link, is4 bool) (byAdmin bool, err error) {
	if is4 && gateway.Forwards4 || !is4 && gateway.Forwards6 {
		return false, nil
	}
	on, err := host.Forwards(is4)
	switch {
	case kernel.IsNoFamily(err) || err == nil && on && !is4:
		return false, nil
	case err != nil:
		return false, err
	case is4 && on:
		return true, plugin.Differs("%s does not forward IPv4 (net.ipv4.conf.%s.forwarding=0)", gateway.Name, gateway.Name)
	case is4:
		return false, plugin.Differs("the node does not forward IPv4 (net.ipv4.ip_forward=0)")
	}
	return false, plugin.Differs("the node does not forward IPv6 (net.ipv6.conf.all.forwarding=0)")
}

// enableForwarding enables forwarding from a gateway link. It sets the link's own setting only for the first pod, because an admin may
// exclude single links later.
func enableForwarding(host *kernel.Node, gateway kernel.Link, is4, first bool) error {
	changed, err := host.EnableForwarding(is4)
	if err != nil {
		return err
	}
	var settings []kernel.Sysctl
	if is4 && !changed && first && !gateway.Forwards4 {
		settings = append(settings, kernel.Sysctl{Path: "ipv4/conf/" + gateway.Name + "/forwarding", Value: "1"})
	}
	if !is4 {
		settings = append(settings, gateway.Lacks(kernel.Sysctl{Path: "ipv6/conf/" + gateway.Name + "/disable_ipv6", Value: "0"})...)
	}
	return host.Set(settings...)
}

// path is how the node reaches a pod: the link with the pod's gateway address, this address, and the pod's address.
type path struct {
	link    string
	gateway netip.Prefix
	pod     netip.Addr
}

// paths returns a path for each address of the pod whose gateway is on the node.
func (st state) paths() (all []path) {
	for i := range min(len(st.Gateways), len(st.Addresses)) {
		all = append(all, path{cmp.Or(st.gatewayLink(), st.Bridge), st.Gateways[i], st.Addresses[i].Addr()})
	}
	return all
}

// connects reports whether the gateway address creates the node's route to the pod. It does not if the pod's address is outside the
// gateway's subnet, or if the bridge is in a VRF and so has no route in the main table.
func (p path) connects(link kernel.Link) bool {
	return link.Master == 0 && p.gateway.Masked().Contains(p.pod)
}

// compareRoute returns plugin.Differs unless the node sends packets for the pod through the link. overlap is true if another link's subnet
// contains the pod's address; ADD has already warned of that.
func (p path) compareRoute(host *kernel.Node, link kernel.Link) (overlap bool, err error) {
	if !p.connects(link) {
		return false, nil
	}
	m, err := host.MatchRoute(p.pod)
	switch {
	case kernel.NoRoute(err):
		return false, plugin.WithHint(plugin.Differs("the node has no route to %s, or one that refuses packets", p.pod),
			"'podlace reload', STATUS and GC bring back the route to %s, but leave other routes alone", p.gateway.Masked())
	case err != nil || m.Through(link):
		return false, err
	}
	other, _, err := host.LinkByIndex(m.FirstLink())
	if err != nil {
		return false, err
	}
	overlap = m.Connected && m.OnLink && !m.Local && m.Dst.Bits() >= p.gateway.Bits()
	name := cmp.Or(other.Name, "another link")
	return overlap, plugin.Differs("the node sends packets for %s through %s, not through %s", p.pod, name, link.Name)
}

// missingPart is a lost part of a path, such as a route, with the function that restores it.
type missingPart struct {
	what string
	do   func() error
}

// missingParts returns the parts of a path that are missing: forwarding, the bridge's own MAC, gateway address and subnet route. It ignores
// a gateway address that the network did not add or that another link has, and a subnet route if an admin added another one for the pod or
// the subnet. A link that is down misses nothing. In a VRF neither address nor route is checked, because the main table has no route for
// the link.
func (p path) missingParts(host *kernel.Node, network string) (all []missingPart, err error) {
	link, ok, err := host.Link(p.link)
	if err != nil || !ok || !link.Up {
		return nil, err
	}
	if _, noted := attachment.ReadNote(network, gatewayNote(link, p.gateway)); !noted {
		return nil, nil
	}
	is4 := p.gateway.Addr().Is4()
	if byAdmin, err := compareForwarding(host, link, is4); plugin.IsDifferent(err) && !byAdmin {
		forwarding := map[bool]string{true: "net.ipv4.ip_forward=1", false: "net.ipv6.conf.all.forwarding=1"}[is4]
		all = append(all, missingPart{forwarding, func() error { return enableForwarding(host, link, is4, false) }})
	} else if err != nil && !byAdmin {
		return nil, err
	}
	if lost, err := lacksOwnEntry(host, link); err != nil {
		return nil, err
	} else if lost {
		all = append(all, missingPart{"MAC of " + link.Name + " in its forwarding database", func() error { return host.AddOwnEntry(link) }})
	}
	if link.Master != 0 {
		return all, nil
	}
	own, err := host.MatchRoute(p.gateway.Addr())
	switch {
	case err != nil && !kernel.NoRoute(err):
		return nil, err
	case err != nil || !own.Local:
		restore := func() error { return restoreGateway(host, link, p.gateway, false) }
		return append(all, missingPart{"gateway address " + p.gateway.String(), restore}), nil
	case !own.Through(link) || !p.connects(link):
		return all, nil
	}
	m, err := host.MatchRoute(p.pod)
	if errors.Is(err, unix.ENETUNREACH) || err == nil && !m.Through(link) && m.Dst.Bits() < p.gateway.Bits() {
		all = append(all, missingPart{"route to " + p.gateway.Masked().String(), func() error { return host.AddConnected(link, p.gateway) }})
	}
	return all, nil
}

// restoreTimeout limits the wait until a restored IPv6 address is usable, which normally takes less than a millisecond. Without the wait,
// the next STATUS could restore it a second time.
const restoreTimeout = 200 * time.Millisecond

func restoreGateway(host *kernel.Node, link kernel.Link, gw netip.Prefix, dad bool) error {
	if gw.Addr().Is6() {
		if err := host.Set(link.Lacks(kernel.Sysctl{Path: "ipv6/conf/" + link.Name + "/disable_ipv6", Value: "0"})...); err != nil {
			return err
		}
	}
	if err := host.AddAddress(link, gw, dad); err != nil && !isExist(err) {
		return err
	}
	_ = host.AwaitAddress(gw.Addr(), time.Now().Add(restoreTimeout))
	return nil
}

// restorePaths restores forwarding, the gateway addresses and their subnet routes, once for each subnet of a network.
func restorePaths(host *kernel.Node, log *slog.Logger, network string, pods []attachment.Of[state]) error {
	var errs []error
	seen := map[path]bool{}
	for _, pod := range pods {
		for _, p := range pod.State.paths() {
			if of := (path{link: p.link, gateway: p.gateway}); seen[of] {
				continue
			} else {
				seen[of] = true
			}
			lost, err := p.missingParts(host, network)
			errs = append(errs, err)
			for _, part := range lost {
				log.Info("forwarding, an address or a route from the node to its pods is missing and is restored from the records", "part", part.what,
					"interface", p.link, "gateway", p.gateway)
				errs = append(errs, part.do())
			}
		}
	}
	return errors.Join(errs...)
}

// restorePorts attaches host sides without a bridge to the recorded one. It also restores the port flags that ADD set, and group_fwd_mask
// of guarded ports. It leaves ports of another bridge, and the port state, because an admin may disable a port on purpose.
func restorePorts(host *kernel.Node, log *slog.Logger, pods []attachment.Of[state]) error {
	var errs []error
	for _, pod := range pods {
		port, ok, err := recordedPort(host, pod)
		errs = append(errs, err)
		if !ok {
			continue
		}
		if port.Master == 0 {
			errs = append(errs, restoreDetached(host, log, port, pod.State))
			continue
		}
		want := pod.State.flags()
		if pod.State.Guard.checksSources() && !port.Reserved {
			log.Info("group_fwd_mask of a guarded port is missing and is restored", "port", port.Name)
			errs = append(errs, host.SetReserved(port))
		}
		if port.Port == want {
			continue
		}
		log.Info("flags of a pod's port differ and are restored from the records", "port", port.Name, "has", port.Port.Unlike(want))
		errs = append(errs, host.SetPort(port, want))
	}
	return errors.Join(errs...)
}

func (st state) flags() kernel.BridgePort {
	return kernel.BridgePort{Hairpin: st.Hairpin, Isolated: st.Isolated}
}
