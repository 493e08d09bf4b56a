// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"bytes"
	"cmp"
	"slices"

	"github.com/containernetworking/cni/pkg/types"
	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// check compares the state of the node and the pod with prevResult and the configuration.
func (b bridge) check(r *plugin.Request) error {
	j, err := b.open(r)
	if err != nil {
		return err
	}
	defer j.close()
	if j.recordedState, j.hasRecord, err = attachment.Checked[state](r); err != nil {
		return err
	}
	if j.cfg.Masquerade.UseCluster {
		j.cfg.Masquerade = j.cfg.Masquerade.withClusterCIDRs(j.recordedState.clusterCIDRs(r.Network))
	}
	if j.cfg.IPAM != "" {
		if err := b.ipam.Check(r, j.cfg.IPAM); err != nil {
			return err
		}
	}
	w, err := j.observe()
	if err != nil {
		return err
	}
	if err := j.checkLinks(w); err != nil {
		return err
	}
	if err := j.checkFilters(w.host); err != nil {
		return err
	}
	l, err := planLayer3(j.cfg, j.ownResult(r.Prev))
	if err != nil {
		return err
	}
	j.useRecordedRoutes(&l)
	if err := j.checkLayer3(w, l); err != nil {
		return err
	}
	if err := j.checkGuard(w.host, j.cfg.guardOf(w.host, w.pod, l, "")); err != nil {
		return err
	}
	byUs, err := j.checkMasquerade(l)
	if err != nil {
		return err
	}
	if err := j.checkRecord(w, byUs); err != nil {
		return err
	}
	return j.checkTolerated(w, l)
}

// ownResult returns this attachment's part of prevResult: its addresses, and all routes.
func (j *job) ownResult(prev *types100.Result) *types100.Result {
	own := &types100.Result{Routes: prev.Routes}
	for _, ip := range prev.IPs {
		if at := ip.Interface; at == nil || *at < 0 || *at >= len(prev.Interfaces) || prev.Interfaces[*at].Name == j.r.IfName {
			own.IPs = append(own.IPs, ip)
		}
	}
	return own
}

// useRecordedRoutes replaces the routes of prevResult by those that ADD recorded, because other plugins may have added some, and an old CNI
// version omits attributes. It leaves out a recorded route that a later plugin removed from prevResult.
func (j *job) useRecordedRoutes(l *layer3) {
	if !j.hasRecord {
		return
	}
	l.Routes = slices.DeleteFunc(j.recordedState.Routes, func(route kernel.Route) bool {
		return !slices.ContainsFunc(j.r.Prev.Routes, func(r *types.Route) bool {
			dst, ok := kernel.Prefix(&r.Dst)
			return ok && dst == route.Dst
		})
	})
}

// observe looks up the bridge and both ends of the veth pair. The host side is what the kernel reports as the peer of the pod's interface.
func (j *job) observe() (w wiring, err error) {
	var ok bool
	if w.bridge, ok, err = j.host.Link(j.cfg.Bridge); err != nil {
		return w, err
	} else if !ok || w.bridge.Kind != "bridge" {
		return w, plugin.Differs("bridge %s is missing", j.cfg.Bridge)
	}
	if w.pod, ok, err = j.pod.Link(j.r.IfName); err != nil {
		return w, err
	} else if !ok || w.pod.Kind != "veth" {
		return w, plugin.Differs("%s is missing in the pod, or is no veth", j.r.IfName)
	}
	if w.host, ok, err = j.host.PeerOf(w.pod, j.r.Netns); err != nil {
		return w, err
	} else if !ok {
		return w, plugin.Differs("the host side of %s is missing", j.r.IfName)
	}
	w.gateway, err = j.observeGatewayLink(w.bridge)
	return w, err
}

