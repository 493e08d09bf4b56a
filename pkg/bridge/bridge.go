// SPDX-License-Identifier: Apache-2.0

// Package bridge connects a pod to a Linux bridge by a veth pair, with addresses from the IPAM plugin that the configuration names.
//
// The node side of an attachment is described by its record: DEL needs nothing but network, container ID and interface name.
package bridge

import (
	"encoding/json"
	"errors"
	"net/netip"

	types100 "github.com/containernetworking/cni/pkg/types/100"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/ipam"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// state is what the record of an attachment holds.
type state struct {
	Bridge     string         `json:"bridge"`
	Index      int            `json:"index,omitempty"` // of the host side
	IPAM       string         `json:"ipam,omitempty"`
	Masquerade string         `json:"masquerade,omitempty"`
	Addresses  []netip.Prefix `json:"addresses,omitempty"` // with the length of their subnet
	Shared     bool           `json:"shared,omitempty"`    // masqueraded by subnets that all pods share
}

type bridge struct{ ipam ipam.Runner }

// Plugin returns the bridge plugin; builtin are the IPAM plugins that it runs in process.
func Plugin(builtin ...plugin.Plugin) plugin.Plugin {
	b := bridge{ipam.Runner{Builtin: builtin}}
	return plugin.Plugin{Name: "bridge", Add: b.add, Del: b.del, Check: b.check, GC: b.gc, Status: b.status}
}

// job is one ADD or CHECK: the request with everything opened that it works on.
type job struct {
	r    *plugin.Request
	cfg  Config
	att  *attachment.Attachment
	host *kernel.NS
	pod  *kernel.NS
	// shared: the subnets of the IPAM plugin are known, and masqueraded as a whole
	shared bool
}

func (b bridge) open(r *plugin.Request) (j *job, err error) {
	cfg, err := Parse(r)
	if err != nil {
		return nil, err
	}
	j = &job{r: r, cfg: cfg, shared: b.ipam.InProcess(cfg.IPAM)}
	if j.att, err = attachment.Open(r); err != nil {
		return nil, err
	}
	if j.host, err = kernel.Host(); err == nil {
		j.pod, err = kernel.Open(r.Netns)
	}
	if err != nil {
		j.close()
		return nil, err
	}
	return j, nil
}

func (j *job) close() {
	j.att.Close()
	for _, n := range []*kernel.NS{j.host, j.pod} {
		if n != nil {
			n.Close()
		}
	}
}

func (b bridge) add(r *plugin.Request) (result *types100.Result, err error) {
	j, err := b.open(r)
	if err != nil {
		return nil, err
	}
	defer j.close()
	if err := b.clearResidue(j); err != nil {
		return nil, err
	}
	st := state{Bridge: j.cfg.Bridge, Masquerade: j.cfg.Masquerade, Shared: j.shared}
	var undo plugin.Undo
	defer undo.OnError(&err)
	undo.Push(func() error { return b.remove(r, j.att, j.host, st) })
	planned := st
	planned.IPAM = j.cfg.IPAM // for the DEL after a kill; an IPAM plugin that fails gives back by itself
	if err := j.att.Save(planned); err != nil {
		return nil, err
	}
	w, err := j.wire()
	if err != nil {
		return nil, err
	}
	addresses := &types100.Result{}
	if j.cfg.IPAM != "" {
		if addresses, err = b.ipam.Add(r, j.cfg.IPAM); err != nil {
			return nil, err
		}
	}
	st.IPAM = j.cfg.IPAM
	layer3, err := planLayer3(j.cfg, addresses)
	if err != nil {
		return nil, err
	}
	st.Index, st.Addresses = w.host.Index, layer3.addresses
	if err := j.att.Save(st); err != nil {
		return nil, err
	}
	if err := j.configure(w, layer3); err != nil {
		return nil, err
	}
	if err := j.masquerade(layer3); err != nil {
		return nil, err
	}
	return j.result(w, layer3, addresses), nil
}

// clearResidue refuses an interface that exists already, and removes what an attachment of the same key left that was cut off.
func (b bridge) clearResidue(j *job) error {
	_, exists, err := j.pod.Link(j.r.IfName)
	if err != nil {
		return err
	}
	if exists {
		return plugin.WithHint(plugin.Errorf(plugin.CodeAddressTaken, "interface %s already exists in the pod", j.r.IfName),
			"it is left as it is; another plugin or an earlier ADD made it")
	}
	var st state
	if ok, err := j.att.Load(&st); err != nil || !ok {
		return err
	}
	j.r.Log.Info("removing what an interrupted attachment left")
	return b.remove(j.r, j.att, j.host, st)
}

func (b bridge) del(r *plugin.Request) error {
	att, err := attachment.Open(r)
	if err != nil {
		return err
	}
	defer att.Close()
	host, err := kernel.Host()
	if err != nil {
		return err
	}
	defer host.Close()
	var st state
	ok, err := att.Load(&st)
	if err != nil {
		return err
	}
	if !ok {
		return b.delUnrecorded(r, att, host)
	}
	return b.remove(r, att, host, st)
}

// remove takes away everything of an attachment. It goes on after an error; the record goes last, and only when all is gone.
func (b bridge) remove(r *plugin.Request, att *attachment.Attachment, host *kernel.NS, st state) error {
	// The addresses go back last: the next pod that gets one must not lose its masquerade by this.
	errs := []error{host.DelGroup(att.HostVeth(), st.Index), unmasquerade(host, att.Key, st)}
	if st.IPAM != "" {
		errs = append(errs, b.ipam.Del(r, st.IPAM))
	}
	if err := errors.Join(errs...); err != nil {
		return err
	}
	return att.Remove()
}

// delUnrecorded is DEL for an attachment that this plugin did not make, or whose record is lost: the configuration says what to
// look for. The pod's interface is deleted only when it is proven to be this attachment's, by prevResult or by a lease.
func (b bridge) delUnrecorded(r *plugin.Request, att *attachment.Attachment, host *kernel.NS) error {
	var raw struct {
		IPAM          json.RawMessage `json:"ipam"`
		IPMasq        any             `json:"ipMasq"`
		IPMasqBackend any             `json:"ipMasqBackend"`
	}
	_ = json.Unmarshal(r.Config, &raw)
	st := state{IPAM: ipamType(raw.IPAM)}
	if raw.IPMasq == true && raw.IPMasqBackend == "iptables" {
		st.Masquerade = "iptables"
		st.Addresses = []netip.Prefix{netip.PrefixFrom(netip.IPv4Unspecified(), 0), netip.PrefixFrom(netip.IPv6Unspecified(), 0)}
	}
	if st.IPAM != "" && ipam.ValidType(st.IPAM) != nil {
		st.IPAM = ""
	}
	err := deleteProven(r)
	return errors.Join(err, b.remove(r, att, host, st))
}

// deleteProven deletes the pod's interface when prevResult names it with its MAC.
func deleteProven(r *plugin.Request) error {
	if r.Netns == nil || r.Prev == nil {
		return nil
	}
	pod, err := kernel.Open(r.Netns)
	if err != nil {
		return err
	}
	defer pod.Close()
	link, ok, err := pod.Link(r.IfName)
	if err != nil || !ok {
		return err
	}
	for _, i := range r.Prev.Interfaces {
		if i.Name == r.IfName && i.Sandbox != "" && i.Mac == link.MAC.String() {
			return pod.DelLink(r.IfName)
		}
	}
	return nil
}

func (b bridge) gc(r *plugin.Request) error {
	host, err := kernel.Host()
	if err != nil {
		return err
	}
	defer host.Close()
	errs := []error{attachment.Collect(r, func(att *attachment.Attachment) error {
		var st state
		if ok, err := att.Load(&st); err != nil || !ok {
			return err
		}
		of := *r
		of.Verb, of.ContainerID, of.IfName = "DEL", att.ContainerID, att.IfName
		return b.remove(&of, att, host, st)
	})}
	var raw struct {
		IPAM json.RawMessage `json:"ipam"`
	}
	_ = json.Unmarshal(r.Config, &raw)
	if t := ipamType(raw.IPAM); t != "" {
		errs = append(errs, b.ipam.GC(r, t))
	}
	return errors.Join(errs...)
}

// status fails only when no ADD can work here.
func (b bridge) status(r *plugin.Request) error {
	cfg, err := Parse(r)
	if err != nil {
		return err
	}
	host, err := kernel.Host()
	if err != nil {
		return plugin.Errorf(plugin.CodeNotAvailable, "%w", err)
	}
	defer host.Close()
	link, ok, err := host.Link(cfg.Bridge)
	if err == nil && ok && link.Kind != "bridge" {
		return plugin.Errorf(plugin.CodeNotAvailable, "%s is a %s, not a bridge", cfg.Bridge, link.Kind)
	}
	if err == nil && cfg.IPAM != "" {
		err = b.ipam.Status(r, cfg.IPAM)
	}
	return err
}

func isExist(err error) bool { return errors.Is(err, unix.EEXIST) }
