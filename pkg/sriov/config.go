// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"net"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/podlace/podlace/pkg/ipam"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/plugin"
)

// config is the validated configuration of a request.
type config struct {
	// Device is the VF that the caller chose, as Multus does; else the VFs are those of Resources that the pod was allocated.
	Device    pci.Address
	Resources []string
	Names     string // of interfaces, with {index} counted from 1
	Wanted    pfSettings
	MAC       net.HardwareAddr
	MTU       int               // 0 for what the VF has
	Driver    string            // to bind the VF to; "" for the one it has
	Rebind    bool              // bind its own driver anew afterwards
	IPAM      string            // plugin type; "" for none
	ReportIPs bool              // the addresses of VFs are in the result
	Kubelet   string            // its folder
	Allowed   []string          // what pods may choose
	Choices   map[string]choice // of the pod, by the name that the interface has without
	InfoDir   string            // of device-info files
	InfoFile  string            // that the runtime wants for CNI_IFNAME; "" for none
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
	KubeletDir string   `json:"kubeletDir"`
	InfoDir    string   `json:"deviceInfoDir"`
	logging

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
	c := config{Resources: raw.Resources, Names: cmp.Or(raw.IfName, defaultNames), MTU: raw.MTU, Driver: raw.Driver, Rebind: raw.Rebind,
		ReportIPs: !chained(r), Kubelet: cmp.Or(raw.KubeletDir, defaultKubelet)}
	if raw.ReportIPs != nil {
		c.ReportIPs = *raw.ReportIPs
	}
	for _, step := range []func(*config, rawConfig, *plugin.Request) error{parseDevice, parseNames, parseSettings, parseRates, parseLink,
		parseIPAM, parseAllowed, parseChoices, parseInfo, parseLogging} {
		if err := step(&c, raw, r); err != nil {
			return config{}, err
		}
	}
	return c, nil
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
	for i, name := range c.Resources {
		if prefix, rest, ok := strings.Cut(name, "/"); !ok || prefix == "" || rest == "" || strings.ContainsAny(name, " \t\n") {
			return plugin.Errorf(plugin.CodeConfig, "resources[%d] %q: want the name of a resource, such as example.com/fast", i, name)
		}
		if slices.Contains(c.Resources[:i], name) {
			return plugin.Errorf(plugin.CodeConfig, "resources[%d] %q: stands twice", i, name)
		}
	}
	if !c.Device.IsValid() && len(c.Resources) == 0 && r.Verb != "GC" {
		return plugin.WithHint(plugin.Errorf(plugin.CodeConfig, "resources: want the resources whose VFs a pod gets"),
			`such as "resources": ["example.com/fast"], as a pod asks for them; or call it by Multus, which names the VF in deviceID`)
	}
	return nil
}

func parseNames(c *config, _ rawConfig, _ *plugin.Request) error {
	if strings.Count(c.Names, indexMark) != 1 {
		return plugin.Errorf(plugin.CodeConfig, "ifName %q: want a name with %s in it", c.Names, indexMark)
	}
	if err := plugin.ValidIfName(c.name(maxVFs)); err != nil {
		return plugin.Errorf(plugin.CodeConfig, "ifName %q: %w", c.Names, err)
	}
	return nil
}

const (
	indexMark = "{index}"
	maxVFs    = 99 // of one pod
)

// name is that of the interface with an index, from 1 on.
func (c config) name(index int) string {
	return strings.Replace(c.Names, indexMark, strconv.Itoa(index), 1)
}

func parseSettings(c *config, raw rawConfig, _ *plugin.Request) (err error) {
	w := &c.Wanted
	w.VLAN, w.QoS = raw.Vlan, raw.VlanQoS
	if w.VLAN != nil && (*w.VLAN < 0 || *w.VLAN > 4094) {
		return plugin.Errorf(plugin.CodeConfig, "vlan %d: want 0-4094, 0 for none", *w.VLAN)
	}
	if w.QoS != nil && (*w.QoS < 0 || *w.QoS > 7) {
		return plugin.Errorf(plugin.CodeConfig, "vlanQoS %d: want 0-7", *w.QoS)
	}
	if raw.VlanProto != nil {
		if w.Proto = strings.ToLower(*raw.VlanProto); w.Proto != "802.1q" && w.Proto != "802.1ad" {
			return plugin.Errorf(plugin.CodeConfig, "vlanProto %q: want 802.1q or 802.1ad", *raw.VlanProto)
		}
	}
	if tagged := w.VLAN != nil && *w.VLAN != 0; !tagged && (w.QoS != nil && *w.QoS != 0 || w.Proto == "802.1ad") {
		return plugin.Errorf(plugin.CodeConfig, "vlanQoS and vlanProto need a vlan that is not 0")
	}
	if w.SpoofCheck, err = onOff("spoofchk", raw.SpoofChk); err != nil {
		return err
	}
	if w.Trust, err = onOff("trust", raw.Trust); err != nil {
		return err
	}
	switch w.LinkState = raw.LinkState; w.LinkState {
	case "", "auto", "enable", "disable":
		return nil
	}
	return plugin.Errorf(plugin.CodeConfig, "link_state %q: want auto, enable or disable", w.LinkState)
}

