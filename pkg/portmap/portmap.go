// SPDX-License-Identifier: Apache-2.0

// Package portmap forwards ports of the node to the pod: the hostPort of Kubernetes, which runtimes pass as the portMappings
// capability. It is chained after any plugin that gives the pod an address.
package portmap

import (
	"errors"
	"log/slog"
	"net/netip"
	"slices"
	"strings"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/ports"
)

// state is what the record of an attachment holds; attachments without ports have no record.
type state struct {
	Backend   string       `json:"backend"`
	Ports     []ports.Port `json:"ports"`
	Bridge    string       `json:"bridge,omitempty"`    // behind which the pod is
	Localhost string       `json:"localhost,omitempty"` // the link through which 127.0.0.1 reaches it
	Rules     *rules       `json:"rules,omitempty"`     // of the iptables backend
	Ended     bool         `json:"ended,omitempty"`     // DEL is on its way
	Begun     bool         `json:"begun,omitempty"`     // ADD has not come to its end
}

// rules is what the iptables backend needs to write an attachment's rules again.
type rules struct {
	Pod          []netip.Prefix `json:"pod"`
	MarkBit      int            `json:"markBit"`
	MarkChain    string         `json:"markChain,omitempty"`
	ConditionsV4 []string       `json:"conditionsV4,omitempty"`
	ConditionsV6 []string       `json:"conditionsV6,omitempty"`
}

func (c Config) rules(pod []netip.Prefix) *rules {
	return &rules{pod, c.MarkBit, c.MarkChain, c.Conditions[true], c.Conditions[false]}
}

// portsLock names the lock around what the pods of all networks share.
const portsLock = "hostports"

// hostPorts is the state in the kernel's words.
func (st state) hostPorts(owner string) owned {
	return owned{Owner: owner, Bridge: st.Bridge, Taken: st.Backend == "iptables", Localhost: st.Localhost, Ports: st.Ports}
}

// netns is how nf_tables is told of the pod's namespace. Rules of iptables cannot be ended without their record, so nobody may think them dead.
func (st state) netns(path string) string {
	if st.Backend == "iptables" {
		return ""
	}
	return path
}

// Plugin returns the portmap plugin.
func Plugin() plugin.Plugin {
	return plugin.Plugin{Name: "portmap", Chained: true, ForeignArgs: true, Add: add, Del: del, Check: check, GC: gc, Status: status}
}

// owner begins the comment of what belongs to an attachment with its hash, and ends with what an admin knows it by.
func owner(key attachment.Key, pod string) string {
	if pod == "" {
		pod = key.ContainerID
	}
	// nft(8) prints comments as they are: only what names in Kubernetes consist of gets there.
	safe := strings.Map(func(c rune) rune {
		if nameRune(c) || c == '.' || c == '/' {
			return c
		}
		return '_'
	}, pod)
	return key.Hash() + " " + safe
}

