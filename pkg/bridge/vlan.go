// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// nativeVLAN is the VLAN for untagged frames if a trunk has no key "vlan".
const nativeVLAN = 1

// VLANs are the VLANs of a pod's port.
type VLANs struct {
	ID          uint16   `json:"id,omitempty"`          // the untagged VLAN, or 0
	Trunk       []uint16 `json:"trunk,omitempty"`       // the tagged VLANs
	KeepDefault bool     `json:"keepDefault,omitempty"` // keep the bridge's default VLAN too
}

type vlanRange struct {
	ID    *int `json:"id"`
	MinID *int `json:"minID"`
	MaxID *int `json:"maxID"`
}

func parseVLANs(c *Config, raw rawConfig, _ *plugin.Request) error {
	if raw.Vlan < 0 || raw.Vlan > 4094 {
		return plugin.KeyErrorf("vlan", "vlan %d: want 0-4094", raw.Vlan)
	}
	v := VLANs{ID: uint16(raw.Vlan), KeepDefault: raw.PreserveDefaultVlan}
	entry := map[int]int{} // entry of each VLAN ID
	var errs error
	for i, t := range raw.VlanTrunk {
		ranges, err := t.ranges(i)
		errs = errors.Join(errs, plugin.WithKey(fmt.Sprintf("vlanTrunk[%d]", i), err))
		for _, r := range ranges {
			for id := r[0]; id <= r[1]; id++ {
				if other, twice := entry[id]; twice {
					return plugin.KeyErrorf("vlanTrunk", "vlanTrunk[%d]: VLAN %d is in vlanTrunk[%d] already", i, id, other)
				}
				entry[id] = i
				v.Trunk = append(v.Trunk, uint16(id))
			}
		}
	}
	if errs != nil {
		return errs
	}
	if at, both := entry[raw.Vlan]; both {
		return plugin.KeyErrorf("vlan", "vlan %d is in vlanTrunk[%d] as well: a pod gets a VLAN either without tags or with",
			raw.Vlan, at)
	}
	if c.AntiSpoof && len(v.Trunk) > 0 {
		return plugin.KeyErrorf("antiSpoof", "antiSpoof and vlanTrunk exclude each other: antiSpoof drops tagged frames; "+
			"use macspoofchk with vlanTrunk")
	}
	c.VLANs = v
	if name := c.gatewayName(); name != c.Bridge && plugin.ValidIfName(name) != nil {
		return plugin.Errorf(plugin.CodeConfig,
			"bridge %s with vlan %d and isGateway: the gateway would be the interface %s, want at most 15 characters", c.Bridge, v.ID, name)
	}
	return nil
}

// ranges returns the ranges of VLAN IDs in one entry of vlanTrunk, as pairs of first and last ID.
func (t vlanRange) ranges(at int) (out [][2]int, err error) {
	for _, id := range []*int{t.ID, t.MinID, t.MaxID} {
		if id != nil && (*id < 1 || *id > 4094) {
			return nil, plugin.Errorf(plugin.CodeConfig, "vlanTrunk[%d] %d: want 1-4094", at, *id)
		}
	}
	if (t.MinID == nil) != (t.MaxID == nil) || t.MinID != nil && *t.MinID > *t.MaxID || t.ID == nil && t.MinID == nil {
		return nil, plugin.Errorf(plugin.CodeConfig, "vlanTrunk[%d]: want id, or minID and maxID with minID <= maxID", at)
	}
	if t.ID != nil {
		out = append(out, [2]int{*t.ID, *t.ID})
	}
	if t.MinID != nil {
		out = append(out, [2]int{*t.MinID, *t.MaxID})
	}
	return out, nil
}

func (v VLANs) used() bool { return v.ID != 0 || len(v.Trunk) > 0 }

