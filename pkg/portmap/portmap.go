// SPDX-License-Identifier: Apache-2.0

// Package portmap forwards ports of the node to the pod: the hostPort of Kubernetes, which runtimes pass as the portMappings
// capability. It is chained after any plugin that gives the pod an address.
package portmap

import (
	"log/slog"
	"net/netip"
	"slices"
	"strings"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// state is what the record of an attachment holds; attachments without ports have no record.
type state struct {
	Backend string            `json:"backend"`
	Ports   []kernel.HostPort `json:"ports"`
}

// Plugin returns the portmap plugin.
func Plugin() plugin.Plugin {
	return plugin.Plugin{Name: "portmap", MinVersion: "0.3.0", Chained: true, Add: add, Del: del, Check: check, GC: gc, Status: status}
}

// owner begins the comment of what belongs to an attachment with its hash, and ends with what an admin knows it by.
func owner(a *attachment.Attachment, pod plugin.Pod) string {
	name := pod.String()
	if name == "" {
		name = a.ContainerID
	}
	// nft(8) prints comments as they are: only what names in Kubernetes consist of gets there.
	safe := strings.Map(func(c rune) rune {
		if nameRune(c) || c == '.' || c == '/' {
			return c
		}
		return '_'
	}, name)
	return a.Hash() + " " + safe
}

func add(r *plugin.Request) (result *types100.Result, err error) {
	cfg, err := Parse(r)
	if err != nil || len(cfg.Mappings) == 0 {
		return r.Prev, err
	}
	pod := podAddresses(r.Prev, r.IfName)
	if len(pod) == 0 {
		return nil, plugin.WithHint(plugin.Errorf(plugin.CodeConfig, "prevResult gives %s no address", r.IfName), "name portmap after the main plugin")
	}
	st := state{Backend: cfg.Backend, Ports: cfg.hostPorts(pod)}
	if len(st.Ports) == 0 {
		r.Log.Warn("no hostIP is of a family that the pod has an address of; nothing is forwarded")
		return r.Prev, nil
	}
	if err := cfg.checkTools(pod); err != nil {
		return nil, err
	}
	att, err := attachment.Open(r)
	if err != nil {
		return nil, err
	}
	defer att.Close()
	host, err := kernel.Host()
	if err != nil {
		return nil, err
	}
	defer host.Close()
	var old state
	if ok, err := att.Load(&old); err != nil {
		return nil, err
	} else if ok {
		if err := remove(host, att, old); err != nil {
			return nil, err
		}
	}
	var undo plugin.Undo
	defer undo.OnError(&err)
	undo.Push(func() error { return remove(host, att, st) })
	if err := att.Save(st); err != nil {
		return nil, err
	}
	return r.Prev, forward(r, cfg, att, host, st, pod)
}

// checkTools refuses the iptables backend on a node that lacks it, before anything is changed.
func (c Config) checkTools(pod []netip.Prefix) error {
	for _, p := range pod {
		if c.Backend == "iptables" && !kernel.HasIPTables(p.Addr().Is4()) {
			return plugin.WithHint(plugin.Errorf(plugin.CodeKernelFeature, "backend iptables: iptables-restore or ip6tables-restore is not installed"),
				"install iptables, or use backend nftables, which needs no program")
		}
	}
	return nil
}

// forward programs the node.
func forward(r *plugin.Request, cfg Config, att *attachment.Attachment, host *kernel.Node, st state, pod []netip.Prefix) error {
	link, err := linkTo(host, pod[0].Addr())
	if err != nil {
		return err
	}
	if st.Backend == "iptables" {
		err = addByIPTables(host, att.Key, cfg, st.Ports, pod)
	} else {
		bridge := ""
		if link.Kind == "bridge" {
			bridge = link.Name
		}
		err = host.AddHostPorts(owner(att, r.Pod), bridge, st.Ports)
	}
	if err != nil {
		return err
	}
	if err := openLoopback(host, link, st.Ports); err != nil {
		return err
	}
	delFlows(host, st.Ports)
	return nil
}

// openLoopback lets the node reach the pod through 127.0.0.1, if a port wants that. The node's own loopback is protected from the pods
// first, which otherwise could reach all that listens there.
func openLoopback(host *kernel.Node, link kernel.Link, ports []kernel.HostPort) error {
	if !slices.ContainsFunc(ports, func(p kernel.HostPort) bool {
		return p.SNAT && p.To.Addr().Is4() && (!p.HostIP.IsValid() || p.HostIP.IsLoopback())
	}) {
		return nil
	}
	if err := host.ProtectLoopback(); err != nil {
		slog.Warn("hostPorts cannot be reached through 127.0.0.1: its protection needs nftables", "error", err)
		return nil
	}
	return host.Set(kernel.Sysctl{Path: "ipv4/conf/" + link.Name + "/route_localnet", Value: "1"})
}

// delFlows only warns: without it a client that keeps sending UDP stays with the former pod for as long as its entry lives, and no
// longer.
func delFlows(host *kernel.Node, ports []kernel.HostPort) {
	if err := host.DelFlows(ports); err != nil {
		slog.Warn("stale UDP connections could not be removed", "error", err)
	}
}

// linkTo returns the interface behind which the pod is.
func linkTo(host *kernel.Node, addr netip.Addr) (kernel.Link, error) {
	index, err := host.RouteTo(addr)
	if err != nil {
		return kernel.Link{}, err
	}
	link, ok, err := host.LinkByIndex(index)
	if err == nil && !ok {
		err = plugin.Errorf(plugin.CodeDevice, "the interface that leads to %s is gone", addr)
	}
	return link, err
}

func del(r *plugin.Request) error {
	found, err := attachment.Drop(r, removeFromNode)
	if err != nil || found {
		return err
	}
	return delReference(r)
}

func gc(r *plugin.Request) error { return attachment.Collect(r, removeFromNode) }

func removeFromNode(att *attachment.Attachment, st state) error {
	host, err := kernel.Host()
	if err != nil {
		return err
	}
	defer host.Close()
	return remove(host, att, st)
}

// remove ends the forwarding, whatever the configuration says by now. The record goes last.
func remove(host *kernel.Node, att *attachment.Attachment, st state) error {
	var err error
	if st.Backend == "iptables" {
		err = delByIPTables(host, att.Key, st.Ports)
	} else {
		err = host.DelHostPorts(att.Hash(), st.Ports)
	}
	if err != nil {
		return err
	}
	delFlows(host, st.Ports)
	return att.Remove()
}

func check(r *plugin.Request) error {
	cfg, err := Parse(r)
	if err != nil || len(cfg.Mappings) == 0 {
		return err
	}
	host, err := kernel.Host()
	if err != nil {
		return err
	}
	defer host.Close()
	pod := podAddresses(r.Prev, r.IfName)
	ports := cfg.hostPorts(pod)
	reference, err := madeByReference(r, host, ports)
	if err != nil || reference == "nftables" {
		return err
	}
	if cfg.Backend == "iptables" || reference == "iptables" {
		return checkIPTables(host, attachment.KeyOf(r), ports)
	}
	return host.CheckHostPorts(attachment.KeyOf(r).Hash(), ports)
}

// status fails only when no ADD can work: the configuration is wrong, or the backend's tools are missing.
func status(r *plugin.Request) error {
	cfg, err := Parse(r)
	if err == nil && cfg.Backend == "iptables" && !kernel.HasIPTables(true) && !kernel.HasIPTables(false) {
		return plugin.Errorf(plugin.CodeNotAvailable, "backend iptables: iptables-restore is not installed")
	}
	return err
}