func add(r *plugin.Request) (result *types100.Result, err error) {
	cfg, err := Parse(r)
	if err != nil {
		return nil, err
	}
	protect(r, len(cfg.Mappings) > 0)
	if len(cfg.Mappings) == 0 {
		attachment.LogOnce(r, traps(r.Config))
		return nil, nil
	}
	pod := podAddresses(r.Prev, r.IfName)
	if len(pod) == 0 {
		return nil, plugin.WithHint(plugin.Errorf(plugin.CodeConfig, "prevResult gives %s no address", r.IfName), "name portmap after the main plugin")
	}
	if err := cfg.choose(); err != nil {
		return nil, err
	}
	st := state{Backend: cfg.Backend, Ports: cfg.hostPorts(pod)}
	if len(st.Ports) == 0 {
		r.Log.Warn("no hostIP is of a family that the pod has an address of; nothing is forwarded")
		return nil, nil
	}
	if err := cfg.checkCount(st.Ports); err != nil {
		return nil, err
	}
	if err := cfg.checkTools(pod); err != nil {
		return nil, err
	}
	if err := cfg.checkListeners(r, st.Ports); err != nil {
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
		if err := end(host, att.Key, old, func() { old.Ended = true; att.Resave(old) }); err != nil {
			return nil, err
		}
	}
	if lost, err := endLost(host, att.Hash()); err != nil {
		return nil, err
	} else if lost {
		if err := delReference(r, true); err != nil {
			return nil, err
		}
	}
	if err := checkHostIPs(r, host, st.Ports); err != nil {
		return nil, err
	}
	if err := cfg.plan(r, host, &st, pod); err != nil {
		return nil, err
	}
	var undo plugin.Undo
	defer undo.OnError(&err)
	undo.Push(func() error { return remove(host, att, st) })
	st.Begun = true
	if err := att.Save(st); err != nil {
		return nil, err
	}
	warnForward(r.Log, host, pod)
	if cfg.Backend == "iptables" {
		warnServices(r.Log, host, pod[0].Addr().Is4())
	}
	former, err := forward(r, cfg, att, host, &st)
	if err != nil {
		return nil, err
	}
	endFlows(host, slices.Concat(old.Ports, st.Ports, former))
	return nil, nil
}

// plan completes the state with what the node tells of the pod.
func (c Config) plan(r *plugin.Request, host *kernel.Node, st *state, pod []netip.Prefix) error {
	if c.Backend == "iptables" {
		st.Rules = c.rules(pod)
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
		// Were the rules flushed, route_localnet alone would open the node's 127.0.0.1 to its whole network.
		if link.Kind != "bridge" && host.IsUplink(link) {
			slog.Info("127.0.0.1 of the node does not reach the hostPorts of a pod behind its uplink", "link", link.Name)
		} else {
			st.Localhost = link.Name
		}
	}
	return nil
}

// choose goes without nftables where the kernel has none, unless the configuration wants it.
func (c *Config) choose() error {
	if c.Backend != "nftables" || nft.Available() {
		return nil
	}
	if c.Unset {
		c.Backend = "iptables"
		return nil
	}
	return plugin.WithHint(plugin.Errorf(plugin.CodeKernelFeature, "backend nftables: the kernel has no nf_tables"), "load the module nf_tables, or use backend iptables")
}

// checkTools refuses the iptables backend on a node that lacks it, before anything is changed.
func (c Config) checkTools(pod []netip.Prefix) error {
	for _, p := range pod {
		if c.Backend == "iptables" && !iptables.Installed(p.Addr().Is4()) {
			return plugin.WithHint(plugin.Errorf(plugin.CodeKernelFeature, "backend iptables: iptables-restore or ip6tables-restore is not installed"),
				"install iptables, or use backend nftables, which needs no program")
		}
	}
	return nil
}

// forward programs the node, and returns the ports of pods that gave way. The node's own loopback is protected from the pods before it
// reaches them.
func forward(r *plugin.Request, cfg Config, att *attachment.Attachment, host *kernel.Node, st *state) (former []ports.Port, err error) {
	unlock, err := attachment.Waiting.Node(portsLock)
	if err != nil {
		return nil, err
	}
	defer unlock()
	c := claim{r: r, cfg: cfg, host: host}
	own := st.hostPorts(owner(att.Key, r.Pod.String()))
	own.Netns = st.netns(r.NetnsPath)
	err = openLoopback(host, att.Key, st)
	if err == nil {
		err = c.add(att, st, own)
	}
	if errors.Is(err, errFlushed) {
		lost := restoreRecorded(host, r.Log)
		err = c.add(att, st, own)
		if lost != nil && errors.Is(err, errFlushed) {
			err = lost
		} else if lost != nil {
			r.Log.Warn(notRestored, "error", lost)
		}
	}
	if st.Backend == "iptables" && nft.Unsupported(err) {
		err = nil
	}
	if err == nil {
		err = c.clear()
	}
	if err == nil && st.Backend == "iptables" {
		err = addByIPTables(att.Key, *st, r.Log)
	}
	if err != nil {
		return nil, err
	}
	for _, rec := range c.gave {
		former = append(former, rec.Ports...)
	}
	// From here on whoever restores the ports of all pods restores these.
	st.Begun = false
	return former, att.Save(*st)
}

