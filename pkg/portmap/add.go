// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"errors"
	"log/slog"
	"net/netip"
	"slices"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/ports"
)

func add(r *plugin.Request) (result *types100.Result, err error) {
	cfg, err := Parse(r)
	if err != nil {
		return nil, err
	}
	restoreFlushedProtection(r, len(cfg.Ports) > 0)
	if len(cfg.Ports) == 0 {
		attachment.LogOnce(r, unloggedFindings(r.Config))
		return nil, nil
	}
	pod := podAddresses(r.Prev, r.IfName)
	st, err := cfg.wantedState(r, pod)
	if err != nil || len(st.Ports) == 0 {
		return nil, err
	}
	att, err := attachment.Open(r)
	if err != nil {
		return nil, err
	}
	defer att.Close()
	host, err := attachment.Host(r)
	if err != nil {
		return nil, err
	}
	old, err := removePrevious(r, host, att)
	if err != nil {
		return nil, err
	}
	if err := checkHostIPs(r, host, st.Ports); err != nil {
		return nil, err
	}
	if err := cfg.locatePod(r, host, &st, pod); err != nil {
		return nil, err
	}
	var undo plugin.Undo
	defer undo.OnError(&err)
	undo.Push(func() error { return removePorts(host, att, st) })
	st.Unfinished = true
	if err := att.Save(st); err != nil {
		return nil, err
	}
	former, err := programNode(r, cfg, att, host, &st)
	if err != nil {
		return nil, err
	}
	endFlows(host, slices.Concat(old, st.Ports, former))
	return nil, nil
}

// wantedState returns the state that the configuration asks for, which is empty without ports. It fails, before ADD changes anything, if
// the configuration cannot work on any node.
func (c *Config) wantedState(r *plugin.Request, pod []netip.Prefix) (st portState, err error) {
	if len(pod) == 0 {
		return portState{}, plugin.WithHint(plugin.Errorf(plugin.CodeConfig, "prevResult gives %s no address", r.IfName),
			"name portmap after the main plugin")
	}
	if err := c.chooseBackend(); err != nil {
		return portState{}, err
	}
	st = portState{Backend: c.Backend, Ports: c.hostPorts(pod)}
	if len(st.Ports) == 0 {
		r.Log.Warn("the pod has no address of the hostIPs' family; no port is forwarded")
		return st, nil
	}
	if err := c.checkCount(st.Ports); err != nil {
		return portState{}, err
	}
	if err := c.checkTools(pod); err != nil {
		return portState{}, err
	}
	return st, c.checkListeners(r, st.Ports)
}

// removePrevious removes the state of an earlier ADD of the same attachment, with or without a record, and returns the recorded ports.
func removePrevious(r *plugin.Request, host *kernel.Node, att *attachment.Attachment) ([]ports.Port, error) {
	var old portState
	ok, err := att.Load(&old)
	if err == nil && ok {
		err = endForwarding(host, att.Key, old, att)
	}
	if err != nil {
		return nil, err
	}
	lost, err := endUnrecorded(host, att.Hash())
	if err == nil && lost {
		err = delReference(r, true)
	}
	return old.Ports, err
}

// locatePod sets the node's link through which packets reach the pod, and the pod's bridge.
func (c Config) locatePod(r *plugin.Request, host *kernel.Node, st *portState, pod []netip.Prefix) error {
	if c.Backend == "iptables" {
		st.Rules = c.forPod(pod)
	}
	link, ok, err := linkTo(host, pod)
	if err != nil {
		return err
	}
	if !ok {
		r.Log.Warn("the node has no route to the pod; its hostPorts work once there is one, but not from 127.0.0.1", "addresses", pod)
		return nil
	}
	if link.Kind == "bridge" {
		st.Bridge = link.Name
	}
	if slices.ContainsFunc(st.Ports, func(p ports.Port) bool {
		return p.SNAT && p.To.Addr().Is4() && (!p.HostIP.IsValid() || p.HostIP.IsLoopback())
	}) {
		// A flush removes the protection of 127.0.0.1 but leaves route_localnet on, so every machine beyond the uplink could reach it.
		if link.Kind != "bridge" && host.IsUplink(link) {
			slog.Info("127.0.0.1 of the node does not reach the hostPorts of a pod behind its uplink", "link", link.Name)
		} else {
			st.Localhost = link.Name
		}
	}
	return nil
}

// chooseBackend falls back to iptables if the kernel has no nftables, unless the configuration requires nftables.
func (c *Config) chooseBackend() error {
	if c.Backend != "nftables" || nft.Available() {
		return nil
	}
	if c.Unset {
		c.Backend = "iptables"
		return nil
	}
	return plugin.WithHint(plugin.Errorf(plugin.CodeKernelFeature, "backend nftables: the kernel has no nf_tables"),
		"load the module nf_tables, or use backend iptables")
}

