// SPDX-License-Identifier: Apache-2.0

// Package bridge connects a pod to a Linux bridge with a veth pair. The configured IPAM plugin assigns the addresses.
//
// An attachment's record lists everything on the node's side, so DEL needs only network, container ID and interface name.
//
// planLayer3, guardOf, wantedMasquerade, masqueradeLines and VLANs.onPort compute the wanted state without I/O. ADD applies it, CHECK
// compares it with the kernel's, and Restore computes it from the records to bring back what a flush removed.
package bridge

import (
	"encoding/json"
	"errors"
	"net/netip"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/ipam"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// state is the content of an attachment's record.
type state struct {
	Bridge     string          `json:"bridge"`
	BridgeMAC  string          `json:"bridgeMAC,omitempty"`
	Unfinished bool            `json:"unfinished,omitempty"` // the ADD has not finished
	Index      int             `json:"index,omitempty"`      // ifindex of the host side
	IPAM       json.RawMessage `json:"ipam,omitempty"`       // the configuration's ipam object, for a DEL after the configuration changed
	Masquerade string          `json:"masquerade,omitempty"`
	Addresses  []netip.Prefix  `json:"addresses,omitempty"` // with the prefix length of their subnet
	Except     []netip.Prefix  `json:"except,omitempty"`    // destinations without masquerade, for the iptables backend
	Cluster    int             `json:"cluster,omitempty"`   // as in Masquerade.Cluster
	NoMasq4    bool            `json:"noMasq4,omitempty"`   // the iptables backend does not masquerade IPv4
	NoMasq6    bool            `json:"noMasq6,omitempty"`   // the iptables backend does not masquerade IPv6
	Routes     []kernel.Route  `json:"routes,omitempty"`
	Gateways   []netip.Prefix  `json:"gateways,omitempty"` // gateway addresses of the bridge
	Hairpin    bool            `json:"hairpin,omitempty"`
	Isolated   bool            `json:"isolated,omitempty"`
	VLANs      VLANs           `json:"vlans,omitzero"`
	Shared     bool            `json:"shared,omitempty"` // masquerade uses subnets that all pods share
	Guard      *Guard          `json:"guard,omitempty"`
}

type bridge struct{ ipam ipam.Runner }

// Plugin returns the bridge plugin. The builtin IPAM plugins run in this process.
func Plugin(builtin ...plugin.Plugin) plugin.Plugin {
	b := bridge{ipam.Runner{Builtin: builtin}}
	return plugin.Plugin{Name: "bridge", Add: b.add, Del: b.del, Check: b.check, GC: b.gc, Status: b.status}
}

// job is one ADD or CHECK: the request, its configuration and the open handles.
type job struct {
	r    *plugin.Request
	cfg  Config
	att  *attachment.Attachment
	host *kernel.Node
	pod  *kernel.NS
	// shared is true if the pods of the network share masquerade rules for whole subnets, which the IPAM plugin must report.
	shared bool
	fresh  bool // this ADD created the bridge or added a gateway address to it
	// recordedState is what ADD recorded, for CHECK. hasRecord is false if it cannot be read.
	recordedState state
	hasRecord     bool
}

func (b bridge) open(r *plugin.Request) (_ *job, err error) {
	cfg, err := Parse(r)
	if err != nil {
		return nil, err
	}
	j := &job{r: r, cfg: cfg, shared: b.ipam.InProcess(cfg.IPAM)}
	defer func() {
		if err != nil {
			j.close()
		}
	}()
	if j.host, err = attachment.Host(r); err != nil {
		return nil, err
	}
	if err := cfg.supported(j.host); err != nil { // before any state of the attachment exists
		return nil, err
	}
	if j.att, err = attachment.Open(r); err != nil {
		return nil, err
	}
	r.LockFile = j.att.LockFile()
	if j.pod, err = attachment.Pod(r); err != nil {
		return nil, err
	}
	return j, nil
}

func (j *job) close() {
	if j.att != nil {
		j.att.Close()
	}
}

func (b bridge) add(r *plugin.Request) (result *types100.Result, err error) {
	j, err := b.open(r)
	if err != nil {
		return nil, err
	}
	defer j.close()
	if err := j.cfg.resolve(r); err != nil {
		return nil, err
	}
	if err := b.clearResidue(j); err != nil {
		return nil, err
	}
	st := state{Bridge: j.cfg.Bridge, Unfinished: true, Masquerade: j.cfg.Masquerade.Backend, Shared: j.shared, Hairpin: j.cfg.Hairpin,
		Isolated: j.cfg.Isolated, VLANs: j.cfg.VLANs}
	var undo plugin.Undo
	defer undo.OnError(&err)
	undo.Push(func() error { return b.remove(r, j.att, j.host, st) })
	planned := st
	planned.IPAM = ipam.Object(r.Config) // DEL needs it if this ADD is killed; an IPAM plugin that fails releases its own addresses
	if err := j.att.Save(planned); err != nil {
		return nil, err
	}
	w, err := j.createLinks()
	if err != nil {
		return nil, err
	}
	addresses := &types100.Result{}
	if j.cfg.IPAM != "" {
		if addresses, err = b.allocate(j); err != nil {
			return nil, err
		}
	}
	st.IPAM = planned.IPAM
	layer3, err := planLayer3(j.cfg, addresses)
	if err != nil {
		return nil, err
	}
	if err := j.setMAC(&w, layer3); err != nil {
		return nil, err
	}
	st.BridgeMAC, st.Index = w.bridge.MAC.String(), w.host.Index
	if st.Masquerade == "iptables" {
		m := j.cfg.Masquerade
		st.Except, st.Cluster, st.NoMasq4, st.NoMasq6 = m.Except, m.Cluster, !m.V4, !m.V6
	}
	st.Addresses, st.Routes, st.Gateways = layer3.Addresses, layer3.Routes, layer3.gateways
	st.Guard = j.guardOf(w, layer3, j.alias())
	if err := j.att.Save(st); err != nil {
		return nil, err
	}
	if err := j.applyGuard(w.host, st.Guard); err != nil {
		return nil, err
	}
	if err := j.configure(w, layer3); err != nil {
		return nil, err
	}
	if err := j.applyMasquerade(layer3); err != nil {
		return nil, err
	}
	j.logFindings(layer3)
	st.Unfinished = false
	if err := j.att.Save(st); err != nil {
		return nil, err
	}
	return j.attachmentResult(w, layer3, addresses), nil
}

// clearResidue removes what an unfinished ADD with the same key left behind. It returns an error if the container is attached, even in
// another namespace, because the runtime still uses the result of that ADD.
func (b bridge) clearResidue(j *job) error {
	var st state
	recorded, err := j.att.Load(&st)
	if err != nil {
		return err
	}
	if recorded && st.Unfinished {
		// The process that began this ADD has ended, because this one holds its lock. removeResidue finds its links by their names.
		if err := b.removeResidue(j, st); err != nil {
			return err
		}
		recorded = false
	}
	_, exists, err := j.pod.Link(j.r.IfName)
	if err != nil {
		return err
	}
	if exists {
		hint := "it is left as it is; another plugin made it"
		if recorded {
			hint = "it is left as it is; an earlier ADD made it: call DEL first"
		}
		return plugin.WithHint(plugin.Errorf(plugin.CodeAddressTaken, "interface %s already exists in the pod", j.r.IfName), "%s", hint)
	}
	side, exists, err := j.host.Link(j.att.HostVeth())
	if err != nil {
		return err
	}
	if exists && !isHostSide(side, j.att.Key, st.Index) {
		return plugin.WithHint(plugin.Errorf(plugin.CodeAddressTaken,
			"another program made %s on the node, which is the name of the host side", side.Name), "rename or delete %s", side.Name)
	}
	if exists {
		return plugin.WithHint(plugin.Errorf(plugin.CodeAddressTaken,
			"the container is attached already, by %s, in another namespace", j.att.HostVeth()), "call DEL first")
	}
	if recorded {
		return b.removeResidue(j, st)
	}
	return nil
}

func (b bridge) removeResidue(j *job, st state) error {
	j.r.Log.Info("removing the residue of an interrupted ADD")
	return b.remove(j.r, j.att, j.host, st)
}

func (b bridge) del(r *plugin.Request) error {
	att, st, recorded, err := attachment.Take[state](r)
	if err != nil {
		return err
	}
	defer att.Close()
	host, err := attachment.Host(r)
	if err != nil {
		return err
	}
	as := *r
	as.LockFile = att.LockFile()
	if recorded {
		return b.finishRemove(&as, att, st, errors.Join(delSuccessor(&as, host), deleteFromNode(host, att, &st)))
	}
	if err = b.delUnrecorded(&as, host); err == nil {
		err = att.RemoveWithLink()
	}
	return errors.Join(err, att.Remove())
}

// remove removes rules, links, leases and record, in this order. Leases are released only once the node has no link or rule of the pod, so
// that two pods never use one address. The record goes last, when everything else is gone.
func (b bridge) remove(r *plugin.Request, att *attachment.Attachment, host *kernel.Node, st state) error {
	return b.finishRemove(r, att, st, deleteFromNode(host, att, &st))
}

func deleteFromNode(host *kernel.Node, att *attachment.Attachment, st *state) error {
	return removeHostSide(host, att.Key, st.Index, func() error {
		return errors.Join(removeMasquerade(host, att, st), removeGuard(host, att, st))
	})
}

// finishRemove releases the leases and deletes the record, unless err says that links or rules could not be removed.
func (b bridge) finishRemove(r *plugin.Request, att *attachment.Attachment, st state, err error) error {
	if err == nil {
		err = b.releaseAddresses(r, st.IPAM, st.Addresses...)
	}
	if err != nil {
		return err
	}
	return errors.Join(att.RemoveWithLink(), att.Remove())
}

func (b bridge) releaseAddresses(r *plugin.Request, object json.RawMessage, leased ...netip.Prefix) error {
	name := ipam.Type(object)
	if name == "" {
		return nil
	}
	as := *r
	as.Config, as.Leased = ipam.WithKey(r.Config, "ipam", object), leased
	if now := ipam.Type(ipam.Object(r.Config)); now != "" && now != name && !b.ipam.Available(r, name) {
		// If the IPAM plugin that assigned the addresses is gone, DEL asks the configured one. Otherwise the pod could never be deleted.
		r.Log.Warn("the pod's IPAM plugin is not installed; asking the configured one instead",
			"gone", name, "asked", now)
		as.Config, name = r.Config, now
	}
	return b.ipam.Del(&as, name)
}

// status restores flushed rules. It fails only if no ADD can work on this node.
func (b bridge) status(r *plugin.Request) error {
	cfg, err := Parse(r)
	if err != nil {
		return err
	}
	host, err := attachment.Host(r)
	if err != nil {
		return plugin.Errorf(plugin.CodeNotAvailable, "%w", err)
	}
	var restored error
	if len(Lost(host)) > 0 {
		restored = Restore(host, r.Log, attachment.Trying)
	}
	attachment.ReportRestore(r, attachment.Trying, restored)
	if err := errors.Join(cfg.whyUnusable(host), cfg.resolve(r), attachment.Writable(r.Network)); err != nil {
		return plugin.Errorf(plugin.CodeNotAvailable, "%w", err)
	}
	if cfg.IPAM != "" {
		return b.ipam.Status(r, cfg.IPAM)
	}
	return nil
}

// whyUnusable returns why no ADD can work on this node, or nil.
func (c Config) whyUnusable(host *kernel.Node) error {
	link, ok, err := host.Link(c.Bridge)
	if err == nil && ok && link.Kind != "bridge" {
		err = plugin.Errorf(plugin.CodeDevice, "%q already exists but is not a bridge, it is a %s: rename or delete it", c.Bridge, link.Kind)
	}
	if err == nil {
		err = c.supported(host)
	}
	return err
}

// supported returns an error if the node lacks a feature that the configuration needs. ADD calls it before any change.
func (c Config) supported(host *kernel.Node) error {
	err := c.VLANs.supported(host)
	if c.checksSources() {
		if e := compareGuards(host); !plugin.IsDifferent(e) {
			err = errors.Join(err, e)
		}
	}
	if c.Masquerade.Backend == "iptables" && !iptables.Installed(true) && !iptables.Installed(false) {
		err = errors.Join(err, plugin.WithHint(plugin.Errorf(plugin.CodeKernelFeature,
			"ipMasqBackend iptables: iptables-restore and ip6tables-restore are not installed"),
			"install iptables, or set ipMasqBackend to nftables"))
	}
	return err
}

func isExist(err error) bool { return errors.Is(err, unix.EEXIST) }
