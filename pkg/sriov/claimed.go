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

// namedVF returns the VF that the caller names, as Multus does. If a claim has the VF, the settings of claim and class apply to it.
func (s sriov) namedVF(r *plugin.Request, cfg config) ([]vf, error) {
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
		return nil, plugin.WithHint(plugin.Errorf(plugin.CodeTryAgain, "check whether the pod has VF %s of %s: %w", v.Address, record, err), "%s",
			cfg.hint(err))
	}
	for _, d := range devices {
		if d.ID == v.Address.String() && !d.Claim.Admin {
			v.Claim, v.config = d.Claim, d.Config
			return []vf{v}, nil
		}
	}
	return nil, plugin.Errorf(plugin.CodeDevice, "VF %s belongs to %s, which is not a claim of this pod", v.Address, record)
}

// configure applies the settings of the VF's claim and class. index is the VF's number in names, 0 for the interface that the runtime
// requires.
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
		return plugin.Errorf(plugin.CodeConfig, "VF %s with the settings of %s: %w", v.Address, v.source(), err)
	}
	if v.Wanted = &v.wanted.pfSettings; v.config.MAC != "" {
		v.Fixed, _ = vfconfig.ParseMAC(v.config.MAC) // merge has already checked it
	}
	v.IPs = v.config.IPs
	return v.rename(r, v.config.IfName, index)
}

// rename applies the ifName of the claim or its class. A name with {index} does not apply to the interface that the runtime requires.
func (v *vf) rename(r *plugin.Request, ifName string, index int) error {
	name := vfconfig.ExpandName(ifName, index)
	switch {
	case ifName == "" || index == 0 && (name != ifName || name == r.IfName):
		return nil
	case index == 0:
		return plugin.Errorf(plugin.CodeConfig, "VF %s with the settings of %s: ifName %s: the runtime requires the name %s", v.Address, v.source(),
			name, r.IfName)
	case name == r.IfName:
		return plugin.Errorf(plugin.CodeConfig, "VF %s with the settings of %s: ifName %s: the pod already has an interface of this name", v.Address,
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

// checkClaimed refuses a choice of the pod that differs from its claim. A pod may override settings of the class and the conflist.
func (v *vf) checkClaimed(ifname string, of choice) error {
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
