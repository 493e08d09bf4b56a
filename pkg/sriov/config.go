// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"cmp"
	"encoding/json"
	"errors"
	"net"
	"path/filepath"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/ipam"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/vfconfig"
)

type requestConfig struct {
	// Device is the VF whose address the caller passes, as Multus does. If it is not valid, the plugin attaches the VFs that the
	// kubelet allocated from Resources.
	Device    pci.Address
	Resources []string
	// OtherResources are those whose VFs another network attaches, or of which the pod uses only the device files.
	OtherResources []string

	Names     string          // pattern of interface names; {index} counts from 1
	Base      vfconfig.Config // settings for every VF, except names, addresses and MACs
	Egress    int             // egress limit of the pod's own interface in Mbit/s; 0 for none
	Wanted    vfconfig.Config // settings of a VF without settings of a claim
	MAC       net.HardwareAddr
	IPAM      string              // plugin type; "" for none
	ReportIPs bool                // the result contains the addresses of VFs
	Kubelet   string              // root folder of the kubelet
	Allowed   []string            // keys that pods may choose
	Choices   map[string]vfChoice // the pod's choices, by the name of the interface in the configuration
	InfoDir   string              // folder of device-info files
	InfoFile  string              // device-info file that the runtime requires for CNI_IFNAME; "" for none
}

type rawConfig struct {
	DeviceID   string   `json:"deviceID"`
	PCIBusID   string   `json:"pciBusID"`
	Resources  []string `json:"resources"`
	IfName     string   `json:"ifName"`
	Vlan       *int     `json:"vlan"`
	VlanQoS    *int     `json:"vlanQoS"`
	VlanProto  *string  `json:"vlanProto"`
	MAC        string   `json:"mac"`
	SpoofChk   string   `json:"spoofchk"`
	Trust      string   `json:"trust"`
	LinkState  string   `json:"link_state"`
	MinTxRate  *int     `json:"min_tx_rate"`
	MaxTxRate  *int     `json:"max_tx_rate"`
	MTU        int      `json:"mtu"`
	Driver     string   `json:"driver"`
	Rebind     bool     `json:"rebind"`
	ReportIPs  *bool    `json:"reportIPs"`
	Others     []string `json:"otherResources"`
	KubeletDir string   `json:"kubeletDir"`
	InfoDir    string   `json:"deviceInfoDir"`

	AllowAnnotations []string `json:"allowAnnotations"`

	IPAM          json.RawMessage `json:"ipam"`
	RuntimeConfig struct {
		MAC       string               `json:"mac"`
		DeviceID  string               `json:"deviceID"`
		Bandwidth *bandwidthCapability `json:"bandwidth"`
		InfoFile  string               `json:"CNIDeviceInfoFile"`

		Annotations map[string]string `json:"io.kubernetes.cri.pod-annotations"`
	} `json:"runtimeConfig"`
}

// bandwidthCapability is the runtime's capability "bandwidth", with rates in bits per second.
type bandwidthCapability struct {
	IngressRate uint64 `json:"ingressRate"`
	EgressRate  uint64 `json:"egressRate"`
}

const (
	// defaultNames is the pattern for VFs beside a main plugin that also creates an interface.
	defaultNames   = "net{index}"
	defaultKubelet = "/var/lib/kubelet"
)

// isChained reports whether earlier plugins in the chain created the pod's interface.
func isChained(r *plugin.Request) bool { return r.Prev != nil }

// Keys returns an empty configuration, from whose type plugin.SchemaOf reads the keys of the JSON.
func Keys() any { return rawConfig{} }

// parseConfig reads the configuration of ADD, CHECK, STATUS or GC.
func parseConfig(r *plugin.Request) (requestConfig, error) {
	var raw rawConfig
	if err := r.Decode(&raw); err != nil {
		return requestConfig{}, err
	}
	c := requestConfig{Resources: raw.Resources, OtherResources: raw.Others, Names: cmp.Or(raw.IfName, defaultNames), ReportIPs: !isChained(r),
		Kubelet: cmp.Or(raw.KubeletDir, defaultKubelet)}
	if raw.ReportIPs != nil {
		c.ReportIPs = *raw.ReportIPs
	}
	var err error
	for _, step := range []func(*requestConfig, rawConfig, *plugin.Request) error{parseDevice, parseNames, parseSettings, parseRates,
		parseLink, parseMAC, parseIPAM, parseAllowed, parseChoices, parseInfo} {
		err = errors.Join(err, step(&c, raw, r))
	}
	if err != nil {
		return requestConfig{}, err
	}
	return c, nil
}

// Check returns the error that ADD would return for this configuration.
func Check(r *plugin.Request) error {
	_, err := parseConfig(r)
	return err
}

