// SPDX-License-Identifier: Apache-2.0

// Package portmap forwards ports of the node to pods. In Kubernetes, these ports are called hostPorts. Runtimes pass hostPorts as the
// portMappings capability. The plugin is chained after any plugin that gives the pod an address.
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

// portState is the content of an attachment's record. An attachment without ports has no record.
type portState struct {
	Backend   string         `json:"backend"`
	Ports     []ports.Port   `json:"ports"`
	Bridge    string         `json:"bridge,omitempty"`    // the pod's bridge
	Localhost string         `json:"localhost,omitempty"` // the link through which 127.0.0.1 reaches the pod
	Rules     *iptablesRules `json:"rules,omitempty"`     // for the iptables backend
	Ended     bool           `json:"ended,omitempty"`     // a DEL has begun
	Begun     bool           `json:"begun,omitempty"`     // the ADD has not finished
}

// iptablesRules holds the settings from which the iptables backend can rewrite an attachment's rules.
type iptablesRules struct {
	Pod          []netip.Prefix `json:"pod"`
	MarkBit      int            `json:"markBit"`
	MarkChain    string         `json:"markChain,omitempty"`
	ConditionsV4 []string       `json:"conditionsV4,omitempty"`
	ConditionsV6 []string       `json:"conditionsV6,omitempty"`
}

func (c Config) rules(pod []netip.Prefix) *iptablesRules {
	return &iptablesRules{pod, c.MarkBit, c.MarkChain, c.Conditions[true], c.Conditions[false]}
}

// portsLock is the name of the lock that protects the state shared by the pods of all networks.
const portsLock = "hostports"

// hostPorts returns the attachment's entry in the hostPort table. The argument owner becomes the comment of the elements.
func (st portState) hostPorts(owner string) ownedPorts {
	return ownedPorts{Owner: owner, Bridge: st.Bridge, Taken: st.Backend == "iptables", Localhost: st.Localhost, Ports: st.Ports}
}

// netnsPath returns the namespace path that is stored in nf_tables. The result is "" for the iptables backend. If the path is stored and
// the namespace no longer exists, the attachment is considered dead. An attachment with iptables rules must not be considered dead, because
// these rules cannot be removed without a record.
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

// ownerComment returns the comment of an attachment's elements: the attachment's hash and a readable name.
func ownerComment(key attachment.Key, pod string) string {
	if pod == "" {
		pod = key.ContainerID
	}
	// nft(8) prints comments without escaping. Only characters of Kubernetes names are therefore allowed.
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

// loadRecorded completes the state with the record of ADD and with the value of route_localnet in the kernel. If the record is missing and
// nf_tables does not list the attachment as an owner, loadRecorded assumes that the reference plugin made the ports.
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
		plugin.Errorf(plugin.CodeStateDiffers, "route_localnet of %s is off: 127.0.0.1 does not reach the hostPorts", old.Localhost),
		"'podlace reload' switches it on again")
}

// STATUS fails only if every ADD would fail: the configuration is wrong, or a requirement of the backend is missing. STATUS restores
// flushed rules.
func status(r *plugin.Request) error {
	cfg, err := Parse(r)
	if err != nil {
		return err
	}
	if err := cfg.chooseBackend(); err != nil {
		return plugin.Errorf(plugin.CodeNotAvailable, "%w", err)
	}
	if cfg.Backend == "iptables" && !iptables.Installed(true) && !iptables.Installed(false) {
		return plugin.Errorf(plugin.CodeNotAvailable, "backend iptables: iptables-restore is not installed")
	}
	host, err := kernel.Host()
	if err == nil {
		defer host.Close()
		if !Intact(host) || cfg.Backend == "iptables" && !iptablesIntact() {
			err = repairPorts(host, r.Log, attachment.Trying)
		}
	}
	attachment.ReportRepair(r, attachment.Trying, err)
	return nil
}