// checkTools fails, before ADD changes anything, if a program is missing that the iptables backend needs.
func (c Config) checkTools(pod []netip.Prefix) error {
	for _, p := range pod {
		if c.Backend == "iptables" && !iptables.Installed(p.Addr().Is4()) {
			return plugin.WithHint(
				plugin.Errorf(plugin.CodeKernelFeature, "backend iptables: iptables-restore or ip6tables-restore is not installed"),
				"install iptables, or use backend nftables, which needs no program")
		}
	}
	return nil
}

// programNode makes all changes on the node and returns the ports that this ADD took from other pods. The rules that drop packets from the
// pods to 127.0.0.0/8 come before route_localnet.
func programNode(
	r *plugin.Request, cfg Config, att *attachment.Attachment, host *kernel.Node, st *portState,
) (former []ports.Port, err error) {
	unlock, err := attachment.Waiting.Node(portsLock)
	if err != nil {
		return nil, err
	}
	defer unlock()
	if err := openLoopback(host, att.Key, st); err != nil {
		return nil, err
	}
	p, err := takePorts(r, cfg, att, host, st)
	if err != nil && (st.Backend != "iptables" || !nft.Unsupported(err)) {
		return nil, err
	}
	var errs []error
	for _, rec := range p.displacedAttachments() {
		former = append(former, rec.Ports...)
		if rec.Backend == "iptables" { // these rules precede all others
			errs = append(errs, iptables.RemoveChain(dnatChain, podChain(rec.Key)))
		}
	}
	err = errors.Join(errs...)
	if err == nil && st.Backend == "iptables" {
		err = addByIPTables(att.Key, *st, r.Log)
	}
	if err != nil {
		return nil, err
	}
	// From here on, a process that restores the ports of all pods restores this pod's too.
	st.Unfinished = false
	return former, att.Save(*st)
}

// takePorts takes all ports or none. Callers hold portsLock.
func takePorts(r *plugin.Request, cfg Config, att *attachment.Attachment, host *kernel.Node, st *portState) (claimPlan, error) {
	if err := ensureRules(host, r.Log); err != nil {
		return claimPlan{}, err
	}
	want := portClaim{st.hostPorts(ownerComment(att.Key, r.Pod.String())), r.ContainerID, r.Pod.String()}
	want.Netns = st.netnsPath(r.NetnsPath)
	p, err := planFor(host, want)
	if err == nil && p.singles {
		p, err = takeSinglePorts(cfg, att, host, st, &want)
	}
	if err == nil {
		err = applyPlan(host, want, p)
	}
	if err == nil {
		p.logTakeovers(want, r.Log)
	}
	return p, err
}

// takeSinglePorts splits ranges into single ports and plans again, because another attachment of the container has a part of a range.
func takeSinglePorts(cfg Config, att *attachment.Attachment, host *kernel.Node, st *portState, want *portClaim) (claimPlan, error) {
	want.Ports = ports.Singles(st.Ports)
	if err := cfg.checkCount(want.Ports); err != nil {
		return claimPlan{}, err
	}
	st.Ports = want.Ports
	if err := att.Save(*st); err != nil {
		return claimPlan{}, err
	}
	return planFor(host, *want)
}

// ensureRules restores the rules and ports of all pods after a flush.
func ensureRules(host *kernel.Node, log *slog.Logger) error {
	if ok, err := rulesIntact(host); err != nil || ok {
		return err
	}
	all, lost := allRecorded()
	if lost == nil {
		lost = restorePorts(host, all, log, attachment.Waiting)
	}
	ok, err := rulesIntact(host)
	switch {
	case err != nil:
		return err
	case !ok && lost == nil:
		return errors.New("the rules of hostPorts are missing")
	case !ok:
		return lost
	case lost != nil:
		log.Warn(notRestored, "error", lost)
	}
	return nil
}

const notRestored = "hostPorts of other pods could not be restored"

// openLoopback lets the node's 127.0.0.1 reach the pod if a port needs it.
func openLoopback(host *kernel.Node, key attachment.Key, st *portState) error {
	if st.Localhost == "" {
		return nil
	}
	err := OpenLoopback(host, key.Hash(), st.Localhost)
	if nft.Unsupported(err) {
		slog.Warn("hostPorts cannot be reached through 127.0.0.1: its protection needs nftables", "error", err)
		st.Localhost = ""
		return nil
	}
	return err
}

// linkTo returns the node's link through which packets reach the pod. ok is false without a route to any of its addresses.
func linkTo(host *kernel.Node, pod []netip.Prefix) (link kernel.Link, ok bool, err error) {
	for _, p := range pod {
		index, err := host.RouteTo(p.Addr())
		if kernel.NoRoute(err) {
			continue
		}
		if err != nil {
			return kernel.Link{}, false, err
		}
		link, ok, err = host.LinkByIndex(index)
		if err == nil && !ok {
			err = plugin.Errorf(plugin.CodeDevice, "the interface that leads to %s is gone: recreate the pod", p.Addr())
		}
		return link, ok, err
	}
	return kernel.Link{}, false, nil
}