// onPort returns the VLANs that a pod's port needs on a bridge with this default VLAN.
func (v VLANs) onPort(byDefault uint16) kernel.VLANs {
	native := v.ID
	if native == 0 {
		native = nativeVLAN
	}
	byID := map[uint16]kernel.VLAN{}
	if v.KeepDefault && byDefault != 0 {
		byID[byDefault] = kernel.VLAN{ID: byDefault, Untagged: true}
	}
	for _, id := range v.Trunk {
		byID[id] = kernel.VLAN{ID: id}
	}
	byID[native] = kernel.VLAN{ID: native, PVID: true, Untagged: true}
	return slices.SortedFunc(maps.Values(byID), func(a, b kernel.VLAN) int { return int(a.ID) - int(b.ID) })
}

// supported returns an error if the kernel lacks VLAN filtering, because it would accept the settings without separating the VLANs.
func (v VLANs) supported(host *kernel.Node) error {
	if !v.used() {
		return nil
	}
	has, err := host.HasVLANFiltering()
	if err == nil && !has {
		err = plugin.Errorf(plugin.CodeKernelFeature, "vlan, vlanTrunk: this kernel has no bridge VLAN filtering (CONFIG_BRIDGE_VLAN_FILTERING)")
	}
	return err
}

// ensureFiltering enables VLAN filtering on the bridge if the pod uses VLANs. It returns an error if the bridge has ports, because
// filtering would drop their tagged frames.
func (j *job) ensureFiltering(bridge *kernel.Link) error {
	if !j.cfg.VLANs.used() || bridge.FiltersVLANs {
		return nil
	}
	ports, err := j.host.Ports(*bridge)
	if err != nil {
		return err
	}
	if len(ports) == 0 {
		bridge.FiltersVLANs = true
		return j.host.SetVLANFiltering(*bridge)
	}
	// Another ADD may have enabled filtering and added a port meanwhile.
	again, _, err := j.host.LinkByIndex(bridge.Index)
	if err != nil {
		return err
	}
	if *bridge = again; again.FiltersVLANs {
		return nil
	}
	return plugin.WithHint(plugin.Errorf(plugin.CodeDevice, "bridge %s has ports and does not keep VLANs apart", j.cfg.Bridge),
		"'ip link set %s type bridge vlan_filtering 1' switches that on; ports that it has, such as %s, go on in its default VLAN and lose "+
			"tagged frames", j.cfg.Bridge, ports[0])
}

// setVLANs sets the VLANs of a pod's port while it is down and only in the bridge's default VLAN.
func setVLANs(host *kernel.Node, bridge, port kernel.Link, v VLANs) error {
	var has kernel.VLANs
	if id := bridge.DefaultVLAN; id != 0 {
		has = kernel.VLANs{{ID: id, PVID: true, Untagged: true}}
	}
	return host.ChangeVLANs(port, has, v.onPort(bridge.DefaultVLAN))
}

func (j *job) checkVLANs(w wiring) error {
	if !j.cfg.VLANs.used() {
		return j.checkDefaultVLAN(w)
	}
	if !w.bridge.FiltersVLANs {
		return plugin.Differs("bridge %s does not keep VLANs apart, vlan_filtering is off", w.bridge.Name)
	}
	has, err := j.host.PortVLANs(w.host)
	if err != nil {
		return err
	}
	if want := j.cfg.VLANs.onPort(w.bridge.DefaultVLAN); has.String() != want.String() {
		return plugin.Differs("port %s has the VLANs %s; want %s", w.host.Name, has, want)
	}
	return nil
}

// checkDefaultVLAN fails if the VLAN filtering of the bridge drops the frames of a pod without VLANs. It ignores a bridge without a default
// VLAN, because another program assigns the VLANs of its ports.
func (j *job) checkDefaultVLAN(w wiring) error {
	if !w.bridge.FiltersVLANs || w.bridge.DefaultVLAN == 0 {
		return nil
	}
	has, err := j.host.PortVLANs(w.host)
	if err == nil && !slices.ContainsFunc(has, func(v kernel.VLAN) bool { return v.PVID }) {
		err = plugin.Differs("port %s has no VLAN for frames without a tag, while %s keeps VLANs apart", w.host.Name, w.bridge.Name)
	}
	return err
}