const notRestored = "hostPorts of other pods could not be restored"

// openLoopback lets the node reach the pod through 127.0.0.1, if a port wants that.
func openLoopback(host *kernel.Node, key attachment.Key, st *state) error {
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

// linkTo returns the interface behind which the pod is; ok is false when the node has no route to any of its addresses.
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
			err = plugin.Errorf(plugin.CodeDevice, "the interface that leads to %s is gone", p.Addr())
		}
		return link, ok, err
	}
	return kernel.Link{}, false, nil
}

func check(r *plugin.Request) error {
	cfg, err := Parse(r)
	if err != nil || len(cfg.Mappings) == 0 {
		return err
	}
	if err := cfg.choose(); err != nil {
		return err
	}
	host, err := kernel.Host()
	if err != nil {
		return err
	}
	defer host.Close()
	pod := podAddresses(r.Prev, r.IfName)
	ports := cfg.hostPorts(pod)
	if len(ports) == 0 {
		return nil
	}
	warnForward(r.Log, host, pod)
	warnHairpin(r.Log, host, r.Prev)
	reference, err := madeByReference(r, ports)
	if err != nil || reference == "nftables" {
		return err
	}
	st := state{Backend: cfg.Backend, Ports: ports}
	if err := st.recall(r, host); err != nil {
		return err
	}
	if reference == "iptables" {
		st.Backend = reference
	} else {
		err := checkHostPorts(host, st.hostPorts(owner(attachment.KeyOf(r), r.Pod.String())), others(r))
		if err != nil && (st.Backend != "iptables" || !nft.Unsupported(err)) {
			return err
		}
	}
	if st.Backend == "iptables" {
		return checkIPTables(attachment.KeyOf(r), ports)
	}
	return nil
}

// recall completes the state with what ADD recorded, and misses what opened 127.0.0.1. A record that cannot be read counts as none.
func (st *state) recall(r *plugin.Request, host *kernel.Node) error {
	old, ok := attachment.StateOf[state](attachment.KeyOf(r), r.Plugin)
	if !ok {
		return nil
	}
	st.Bridge = old.Bridge
	if singles := ports.Singles(st.Ports); slices.Equal(old.Ports, singles) {
		st.Ports = singles // ranges that ADD took apart
	}
	if old.Localhost == "" || loopbackReaches(host, old.Localhost) {
		return nil
	}
	return plugin.WithHint(plugin.Errorf(plugin.CodeStateDiffers, "route_localnet of %s is off: 127.0.0.1 does not reach the hostPorts", old.Localhost),
		"'podlace reload' switches it on again")
}

// status fails only when no ADD can work: the configuration is wrong, or what the backend needs is missing. It restores
// flushed rules.
func status(r *plugin.Request) error {
	cfg, err := Parse(r)
	if err != nil {
		return err
	}
	if err := cfg.choose(); err != nil {
		return plugin.Errorf(plugin.CodeNotAvailable, "%w", err)
	}
	if cfg.Backend == "iptables" && !iptables.Installed(true) && !iptables.Installed(false) {
		return plugin.Errorf(plugin.CodeNotAvailable, "backend iptables: iptables-restore is not installed")
	}
	attachment.ReportRepair(r, attachment.Trying, repair(r, cfg))
	return nil
}

// repair restores what a flush removed, for STATUS: it waits for no lock.
func repair(r *plugin.Request, cfg Config) error {
	host, err := kernel.Host()
	if err != nil {
		return err
	}
	defer host.Close()
	if intact(host, cfg) {
		return nil
	}
	return restoreAll(host, r.Log, attachment.Trying)
}
