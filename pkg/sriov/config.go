// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"cmp"
	"encoding/json"
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

// config is the validated configuration of a request.
type config struct {
	// Device is the VF that the caller chose, as Multus does; else the VFs are those of Resources that the pod was allocated.
	Device    pci.Address
	Resources []string
	// OtherResources are those whose VFs another network attaches, or the pod itself uses.
	OtherResources []string

	Names     string          // of interfaces, with {index} counted from 1
	Base      vfconfig.Config // what the configuration sets of every VF, but names, addresses and MACs
	Egress    int             // Mbit/s, the limit of what the pod sends by its own interface; 0 for none
	Wanted    vfSettings      // of a VF of which no claim sets anything
	MAC       net.HardwareAddr
	IPAM      string            // plugin type; "" for none
	ReportIPs bool              // the addresses of VFs are in the result
	Kubelet   string            // its folder
	Allowed   []string          // what pods may choose
	Choices   map[string]choice // of the pod, by the name that the interface has without
	InfoDir   string            // of device-info files
	InfoFile  string            // that the runtime wants for CNI_IFNAME; "" for none
}

// vfSettings are what a VF is set to.
type vfSettings struct {
	pfSettings
	MTU    int    // 0 for what the VF has
	Driver string // to bind the VF to; "" for the one it has
	Rebind bool   // bind its own driver again afterwards
}

// pfSettings are what the PF is told of a VF; what is nil or "" stays as it is.
type pfSettings struct {
	VLAN       *int
	QoS        *int
	Proto      string
	SpoofCheck *bool
	Trust      *bool
	LinkState  string
	MinRate    *int // Mbit/s
	MaxRate    *int
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

	AllowAnnotations *[]string `json:"allowAnnotations"`

	IPAM          json.RawMessage `json:"ipam"`
	RuntimeConfig struct {
		MAC       string     `json:"mac"`
		DeviceID  string     `json:"deviceID"`
		Bandwidth *bandwidth `json:"bandwidth"`
		InfoFile  string     `json:"CNIDeviceInfoFile"`

		Annotations map[string]string `json:"io.kubernetes.cri.pod-annotations"`
	} `json:"runtimeConfig"`
}

// bandwidth is the capability of that name, in bits per second.
type bandwidth struct {
	IngressRate uint64 `json:"ingressRate"`
	EgressRate  uint64 `json:"egressRate"`
}

const (
	// defaultNames is what the interfaces of VFs beside that of the main plugin are called.
	defaultNames   = "net{index}"
	defaultKubelet = "/var/lib/kubelet"
)

// chained reports whether other plugins came before this one and made the pod's interface.
func chained(r *plugin.Request) bool { return r.Prev != nil }

// parseConfig reads the configuration of an ADD, CHECK, STATUS or GC.
func parseConfig(r *plugin.Request) (config, error) {
	var raw rawConfig
	if err := r.Decode(&raw); err != nil {
		return config{}, err
	}
	c := config{Resources: raw.Resources, OtherResources: raw.Others, Names: cmp.Or(raw.IfName, defaultNames), ReportIPs: !chained(r),
		Kubelet: cmp.Or(raw.KubeletDir, defaultKubelet)}
	if raw.ReportIPs != nil {
		c.ReportIPs = *raw.ReportIPs
	}
	for _, step := range []func(*config, rawConfig, *plugin.Request) error{parseDevice, parseNames, parseSettings, parseRates, parseLink,
		parseIPAM, parseAllowed, parseChoices, parseInfo} {
		if err := step(&c, raw, r); err != nil {
			return config{}, err
		}
	}
	return c, nil
}

// Check returns the error with which an ADD refuses a configuration.
func Check(r *plugin.Request) error {
	_, err := parseConfig(r)
	return err
}

// Findings returns the parts of a configuration that are legal and do not do what they seem to do. Pure.
func Findings(config []byte) []plugin.Finding {
	return append(plugin.UnknownKeys(config, "", rawConfig{}), plugin.Capabilities(config, "", "")...)
}

