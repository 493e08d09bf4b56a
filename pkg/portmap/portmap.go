// SPDX-License-Identifier: Apache-2.0

// Package portmap forwards ports of the node to pods: the hostPorts of Kubernetes, which runtimes pass in the capability portMappings. It
// can be chained after any plugin that gives the pod an address.
package portmap

import (
	"net/netip"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/ports"
)

// portState is the content of an attachment's record. An attachment without ports has none.
type portState struct {
	Backend    string         `json:"backend"`
	Ports      []ports.Port   `json:"ports"`
	Bridge     string         `json:"bridge,omitempty"`     // the pod's bridge
	Localhost  string         `json:"localhost,omitempty"`  // the link through which 127.0.0.1 reaches the pod
	Rules      *iptablesRules `json:"rules,omitempty"`      // for the iptables backend
	Ended      bool           `json:"ended,omitempty"`      // a DEL has begun
	Unfinished bool           `json:"unfinished,omitempty"` // the ADD has not finished
}

// iptablesRules holds what the iptables backend needs to rewrite an attachment's rules.
type iptablesRules struct {
	Pod          []netip.Prefix `json:"pod"`
	MarkBit      int            `json:"markBit"`
	MarkChain    string         `json:"markChain,omitempty"`
	ConditionsV4 []string       `json:"conditionsV4,omitempty"`
	ConditionsV6 []string       `json:"conditionsV6,omitempty"`
}

func (of iptablesRules) forPod(pod []netip.Prefix) *iptablesRules {
	of.Pod = pod
	return &of
}

// portsLock names the lock for the state that the pods of all networks share.
const portsLock = "hostports"

// hostPorts returns the attachment's ports for the hostPort table, with owner as the comment of the set elements.
func (st portState) hostPorts(owner string) ownedPorts {
	return ownedPorts{Owner: owner, Bridge: st.Bridge, ByIPTables: st.Backend == "iptables", Localhost: st.Localhost, Ports: st.Ports}
}

// netnsPath returns the path of the network namespace that is stored in nf_tables, and "" for the iptables backend. An attachment with a
// stored path counts as dead once the namespace is gone, which must not happen to one with iptables rules, because they cannot be removed
// without a record.
func (st portState) netnsPath(path string) string {
	if st.Backend == "iptables" {
		return ""
	}
	return path
}

// Plugin returns the portmap plugin.
func Plugin() plugin.Plugin {
	return plugin.Plugin{Name: "portmap", Chained: true, ForeignArgs: true, Add: add, Del: del, Check: check, GC: gc, Status: status}
}

// ownerComment returns the comment of an attachment's set elements: its hash and a readable name.
func ownerComment(key attachment.Key, pod string) string {
	if pod == "" {
		pod = key.ContainerID
	}
	// nft(8) prints comments unescaped, so only the characters of Kubernetes names are safe.
	safe := strings.Map(func(c rune) rune {
		if nameRune(c) || c == '.' || c == '/' {
			return c
		}
		return '_'
	}, pod)
	return key.Hash() + " " + safe
}

func check(r *plugin.Request) error {
	cfg, err := Parse(r)
	if err != nil || len(cfg.Ports) == 0 {
		return err
	}
	if err := cfg.chooseBackend(); err != nil {
		return err
	}
	host, err := attachment.Host(r)
	if err != nil {
		return err
	}
	pod := podAddresses(r.Prev, r.IfName)
	ports := cfg.hostPorts(pod)
	if len(ports) == 0 {
		return nil
	}
	reference, err := madeByReference(r, ports)
	if err != nil || reference == "nftables" {
		return err
	}
	st := portState{Backend: cfg.Backend, Ports: ports}
	if err := st.loadRecorded(r, host); err != nil {
		return err
	}
	if reference == "iptables" {
		st.Backend = reference
	} else {
		own := st.hostPorts(ownerComment(attachment.KeyOf(r), r.Pod.String()))
		err := checkHostPorts(host, own, otherOwners{r.ContainerID, map[string]otherOwner{}})
		if err != nil && (st.Backend != "iptables" || !nft.Unsupported(err)) {
			return err
		}
	}
	if st.Backend == "iptables" {
		return checkIPTables(attachment.KeyOf(r), ports)
	}
	return nil
}

// loadRecorded completes the state from the record that ADD wrote and from route_localnet in the kernel. Without a record and an owner
// element in nf_tables, the reference plugin is assumed to forward the ports.
func (st *portState) loadRecorded(r *plugin.Request, host *kernel.Node) error {
	old, ok, err := attachment.Checked[portState](r)
	if err != nil {
		return err
	}
	if !ok {
		if _, ours, err := findOwner(host, attachment.KeyOf(r).Hash()); err != nil || !ours {
			return err
		}
		return attachment.LostRecord(r)
	}
	st.Bridge = old.Bridge
	if singles := ports.Singles(st.Ports); slices.Equal(old.Ports, singles) {
		st.Ports = singles // ADD split these ranges
	}
	if old.Localhost == "" || loopbackReaches(host, old.Localhost) {
		return nil
	}
	return plugin.WithHint(
		plugin.Differs("route_localnet of %s is off: 127.0.0.1 does not reach the hostPorts", old.Localhost),
		"'podlace reload' switches it on again")
}

// status fails only if every ADD would: with a wrong configuration, or a backend that cannot work on this node. It restores flushed rules.
func status(r *plugin.Request) error {
	cfg, err := Parse(r)
	if err != nil {
		return err
	}
	if err := cfg.chooseBackend(); err != nil {
		return plugin.Errorf(plugin.CodeNotAvailable, "%w", err)
	}
	if cfg.Backend == "iptables" && !iptables.Installed(true) && !iptables.Installed(false) {
		return plugin.Errorf(plugin.CodeNotAvailable, "backend iptables: iptables-restore is not installed: install it, or use nftables")
	}
	host, err := attachment.Host(r)
	if err == nil {
		if !Intact(host) || cfg.Backend == "iptables" && !IPTablesIntact() {
			err = restoreAll(host, r.Log, attachment.Trying)
		}
	}
	attachment.ReportRestore(r, attachment.Trying, err)
	return nil
}
