// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"encoding/json"
	"maps"
	"strconv"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/ipam"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// leaseAddresses requests the addresses of a VF from the IPAM plugin.
func (s sriov) leaseAddresses(j *requestJob, v *vf) error {
	if j.cfg.IPAM == "" {
		return nil
	}
	asked, err := s.ipam.Add(s.ipamRequest(j.r, j.st.Chained, *v), j.cfg.IPAM)
	if err != nil {
		return err
	}
	v.Leased = true
	plan, err := ipam.PlanOf(asked)
	if err == nil {
		err = plan.AddRoutes()
	}
	if err != nil {
		return err
	}
	v.ips, v.ipamResult, v.Addresses, v.Routes = &plan, asked, plan.Addresses, plan.Routes
	return nil
}

// ipamRequest returns the request to the IPAM plugin for the interface of a VF. Each interface of the pod gets its own addresses.
func (s sriov) ipamRequest(r *plugin.Request, chained bool, v vf) *plugin.Request {
	as := *r
	own := !chained && v.Name == r.IfName // the runtime's wishes apply to the pod's own interface only
	if !own {
		as.Args = maps.Clone(r.Args)
		delete(as.Args, "IP")
	}
	if !own || len(v.IPs) > 0 {
		as.Config = withIPs(r.Config, v.IPs)
	}
	as.IfName = v.Name
	if chained {
		as.Network += ipam.ChainedSuffix
		as.Config = ipam.WithKey(as.Config, "name", json.RawMessage(strconv.Quote(as.Network)))
	}
	return &as
}

// withIPs returns a copy of the configuration that requests exactly these addresses.
func withIPs(config []byte, ips []string) []byte {
	var raw struct {
		Runtime map[string]json.RawMessage `json:"runtimeConfig"`
		Args    map[string]json.RawMessage `json:"args"`
	}
	_ = json.Unmarshal(config, &raw) // a request's configuration is valid
	if len(raw.Args) > 0 {
		config = ipam.WithKey(config, "args", json.RawMessage("{}"))
	}
	if raw.Runtime == nil {
		raw.Runtime = map[string]json.RawMessage{}
	}
	delete(raw.Runtime, "ips")
	if len(ips) > 0 {
		raw.Runtime["ips"], _ = json.Marshal(ips) // a list of strings never fails
	}
	runtime, _ := json.Marshal(raw.Runtime) // it was JSON
	return ipam.WithKey(config, "runtimeConfig", runtime)
}

func (s sriov) releaseAddresses(r *plugin.Request, st attachmentState, v vf) error {
	of := ipam.Type(st.IPAM)
	if err := ipam.ValidType(of); err != nil {
		return err
	}
	as := s.ipamRequest(r, st.Chained, v)
	as.Config, as.Leased = ipam.WithKey(as.Config, "ipam", st.IPAM), v.Addresses
	return s.ipam.Del(as, of)
}

// checkLease runs CHECK of the IPAM plugin with a prevResult of this VF's addresses alone, because that of the request can contain
// others.
func (s sriov) checkLease(j *requestJob, v vf) error {
	of := ipam.Type(j.st.IPAM)
	if err := ipam.ValidType(of); err != nil {
		return err
	}
	prev := &types100.Result{CNIVersion: types100.ImplementedSpecVersion,
		Interfaces: []*types100.Interface{{Name: v.Name, Mac: v.MAC, Sandbox: j.r.NetnsPath}}}
	for _, a := range v.Addresses {
		prev.IPs = append(prev.IPs, &types100.IPConfig{Interface: types100.Int(0), Address: *kernel.IPNet(a)})
	}
	converted, err := prev.GetAsVersion(j.r.CNIVersion)
	if err != nil {
		return err
	}
	raw, err := json.Marshal(converted)
	if err != nil {
		return err
	}
	as := s.ipamRequest(j.r, j.st.Chained, v)
	as.Prev, as.Config = prev, ipam.WithKey(ipam.WithKey(as.Config, "ipam", j.st.IPAM), "prevResult", raw)
	return s.ipam.Check(as, of)
}

// collectLeases runs GC of the IPAM plugin. It keeps the leases of all attachments with a record, also of other plugins, and of VFs
// that are not restored yet.
func (s sriov) collectLeases(r *plugin.Request) error {
	name := ipam.Type(ipam.Object(r.Config))
	if ipam.ValidType(name) != nil {
		return nil
	}
	all, _, err := attachment.Attachments(r.Network)
	if err != nil {
		return err
	}
	as := *r
	as.Valid = maps.Clone(r.Valid)
	for key, records := range all {
		as.KeepAttachment(plugin.Attachment{ContainerID: key.ContainerID, IfName: key.IfName})
		for ifname := range records[r.Plugin].Addresses() { // the VFs of an unreadable record have journals
			as.KeepAttachment(plugin.Attachment{ContainerID: key.ContainerID, IfName: ifname})
		}
	}
	left, err := Holdings()
	if err != nil {
		return err
	}
	for _, j := range left {
		if j.Owner.Network == r.Network {
			as.KeepAttachment(plugin.Attachment{ContainerID: j.Owner.ContainerID, IfName: j.Name})
		}
	}
	if err := s.ipam.GC(&as, name); err != nil {
		return err
	}
	return s.ipam.GC(s.ipamRequest(&as, true, vf{}), name)
}