// parseDevice finds out how the VF is known.
func parseDevice(c *config, raw rawConfig, r *plugin.Request) error {
	for _, key := range []struct{ name, value string }{{"runtimeConfig.deviceID", raw.RuntimeConfig.DeviceID}, {"deviceID", raw.DeviceID},
		{"pciBusID", raw.PCIBusID}} {
		if key.value == "" {
			continue
		}
		a, err := pci.ParseAddress(key.value)
		if err != nil {
			return plugin.Errorf(plugin.CodeConfig, "%s %q: %w", key.name, key.value, err)
		}
		if c.Device.IsValid() && c.Device != a {
			return plugin.Errorf(plugin.CodeConfig, "%s %s: another key names %s", key.name, a, c.Device)
		}
		c.Device = a
	}
	if err := cmp.Or(validResources("resources", c.Resources), validResources("otherResources", c.OtherResources)); err != nil {
		return err
	}
	for i, name := range c.OtherResources {
		if slices.Contains(c.Resources, name) {
			return plugin.Errorf(plugin.CodeConfig, "otherResources[%d] %q: resources names it as well", i, name)
		}
	}
	if !c.Device.IsValid() && len(c.Resources) == 0 && r.Verb != "GC" {
		return plugin.WithHint(plugin.Errorf(plugin.CodeConfig, "resources: want the resources whose VFs a pod gets"),
			`such as "resources": ["example.com/fast"], as a pod asks for them; or call it by Multus, which names the VF in deviceID`)
	}
	return nil
}

// validResources returns an error unless the list under a key has names of resources, each once.
func validResources(key string, list []string) error {
	for i, name := range list {
		if prefix, rest, ok := strings.Cut(name, "/"); !ok || prefix == "" || rest == "" || strings.ContainsAny(name, " \t\n") {
			return plugin.Errorf(plugin.CodeConfig, "%s[%d] %q: want the name of a resource, such as example.com/fast", key, i, name)
		}
		if slices.Contains(list[:i], name) {
			return plugin.Errorf(plugin.CodeConfig, "%s[%d] %q: stands twice", key, i, name)
		}
	}
	return nil
}

func parseNames(c *config, _ rawConfig, _ *plugin.Request) error {
	if strings.Count(c.Names, vfconfig.IndexMark) != 1 {
		return plugin.Errorf(plugin.CodeConfig, "ifName %q: want a name with %s in it", c.Names, vfconfig.IndexMark)
	}
	if err := plugin.ValidIfName(vfconfig.Named(c.Names, vfconfig.MaxVFs)); err != nil {
		return plugin.Errorf(plugin.CodeConfig, "ifName %q: %w", c.Names, err)
	}
	return nil
}

// inConflist returns the name of a setting in a conflist.
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