// Findings describes valid settings without the effect that their names suggest and, unless node is nil, the first one that needs a PF if
// none of the node's functions has one. It does no I/O.
func Findings(config []byte, node *pci.Snapshot) []plugin.Finding {
	found := append(plugin.UnknownKeys(config, "", rawConfig{}), plugin.Capabilities(config, "", "")...)
	if node == nil || slices.ContainsFunc(node.Devices, func(d pci.Device) bool { return !d.HasNoPF() }) || len(node.Devices) == 0 {
		return found
	}
	var raw rawConfig
	var c requestConfig
	_ = json.Unmarshal(config, &raw) // Check reports errors
	_ = parseSettings(&c, raw, nil)
	c.Base.MAC = raw.MAC
	if key := c.Base.NeedsPF(pci.IsUserspace(c.Base.Driver)); key != "" {
		found = append(found, plugin.Finding{Key: inConflist(key), Code: plugin.NeedsPF,
			Text: "the functions of this node have no PF on it, which alone can set it: remove the setting, and set it on the hypervisor"})
	}
	return found
}

func parseDevice(c *requestConfig, raw rawConfig, r *plugin.Request) error {
	for _, key := range []struct{ name, value string }{{"runtimeConfig.deviceID", raw.RuntimeConfig.DeviceID}, {"deviceID", raw.DeviceID},
		{"pciBusID", raw.PCIBusID}} {
		if key.value == "" {
			continue
		}
		a, err := pci.ParseAddress(key.value)
		if err != nil {
			return plugin.KeyErrorf(key.name, "%s %q: %w", key.name, key.value, err)
		}
		if c.Device.IsValid() && c.Device != a {
			return plugin.KeyErrorf(key.name, "%s %s: contradicts another key, which names %s", key.name, a, c.Device)
		}
		c.Device = a
	}
	if err := cmp.Or(validResources("resources", c.Resources), validResources("otherResources", c.OtherResources)); err != nil {
		return err
	}
	for i, name := range c.OtherResources {
		if slices.Contains(c.Resources, name) {
			return plugin.KeyErrorf("otherResources", "otherResources[%d] %q: it is also in resources; remove it from one of the lists", i, name)
		}
	}
	if !c.Device.IsValid() && len(c.Resources) == 0 && r.Verb != "GC" {
		return plugin.WithHint(plugin.KeyErrorf("resources", "resources: want the resources whose VFs a pod gets, or deviceID"),
			`such as "resources": ["example.com/fast"], as pods request them; with Multus, deviceID names the VF`)
	}
	return nil
}

func validResources(key string, list []string) error {
	for i, name := range list {
		if prefix, rest, ok := strings.Cut(name, "/"); !ok || prefix == "" || rest == "" || strings.ContainsAny(name, " \t\n") {
			return plugin.KeyErrorf(key, "%s[%d] %q: want the name of a resource, such as example.com/fast", key, i, name)
		}
		if slices.Contains(list[:i], name) {
			return plugin.KeyErrorf(key, "%s[%d] %q: duplicate resource", key, i, name)
		}
	}
	return nil
}

func parseNames(c *requestConfig, _ rawConfig, _ *plugin.Request) error {
	if strings.Count(c.Names, vfconfig.IndexMark) != 1 {
		return plugin.KeyErrorf("ifName", "ifName %q: want a name that contains %s", c.Names, vfconfig.IndexMark)
	}
	if err := plugin.ValidIfName(vfconfig.ExpandName(c.Names, vfconfig.MaxVFs)); err != nil {
		return plugin.KeyErrorf("ifName", "ifName %q: %w", c.Names, err)
	}
	return nil
}

// inConflist returns the key of a setting in a conflist.
func inConflist(key string) string {
	switch key {
	case "linkState":
		return "link_state"
	case "minTxRate":
		return "min_tx_rate"
	case "maxTxRate":
		return "max_tx_rate"
	}
	return key
}

// parseSettings reads the settings that apply to every VF.
func parseSettings(c *requestConfig, raw rawConfig, _ *plugin.Request) error {
	c.Base = vfconfig.Config{VLAN: raw.Vlan, VLANQoS: raw.VlanQoS, SpoofChk: raw.SpoofChk, Trust: raw.Trust, LinkState: raw.LinkState,
		MinTxRate: raw.MinTxRate, MaxTxRate: raw.MaxTxRate, Driver: raw.Driver}
	if raw.VlanProto != nil {
		if c.Base.VLANProto = *raw.VlanProto; *raw.VlanProto == "" {
			return plugin.KeyErrorf("vlanProto", `vlanProto "": want 802.1q or 802.1ad`)
		}
	}
	if raw.MTU != 0 {
		c.Base.MTU = &raw.MTU
	}
	if raw.Rebind {
		c.Base.Rebind = &raw.Rebind
	}
	return nil
}