func (j *job) checkLinks(w wiring) error {
	switch {
	case w.host.Master != w.bridge.Index:
		return plugin.Differs("%s is not a port of %s", w.host.Name, w.bridge.Name)
	case !w.bridge.Up:
		return plugin.Differs("bridge %s is down", w.bridge.Name)
	case !w.host.Up:
		return plugin.Differs("%s, the host side of %s, is down", w.host.Name, j.r.IfName)
	case !w.pod.Up && !j.cfg.LeaveDown:
		return plugin.Differs("%s is down in the pod", j.r.IfName)
	case j.cfg.Promisc && !w.bridge.Promis:
		return plugin.Differs("bridge %s is not promiscuous", w.bridge.Name)
	case j.cfg.MTU != 0 && w.host.MTU != j.cfg.MTU:
		return plugin.Differs("%s has mtu %d, want %d", w.host.Name, w.host.MTU, j.cfg.MTU)
	case w.pod.MTU > w.host.MTU:
		return plugin.Differs("%s has mtu %d in the pod, more than the %d of its host side", j.r.IfName, w.pod.MTU, w.host.MTU)
	}
	if err := j.checkPort(w); err != nil {
		return err
	}
	if err := j.checkVLANs(w); err != nil {
		return err
	}
	return j.checkPrevLinks(w)
}

// checkPort compares the pod's bridge port with the settings that ADD applied. It checks the state only of a port with a carrier, because
// the kernel disables one without, and never under the spanning tree protocol, which changes the state.
func (j *job) checkPort(w wiring) error {
	want := kernel.BridgePort{Hairpin: j.cfg.Hairpin, Isolated: j.cfg.Isolated}
	if j.hasRecord && want != j.recordedState.flags() {
		j.r.Log.Warn("the pod's port has the flags of its ADD, but the configuration has changed; recreate the pod to apply it",
			"port", w.host.Name, "has", j.recordedState.flags().Unlike(want))
		want = j.recordedState.flags()
	}
	if differing := w.host.Port.Unlike(want); differing != "" {
		return plugin.Differs("port %s has %s, want %s", w.host.Name, differing, want.Unlike(w.host.Port))
	}
	if state := w.host.PortState; state != kernel.PortForwarding && w.host.Runs && !w.bridge.STP {
		return plugin.Differs("port %s of %s is %s", w.host.Name, w.bridge.Name, state)
	}
	return nil
}

// checkPrevLinks compares the names, MACs and MTUs of the pod's links with prevResult.
func (j *job) checkPrevLinks(w wiring) error {
	if err := j.checkHostName(w); err != nil {
		return err
	}
	for _, i := range j.r.Prev.Interfaces {
		for _, link := range []kernel.Link{w.host, w.pod} {
			inPod := link.Name == w.pod.Name
			switch {
			case i.Name != link.Name || (i.Sandbox != "") != inPod:
			case i.Mac != "" && i.Mac != link.MAC.String():
				return plugin.Differs("%s has MAC %s, want %s", link.Name, link.MAC, i.Mac)
			case !inPod && i.Mtu != 0 && i.Mtu != link.MTU:
				return plugin.Differs("%s has mtu %d, want %d", link.Name, link.MTU, i.Mtu)
			}
		}
	}
	return nil
}

// checkHostName returns an error if the host-side veth was renamed, because the rules of antiSpoof and macspoofchk match its name. It
// recognizes the veth by its MAC in prevResult.
func (j *job) checkHostName(w wiring) error {
	named := w.host.Name
	for _, i := range j.r.Prev.Interfaces {
		switch {
		case i.Sandbox != "" || i.Name == w.bridge.Name || i.Name == w.gateway.Name:
		case i.Name == w.host.Name:
			return nil
		case i.Mac == w.host.MAC.String():
			named = i.Name
		}
	}
	if named == w.host.Name {
		return nil
	}
	return plugin.Differs("the host side of %s is %s, want %s", j.r.IfName, w.host.Name, named)
}

func (j *job) checkLayer3(w wiring, l layer3) error {
	has, err := j.pod.Addresses(w.pod)
	if err != nil {
		return err
	}
	for _, a := range l.Addresses {
		if !slices.Contains(has, a) {
			return plugin.Differs("address %s is missing on %s", a, j.r.IfName)
		}
	}
	for _, route := range l.Routes {
		if ok, err := j.pod.HasRoute(w.pod, route); err != nil {
			return err
		} else if !ok {
			return plugin.Differs("route to %s through %s is missing", route.Dst, j.r.IfName)
		}
	}
	if has, err = j.host.Addresses(w.gateway); err != nil {
		return err
	}
	for _, gw := range l.gateways {
		if !slices.Contains(has, gw) {
			return plugin.WithHint(plugin.Differs("gateway address %s is missing on %s", gw, w.gateway.Name), reloadHint)
		}
	}
	if err := j.checkPaths(w, l); err != nil {
		return err
	}
	if err := j.checkSwitching(w, l); err != nil {
		return err
	}
	return j.checkGatewayMAC(w, l)
}

