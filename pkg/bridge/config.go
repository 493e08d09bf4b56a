// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"bytes"
	"encoding/json"
	"net"
	"net/netip"
	"strings"

	"github.com/containernetworking/cni/pkg/types"

	"github.com/podlace/podlace/pkg/ipam"
	"github.com/podlace/podlace/pkg/plugin"
)

// Config is the validated configuration of a request.
type Config struct {
	Bridge         string
	MTU            int  // 0: the kernel's default
	AutoMTU        bool // the MTU in node.json, or else the uplink's MTU
	MAC            net.HardwareAddr
	IPAM           string // plugin type; "" for layer 2 only
	DNS            *types.DNS
	Masquerade     Masquerade
	Gateway        bool
	DefaultGateway bool
	ForceAddress   bool
	Hairpin        bool
	Promisc        bool
	Isolated       bool
	DAD            bool
	LeaveDown      bool // disableContainerInterface
	MACSpoofCheck  bool
	AntiSpoof      bool
	VLANs          VLANs
	StrictCheck    bool // CHECK fails for changes that a tenant may make in its own pod
}

type rawConfig struct {
	Bridge                    string          `json:"bridge"`
	IsGateway                 bool            `json:"isGateway"`
	IsDefaultGateway          bool            `json:"isDefaultGateway"`
	ForceAddress              bool            `json:"forceAddress"`
	IPMasq                    *ipMasq         `json:"ipMasq"`
	IPMasqBackend             *string         `json:"ipMasqBackend"`
	MTU                       json.RawMessage `json:"mtu"` // a number of bytes, or "auto"
	HairpinMode               bool            `json:"hairpinMode"`
	PromiscMode               bool            `json:"promiscMode"`
	Vlan                      int             `json:"vlan"`
	VlanTrunk                 []vlanRange     `json:"vlanTrunk"`
	PreserveDefaultVlan       bool            `json:"preserveDefaultVlan"`
	EnableDAD                 bool            `json:"enabledad"`
	MacSpoofChk               bool            `json:"macspoofchk"`
	AntiSpoof                 bool            `json:"antiSpoof"`
	DisableContainerInterface bool            `json:"disableContainerInterface"`
	PortIsolation             bool            `json:"portIsolation"`
	StrictCheck               bool            `json:"strictCheck"`

	// The IPAM plugin or the CNI specification defines the content of these keys.
	IPAM          json.RawMessage `json:"ipam"`
	DNS           types.DNS       `json:"dns"`
	RuntimeConfig struct {
		MAC string `json:"mac"`
	} `json:"runtimeConfig"`
	Args struct {
		CNI struct {
			MAC string `json:"mac"`
		} `json:"cni"`
	} `json:"args"`
}

// Keys returns an empty struct with the JSON keys of the configuration, from which plugin.SchemaOf computes the schema.
func Keys() any { return rawConfig{} }

// Parse reads and validates the configuration of ADD, CHECK, STATUS or GC.
func Parse(r *plugin.Request) (Config, error) {
	var raw rawConfig
	if err := r.Decode(&raw); err != nil {
		return Config{}, err
	}
	c := Config{Bridge: raw.Bridge, Gateway: raw.IsGateway || raw.IsDefaultGateway, DefaultGateway: raw.IsDefaultGateway,
		ForceAddress: raw.ForceAddress, Hairpin: raw.HairpinMode, Promisc: raw.PromiscMode, Isolated: raw.PortIsolation,
		DAD: raw.EnableDAD, LeaveDown: raw.DisableContainerInterface,
		MACSpoofCheck: raw.MacSpoofChk, AntiSpoof: raw.AntiSpoof, StrictCheck: raw.StrictCheck}
	if c.Bridge == "" {
		c.Bridge = ipam.DefaultBridge
	}
	if dns := raw.DNS; len(dns.Nameservers)+len(dns.Search)+len(dns.Options) > 0 || dns.Domain != "" {
		c.DNS = &dns
	}
	for _, step := range []func(*Config, rawConfig, *plugin.Request) error{parseIPAM, parseLink, parseVLANs, parseMasquerade, parseMAC} {
		if err := step(&c, raw, r); err != nil {
			return Config{}, err
		}
	}
	return c, nil
}

func parseIPAM(c *Config, raw rawConfig, r *plugin.Request) error {
	c.IPAM = ipam.Type(raw.IPAM)
	var keys map[string]json.RawMessage
	if len(raw.IPAM) > 0 && json.Unmarshal(raw.IPAM, &keys) != nil {
		return plugin.WithKey("ipam", plugin.Errorf(plugin.CodeDecode, "ipam %.100s: want an object", raw.IPAM))
	}
	if c.IPAM == "" && len(keys) > 0 {
		return plugin.KeyErrorf("ipam", "ipam: has no type, such as host-local")
	}
	if c.IPAM == "" {
		if r.CNIVersion == "0.1.0" || r.CNIVersion == "0.2.0" {
			return plugin.KeyErrorf("ipam", "ipam: cniVersion %s cannot express a pod without an address", r.CNIVersion)
		}
		return nil
	}
	if c.LeaveDown {
		return plugin.KeyErrorf("disableContainerInterface", "disableContainerInterface: cannot be used with ipam, an interface that is down has no addresses")
	}
	return ipam.ValidType(c.IPAM)
}