func onOff(key, value string) (*bool, error) {
	switch value {
	case "":
		return nil, nil
	case "on", "off":
		return new(value == "on"), nil
	}
	return nil, plugin.Errorf(plugin.CodeConfig, "%s %q: want on or off", key, value)
}

// mega is a Mbit/s, in which PFs limit VFs.
const mega = 1_000_000

// parseRates reads the limits of what a VF sends. Where the VF is the interface of the pod, the egress limit of the pod is one, too.
func parseRates(c *config, raw rawConfig, r *plugin.Request) error {
	w := &c.Wanted
	w.MinRate, w.MaxRate = raw.MinTxRate, raw.MaxTxRate
	for _, rate := range []struct {
		key   string
		value *int
	}{{"min_tx_rate", w.MinRate}, {"max_tx_rate", w.MaxRate}} {
		if rate.value != nil && (*rate.value < 0 || *rate.value > 1<<31-1) {
			return plugin.Errorf(plugin.CodeConfig, "%s %d: want Mbit/s, 0 for no limit", rate.key, *rate.value)
		}
	}
	if limit := raw.RuntimeConfig.Bandwidth; limit != nil && !chained(r) {
		if limit.IngressRate != 0 {
			return plugin.WithHint(plugin.Errorf(plugin.CodeConfig,
				"runtimeConfig.bandwidth.ingressRate %d: a VF cannot limit what the pod receives", limit.IngressRate),
				"take the annotation kubernetes.io/ingress-bandwidth away, or limit it at the switch")
		}
		if limit.EgressRate != 0 {
			rate := int(min(max(limit.EgressRate/mega, 1), 1<<31-1))
			if w.MaxRate == nil || *w.MaxRate == 0 || rate < *w.MaxRate {
				w.MaxRate = &rate
			}
		}
	}
	if w.MinRate != nil && w.MaxRate != nil && *w.MaxRate != 0 && *w.MinRate > *w.MaxRate {
		return plugin.Errorf(plugin.CodeConfig, "min_tx_rate %d: more than max_tx_rate %d", *w.MinRate, *w.MaxRate)
	}
	return nil
}

func parseLink(c *config, raw rawConfig, r *plugin.Request) (err error) {
	if c.MTU != 0 && (c.MTU < 68 || c.MTU > 65535) { // ETH_MIN_MTU and IP_MAX_MTU of the kernel
		return plugin.Errorf(plugin.CodeConfig, "mtu %d: want 68-65535", c.MTU)
	}
	if !filepath.IsAbs(c.Kubelet) {
		return plugin.Errorf(plugin.CodeConfig, "kubeletDir %q: want an absolute path", c.Kubelet)
	}
	if strings.ContainsAny(c.Driver, "/ \t\n") || strings.HasPrefix(c.Driver, ".") {
		return plugin.Errorf(plugin.CodeConfig, "driver %q: want the name of a driver, such as vfio-pci", c.Driver)
	}
	sources := []struct{ key, value string }{{"runtimeConfig.mac", raw.RuntimeConfig.MAC}, {"CNI_ARGS MAC", r.Args["MAC"]}, {"mac", raw.MAC}}
	if chained(r) {
		sources[1].value = "" // that is the MAC of the pod's own interface
	}
	for _, s := range sources {
		if s.value == "" {
			continue
		}
		if c.MAC, err = parseMAC(s.value); err != nil {
			return plugin.Errorf(plugin.CodeConfig, "%s %q: %w", s.key, s.value, err)
		}
		return nil
	}
	return nil
}

func parseMAC(s string) (net.HardwareAddr, error) {
	mac, err := net.ParseMAC(s)
	if err != nil || len(mac) != 6 || mac[0]&1 != 0 || bytes.Equal(mac, make([]byte, 6)) {
		return nil, errors.New("want a unicast MAC address of 6 bytes")
	}
	return mac, nil
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
