// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"bytes"
	"fmt"
	"slices"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/vfconfig"
)

// chosen returns the VF that the caller names, as Multus does. What the claim of a VF and its class set holds for it there, too.
func (s sriov) chosen(r *plugin.Request, cfg config) ([]vf, error) {
	v := vf{Address: cfg.Device}
	record, ok, err := claim.Holder(s.claims, cfg.Kubelet, cfg.Device.String())
	if err != nil {
		return nil, plugin.Errorf(plugin.CodeTryAgain, "%w", err)
	}
	if !ok {
		return []vf{v}, nil
	}
	devices, err := claim.NewCache(s.claims, cfg.Kubelet).Find(claim.Pod{Namespace: r.Pod.Namespace, Name: r.Pod.Name, UID: r.Pod.UID})
	if err != nil {
		return nil, plugin.WithHint(plugin.Errorf(plugin.CodeTryAgain, "whether the pod has VF %s of %s: %w", v.Address, record, err), "%s",
			cfg.hint(err))
	}
	for _, d := range devices {
		if d.ID == v.Address.String() && !d.Claim.Admin {
			v.Claim, v.config = d.Claim, d.Config
			return []vf{v}, nil
		}
	}
	return nil, plugin.Errorf(plugin.CodeDevice, "VF %s: %s has it, which is not of this pod", v.Address, record)
}

// configure gives a VF what its claim and its class set. The index is that of the VF in names, 0 for the interface that the runtime
// asks for.
func (v *vf) configure(r *plugin.Request, cfg config, index int) error {
	if v.config.IsZero() {
		return nil
	}
	var err error
	v.wanted, err = cfg.merge(v.config, func(key string) string { return key })
	if err == nil && len(v.config.IPs) > 0 {
		err = cfg.validIPs(v.config.IPs)
	}
	if err != nil {
		return plugin.Errorf(plugin.CodeConfig, "VF %s, as %s sets it: %w", v.Address, v.source(), err)
	}
	if v.Wanted = &v.wanted.pfSettings; v.config.MAC != "" {
		v.Fixed, _ = vfconfig.ParseMAC(v.config.MAC) // merge has checked it
	}
	v.IPs = v.config.IPs
	return v.rename(r, v.config.IfName, index)
}

// rename gives a VF the ifName of its claim or its class. A name with {index} is for VFs beside the interface that the runtime asks for.
func (v *vf) rename(r *plugin.Request, ifName string, index int) error {
	name := vfconfig.Named(ifName, index)
	switch {
	case ifName == "" || index == 0 && (name != ifName || name == r.IfName):
		return nil
	case index == 0:
		return plugin.Errorf(plugin.CodeConfig, "VF %s, as %s sets it: ifName %s: the runtime looks for %s", v.Address, v.source(),
			name, r.IfName)
	case name == r.IfName:
		return plugin.Errorf(plugin.CodeConfig, "VF %s, as %s sets it: ifName %s: the pod has an interface of this name", v.Address,
			v.source(), name)
	}
	v.Name = name
	return nil
}

// source names the claim of a VF for errors.
func (v *vf) source() string {
	if v.Claim == nil {
		return "its record"
	}
	return fmt.Sprintf("claim %s/%s", v.Claim.Namespace, v.Claim.Name)
}

// contradicts refuses a choice of the pod where its claim has another one. What a class sets the pod may choose otherwise, as what the
// conflist sets.
func (v *vf) contradicts(ifname string, of choice) error {
	if v.config == nil {
		return nil
	}
	mac, _ := vfconfig.ParseMAC(v.config.MAC)
	for _, k := range []struct {
		key, name, chosen string
		same              bool
	}{
		{"mac", "mac", of.MAC.String(), of.MAC == nil || bytes.Equal(of.MAC, mac)},
		{"ips", "ips", fmt.Sprintf("%q", of.IPs), of.IPs == nil || slices.Equal(of.IPs, v.config.IPs)},
		{"ifName", "name", of.Name, of.Name == "" || of.Name == v.Name},
	} {
		if !k.same && slices.Contains(v.config.Claimed, k.key) {
			return plugin.WithHint(plugin.Errorf(plugin.CodeConfig, "annotation %s: %s: %s %s: %s sets %s %s", annotation, ifname, k.name, k.chosen,
				v.source(), k.key, v.config.Text(k.key)), "remove it from the annotation or from the claim")
		}
	}
	return nil
}
