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

// namedVF returns the VF whose address the caller passes, as Multus does. If it is allocated to a claim, the settings of the claim and
// its class apply.
func (s sriov) namedVF(r *plugin.Request, cfg requestConfig) ([]vf, error) {
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
			cfg.hintFor(err))
	}
	for _, d := range devices {
		if d.ID == v.Address.String() && !d.Claim.Admin {
			v.Claim, v.config = d.Claim, d.Config
			return []vf{v}, nil
		}
	}
	return nil, plugin.WithHint(plugin.Errorf(plugin.CodeDevice, "VF %s belongs to %s, which is not a claim of this pod", v.Address, record),
		"the conflist or Multus names the VF by deviceID: use a VF of no resource with \"api\": \"dra\", or request the VF by a claim")
}

// applyClaim applies the settings of the VF's claim and class. index replaces {index} in an interface name; VF 0 becomes the interface
// of CNI_IFNAME.
func (v *vf) applyClaim(r *plugin.Request, cfg requestConfig, index int) error {
	if v.config.IsZero() {
		return nil
	}
	var err error
	v.Wanted, err = cfg.mergeSettings(v.config, func(key string) string { return key })
	if err == nil && len(v.config.IPs) > 0 {
		err = cfg.validIPs(v.config.IPs)
	}
	if err != nil {
		return plugin.Errorf(plugin.CodeConfig, "VF %s with the settings of %s: %w", v.Address, v.claimName(), err)
	}
	if v.config.MAC != "" {
		v.Fixed, _ = vfconfig.ParseMAC(v.config.MAC) // checked when the settings were merged
	}
	v.IPs = v.config.IPs
	return v.renameByClaim(r, v.config.IfName, index)
}

// renameByClaim applies ifName of the claim or its class. With {index}, it does not apply to the interface of CNI_IFNAME.
func (v *vf) renameByClaim(r *plugin.Request, ifName string, index int) error {
	name := vfconfig.ExpandName(ifName, index)
	switch {
	case ifName == "" || index == 0 && (name != ifName || name == r.IfName):
		return nil
	case index == 0:
		return plugin.Errorf(plugin.CodeConfig, "VF %s with the settings of %s: ifName %s: the runtime requires the name %s", v.Address, v.claimName(),
			name, r.IfName)
	case name == r.IfName:
		return plugin.Errorf(plugin.CodeConfig, "VF %s with the settings of %s: ifName %s: the pod already has an interface of this name", v.Address,
			v.claimName(), name)
	}
	v.Name = name
	return nil
}

func (v *vf) claimName() string {
	if v.Claim == nil {
		return "its record"
	}
	return fmt.Sprintf("claim %s/%s", v.Claim.Namespace, v.Claim.Name)
}

// ownerText returns the VF and its claim, if any, for error messages.
func (v *vf) ownerText() string {
	if v.Claim == nil {
		return "VF " + v.Address.String()
	}
	return fmt.Sprintf("VF %s of %s", v.Address, v.claimName())
}

// settingText names a setting of the PF by its key for error messages, with the value and the claim if it comes from the claim or its
// class, or by the pod's annotation whose limit applies.
func (v *vf) settingText(key string, egress int) string {
	switch {
	case key == "maxTxRate" && *v.Wanted.MaxTxRate == egress:
		return "the limit of the annotation kubernetes.io/egress-bandwidth"
	case !v.config.Has(key):
		return inConflist(key)
	case slices.Contains(v.config.Claimed, key):
		return fmt.Sprintf("%s %s of %s", key, v.config.Text(key), v.claimName())
	}
	return fmt.Sprintf("%s %s of the class of %s", key, v.config.Text(key), v.claimName())
}

// checkClaimed returns an error if the pod chooses what contradicts its claim. It may override only the class and the conflist.
func (v *vf) checkClaimed(ifname string, of vfChoice) error {
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
			return plugin.WithHint(plugin.Errorf(plugin.CodeConfig, "annotation %s: %s: %s %s: %s sets %s %s", annotationKey, ifname, k.name,
				k.chosen,
				v.claimName(), k.key, v.config.Text(k.key)), "remove it from the annotation or from the claim")
		}
	}
	return nil
}