func parseLink(c *Config, raw rawConfig, _ *plugin.Request) error {
	if c.AutoMTU = string(raw.MTU) == `"auto"`; !c.AutoMTU && len(raw.MTU) > 0 && json.Unmarshal(raw.MTU, &c.MTU) != nil {
		return plugin.WithKey("mtu", plugin.Errorf(plugin.CodeDecode, `mtu %.100s: want a number of bytes, or "auto"`, raw.MTU))
	}
	// The bounds are ETH_MIN_MTU (include/uapi/linux/if_ether.h) and IP_MAX_MTU (include/net/ip.h).
	if c.MTU != 0 && (c.MTU < 68 || c.MTU > 65535) {
		return plugin.KeyErrorf("mtu", "mtu %d: want 68-65535", c.MTU)
	}
	if c.AntiSpoof && c.IPAM == "" {
		return plugin.KeyErrorf("antiSpoof", "antiSpoof: needs ipam, whose addresses are those that the pod may use; "+
			"without it there is macspoofchk")
	}
	if c.Hairpin && c.Promisc {
		return plugin.KeyErrorf("hairpinMode", "hairpinMode and promiscMode exclude each other: pods would get frames twice")
	}
	if err := plugin.ValidIfName(c.Bridge); err != nil {
		return plugin.KeyErrorf("bridge", "bridge %q: %w", c.Bridge, err)
	}
	return nil
}

// ipMasq is the value of the key ipMasq: true, false, or an object with details.
type ipMasq struct {
	V4                 *bool    `json:"v4"`
	V6                 *bool    `json:"v6"`
	NonMasqueradeCIDRs []string `json:"nonMasqueradeCIDRs"`
}

// UnmarshalJSON reads a boolean or an object.
func (m *ipMasq) UnmarshalJSON(data []byte) error {
	var on bool
	if err := json.Unmarshal(data, &on); err == nil {
		m.V4, m.V6 = &on, &on
		return nil
	}
	type fields ipMasq
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	if err := dec.Decode((*fields)(m)); err != nil {
		return plugin.KeyErrorf("ipMasq", "ipMasq: want true, false, or an object of v4, v6 (true or false) and nonMasqueradeCIDRs (a list)")
	}
	return nil
}

func parseMasquerade(c *Config, raw rawConfig, _ *plugin.Request) error {
	m := Masquerade{Backend: "nftables"}
	if raw.IPMasqBackend != nil && *raw.IPMasqBackend != "" {
		m.Backend = *raw.IPMasqBackend
	}
	if m.Backend != "nftables" && m.Backend != "iptables" {
		return plugin.KeyErrorf("ipMasqBackend", "ipMasqBackend %q: want nftables or iptables", m.Backend)
	}
	if raw.IPMasq == nil {
		return nil
	}
	for _, text := range raw.IPMasq.NonMasqueradeCIDRs {
		if strings.EqualFold(text, useClusterCIDR) {
			m.UseCluster = true
			continue
		}
		p, err := netip.ParsePrefix(text)
		if err != nil || p != p.Masked() || p.Addr().Is4In6() {
			return plugin.KeyErrorf("ipMasq.nonMasqueradeCIDRs", "ipMasq.nonMasqueradeCIDRs %q: want a subnet such as 10.0.0.0/8, or %s", text, useClusterCIDR)
		}
		m.Except = append(m.Except, p)
	}
	m.V4, m.V6 = trueByDefault(raw.IPMasq.V4), trueByDefault(raw.IPMasq.V6)
	if (m.V4 || m.V6) && c.IPAM != "" {
		c.Masquerade = m
	}
	return nil
}

// trueByDefault returns the value of an optional key, or true if it is missing.
func trueByDefault(b *bool) bool { return b == nil || *b }

// parseMAC finds the MAC that the runtime requests. runtimeConfig takes precedence over args, and args over CNI_ARGS (CONVENTIONS.md).
func parseMAC(c *Config, raw rawConfig, r *plugin.Request) error {
	for _, s := range []string{raw.RuntimeConfig.MAC, raw.Args.CNI.MAC, r.Args["MAC"]} {
		if s == "" {
			continue
		}
		mac, err := net.ParseMAC(s)
		if err != nil || len(mac) != 6 || mac[0]&1 != 0 || mac.String() == "00:00:00:00:00:00" {
			return plugin.KeyErrorf("mac", "mac %q: want a unicast Ethernet address", s)
		}
		c.MAC = mac
		return nil
	}
	return nil
}