// reloadHint says how to restore what all pods of a network share.
const reloadHint = "'podlace reload', STATUS and GC bring it back"

// checkPaths returns an error if the node does not forward the pod's packets, or does not route packets for its addresses to its bridge.
func (j *job) checkPaths(w wiring, l layer3) error {
	families := map[bool]bool{}
	for i, gw := range l.gateways {
		if is4 := gw.Addr().Is4(); !families[is4] {
			families[is4] = true
			byAdmin, err := compareForwarding(j.host, w.gateway, is4)
			if byAdmin {
				err = j.tolerate(err)
			}
			if err != nil {
				return plugin.WithHint(err, reloadHint)
			}
		}
		overlap, err := path{gateway: gw, pod: l.Addresses[i].Addr()}.compareRoute(j.host, w.gateway)
		if overlap {
			err = j.tolerate(err)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// checkGatewayMAC compares the gateway's MAC with the pod's neighbour entry. If that is missing or stale, the pod's kernel learns the new
// MAC.
func (j *job) checkGatewayMAC(w wiring, l layer3) error {
	now, atADD := w.gateway.MAC.String(), ""
	for _, i := range j.r.Prev.Interfaces {
		if i.Sandbox == "" && i.Name == w.gateway.Name {
			atADD = i.Mac
		}
	}
	if atADD == now {
		return nil
	}
	for _, gw := range l.gateways {
		mac, err := j.pod.Neighbour(w.pod, gw.Addr())
		if err != nil {
			return err
		}
		if mac != nil && !bytes.Equal(mac, w.gateway.MAC) {
			// The hint must not contain the MAC of the neighbour entry: a tenant can write it, and an admin might set it on the bridge.
			return plugin.WithHint(
				plugin.Differs("%s has MAC %s, but the pod sends packets for gateway %s to %s", w.gateway.Name, now, gw.Addr(), mac),
				"at ADD it had MAC %s; the pod asks for the new one within a minute, unless its entry is permanent", cmp.Or(atADD, "unknown"))
		}
	}
	return nil
}

// checkMasquerade returns an error if the rules that masquerade the pod's packets are missing. Without a record, Podlace cannot restore
// them, so it only logs the loss. byUs is true if Podlace's nftables rules masquerade the packets.
func (j *job) checkMasquerade(l layer3) (byUs bool, err error) {
	byUs, err = j.compareMasquerade(l)
	err = withHint(err)
	if !j.hasRecord {
		err = j.tolerate(err)
	}
	return byUs, err
}

func (j *job) compareMasquerade(l layer3) (byUs bool, err error) {
	m := j.cfg.Masquerade
	if m.Backend != "" {
		if ok, err := j.masqueradedByReference(m.ofMasqueradedFamilies(l.Addresses)); ok || err != nil {
			return false, err
		}
	}
	switch m.Backend {
	case "nftables":
		err := compareMasquerade(j.host, nftMasquerade(j.att.Network, m, l.Addresses, j.shared))
		if plugin.IsDifferent(err) && lacksInvalid(j.host, j.att.Network) {
			j.tolerateInvalid(err)
			err = nil
		}
		return err == nil, err
	case "iptables":
		for _, is4 := range []bool{true, false} {
			if err := j.checkIPTables(is4, m.ofMasqueradedFamilies(l.Addresses)); err != nil {
				return false, err
			}
		}
	}
	return false, nil
}

// checkRecord returns an error if Podlace attached the pod but the record is lost. Pods of the reference plugin have no record either, so
// the host-side veth must have Podlace's name, and one more thing must prove the origin: the port flag of antiSpoof and macspoofchk, which
// a flush of the rules keeps, or masquerade by Podlace's rules alone.
func (j *job) checkRecord(w wiring, masqueradedByUs bool) error {
	if j.hasRecord || w.host.Name != j.att.HostVeth() {
		return nil
	}
	if masqueradedByUs || w.host.Reserved && j.cfg.checksSources() {
		return attachment.LostRecord(j.r)
	}
	return nil
}