// megabit is one Mbit/s in bit/s; a PF's rate limits are in Mbit/s.
const megabit = 1_000_000

// parseRates reads the egress limit. After another plugin in a chain, the pod's limit does not apply to the VFs.
func parseRates(c *requestConfig, raw rawConfig, r *plugin.Request) error {
	limit := raw.RuntimeConfig.Bandwidth
	if limit == nil || isChained(r) {
		return nil
	}
	if limit.IngressRate != 0 {
		return plugin.WithHint(plugin.Errorf(plugin.CodeConfig,
			"runtimeConfig.bandwidth.ingressRate %d: a VF cannot limit what the pod receives", limit.IngressRate),
			"remove the annotation kubernetes.io/ingress-bandwidth, or limit the traffic at the switch")
	}
	if limit.EgressRate != 0 {
		c.Egress = int(min(max(limit.EgressRate/megabit, 1), 1<<31-1))
	}
	return nil
}

func parseLink(c *requestConfig, _ rawConfig, _ *plugin.Request) (err error) {
	if c.Wanted, err = c.mergeSettings(nil, inConflist); err == nil && !filepath.IsAbs(c.Kubelet) {
		err = plugin.KeyErrorf("kubeletDir", "kubeletDir %q: want an absolute path", c.Kubelet)
	}
	return err
}

func parseMAC(c *requestConfig, raw rawConfig, r *plugin.Request) (err error) {
	sources := []struct{ key, value string }{{"runtimeConfig.mac", raw.RuntimeConfig.MAC}, {"CNI_ARGS MAC", r.Args["MAC"]}, {"mac", raw.MAC}}
	if isChained(r) {
		sources[1].value = "" // CNI_ARGS MAC is for the pod's own interface
	}
	for _, s := range sources {
		if s.value == "" {
			continue
		}
		if c.MAC, err = vfconfig.ParseMAC(s.value); err != nil {
			return plugin.KeyErrorf(s.key, "%s %q: %w", s.key, s.value, err)
		}
		return nil
	}
	return nil
}

// mergeSettings returns the settings of a VF, in which those of its class and claim override the configuration. For error messages,
// `name` converts a key to the spelling of the claim or the conflist.
func (c *requestConfig) mergeSettings(over *vfconfig.Config, name func(string) string) (vfconfig.Config, error) {
	m := vfconfig.Merge(&c.Base, over)
	err := m.Complete(name)
	if c.Egress != 0 && (m.MaxTxRate == nil || *m.MaxTxRate == 0 || c.Egress < *m.MaxTxRate) {
		m.MaxTxRate = &c.Egress
	}
	if err = cmp.Or(err, m.Complete(name)); err != nil {
		return vfconfig.Config{}, plugin.Errorf(plugin.CodeConfig, "%w", err)
	}
	return *m, nil
}

func parseIPAM(c *requestConfig, raw rawConfig, r *plugin.Request) error {
	if len(raw.IPAM) == 0 || string(raw.IPAM) == "null" {
		return nil
	}
	var object struct {
		Type string `json:"type"`
	}
	if err := json.Unmarshal(raw.IPAM, &object); err != nil {
		return plugin.WithKey("ipam", plugin.Errorf(plugin.CodeDecode, "ipam %.100s: want an object", raw.IPAM))
	}
	if object.Type == "" && len(raw.IPAM) > len("{}") {
		return plugin.KeyErrorf("ipam", "ipam: set a type, such as host-local")
	}
	if c.IPAM = object.Type; c.IPAM == "" {
		return nil
	}
	return ipam.ValidType(c.IPAM)
}

// onPF returns a VF's settings on its PF after ADD, given those that it has before.
func onPF(want vfconfig.Config, now kernel.VF) kernel.VF {
	if want.VLAN != nil {
		now.VLAN, now.QoS, now.Proto = *want.VLAN, 0, "802.1q"
	}
	if want.VLANQoS != nil {
		now.QoS = *want.VLANQoS
	}
	now.Proto = cmp.Or(strings.ToLower(want.VLANProto), now.Proto)
	if want.SpoofChk != "" {
		now.SpoofCheck = new(want.SpoofChk == "on")
	}
	if want.Trust != "" {
		now.Trust = new(want.Trust == "on")
	}
	now.LinkState = cmp.Or(want.LinkState, now.LinkState)
	if want.MinTxRate != nil {
		now.MinRate = *want.MinTxRate
	}
	if want.MaxTxRate != nil {
		now.MaxRate = *want.MaxTxRate
	}
	return now
}