// parseSettings reads what is set of every VF.
func parseSettings(c *config, raw rawConfig, _ *plugin.Request) error {
	c.Base = vfconfig.Config{VLAN: raw.Vlan, VLANQoS: raw.VlanQoS, SpoofChk: raw.SpoofChk, Trust: raw.Trust, LinkState: raw.LinkState,
		MinTxRate: raw.MinTxRate, MaxTxRate: raw.MaxTxRate, Driver: raw.Driver}
	if raw.VlanProto != nil {
		if c.Base.VLANProto = *raw.VlanProto; *raw.VlanProto == "" {
			return plugin.Errorf(plugin.CodeConfig, `vlanProto "": want 802.1q or 802.1ad`)
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

// mega is a Mbit/s, in which PFs limit VFs.
const mega = 1_000_000

// parseRates reads the limits of what a VF sends. Where the VF is the interface of the pod, the egress limit of the pod is one, too.
func parseRates(c *config, raw rawConfig, r *plugin.Request) error {
	limit := raw.RuntimeConfig.Bandwidth
	if limit == nil || chained(r) {
		return nil
	}
	if limit.IngressRate != 0 {
		return plugin.WithHint(plugin.Errorf(plugin.CodeConfig,
			"runtimeConfig.bandwidth.ingressRate %d: a VF cannot limit what the pod receives", limit.IngressRate),
			"take the annotation kubernetes.io/ingress-bandwidth away, or limit it at the switch")
	}
	if limit.EgressRate != 0 {
		c.Egress = int(min(max(limit.EgressRate/mega, 1), 1<<31-1))
	}
	return nil
}

func parseLink(c *config, raw rawConfig, r *plugin.Request) (err error) {
	if c.Wanted, err = c.merge(nil, inConflist); err != nil {
		return err
	}
	if !filepath.IsAbs(c.Kubelet) {
		return plugin.Errorf(plugin.CodeConfig, "kubeletDir %q: want an absolute path", c.Kubelet)
	}
	sources := []struct{ key, value string }{{"runtimeConfig.mac", raw.RuntimeConfig.MAC}, {"CNI_ARGS MAC", r.Args["MAC"]}, {"mac", raw.MAC}}
	if chained(r) {
		sources[1].value = "" // that is the MAC of the pod's own interface
	}
	for _, s := range sources {
		if s.value == "" {
			continue
		}
		if c.MAC, err = vfconfig.ParseMAC(s.value); err != nil {
			return plugin.Errorf(plugin.CodeConfig, "%s %q: %w", s.key, s.value, err)
		}
		return nil
	}
	return nil
}

// merge returns the settings of a VF: those of the configuration, and in their place those that the class and the claim of the VF have.
// Errors name keys by name.
func (c *config) merge(over *vfconfig.Config, name func(string) string) (vfSettings, error) {
	m := vfconfig.Merge(&c.Base, over)
	err := m.Complete(name)
	if c.Egress != 0 && (m.MaxTxRate == nil || *m.MaxTxRate == 0 || c.Egress < *m.MaxTxRate) {
		m.MaxTxRate = &c.Egress
	}
	if err = cmp.Or(err, m.Complete(name)); err != nil {
		return vfSettings{}, plugin.Errorf(plugin.CodeConfig, "%w", err)
	}
	s := vfSettings{Driver: m.Driver, Rebind: m.Rebind != nil && *m.Rebind, pfSettings: pfSettings{VLAN: m.VLAN, QoS: m.VLANQoS,
		Proto: strings.ToLower(m.VLANProto), SpoofCheck: onOff(m.SpoofChk), Trust: onOff(m.Trust), LinkState: m.LinkState,
		MinRate: m.MinTxRate, MaxRate: m.MaxTxRate}}
	if m.MTU != nil {
		s.MTU = *m.MTU
	}
	return s, nil
}

func onOff(value string) *bool {
	if value == "" {
		return nil
	}
	return new(value == "on")
}

func parseIPAM(c *config, raw rawConfig, r *plugin.Request) error {
	if len(raw.IPAM) == 0 || string(raw.IPAM) == "null" {
		return nil
	}
	var object struct {
		Type string `json:"type"`
	}
	if err := json.Unmarshal(raw.IPAM, &object); err != nil {
		return plugin.Errorf(plugin.CodeDecode, "ipam %.100s: want an object", raw.IPAM)
	}
	if object.Type == "" && len(raw.IPAM) > len("{}") {
		return plugin.Errorf(plugin.CodeConfig, "ipam: has no type, such as host-local")
	}
	if c.IPAM = object.Type; c.IPAM == "" {
		return nil
	}
	if plugin.Kind(c.IPAM) == r.Plugin {
		return plugin.Errorf(plugin.CodeConfig, "ipam type %q: want an IPAM plugin, such as host-local", c.IPAM)
	}
	return ipam.ValidType(c.IPAM)
}

// apply returns how a PF shall be set for a VF that it is set so far as now says.
func (s pfSettings) apply(now kernel.VF) kernel.VF {
	if s.VLAN != nil {
		now.VLAN, now.QoS, now.Proto = *s.VLAN, 0, "802.1q"
	}
	if s.QoS != nil {
		now.QoS = *s.QoS
	}
	if s.Proto != "" {
		now.Proto = s.Proto
	}
	if s.SpoofCheck != nil {
		now.SpoofCheck = s.SpoofCheck
	}
	if s.Trust != nil {
		now.Trust = s.Trust
	}
	now.LinkState = cmp.Or(s.LinkState, now.LinkState)
	if s.MinRate != nil {
		now.MinRate = *s.MinRate
	}
	if s.MaxRate != nil {
		now.MaxRate = *s.MaxRate
	}
	return now
}

// any reports whether the PF has to be told anything, and names it.
func (s pfSettings) any() (key string, ok bool) {
	for _, k := range []struct {
		key string
		set bool
	}{{"vlan", s.VLAN != nil && *s.VLAN != 0}, {"spoofchk", s.SpoofCheck != nil}, {"trust", s.Trust != nil}, {"link_state", s.LinkState != ""},
		{"min_tx_rate", s.MinRate != nil && *s.MinRate != 0}, {"max_tx_rate", s.MaxRate != nil && *s.MaxRate != 0}} {
		if k.set {
			return k.key, true
		}
	}
	return "", false
}
