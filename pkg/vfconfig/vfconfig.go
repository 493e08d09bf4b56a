// SPDX-License-Identifier: Apache-2.0

// Package vfconfig defines the settings of one VF, their validation and their merge, whether they come from a conflist, a DeviceClass,
// a ResourceClaim or an annotation. It does no I/O.
package vfconfig

import (
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// Config is the settings of one VF. Where a setting is nil or "", the VF keeps its current value.
type Config struct {
	VLAN      *int     `json:"vlan,omitempty"` // 0 for none
	VLANQoS   *int     `json:"vlanQoS,omitempty"`
	VLANProto string   `json:"vlanProto,omitempty"` // 802.1q or 802.1ad
	MAC       string   `json:"mac,omitempty"`
	SpoofChk  string   `json:"spoofchk,omitempty"`  // on or off
	Trust     string   `json:"trust,omitempty"`     // on or off
	LinkState string   `json:"linkState,omitempty"` // auto, enable or disable
	MinTxRate *int     `json:"minTxRate,omitempty"` // Mbit/s, 0 for no limit
	MaxTxRate *int     `json:"maxTxRate,omitempty"` // Mbit/s, 0 for no limit
	MTU       *int     `json:"mtu,omitempty"`
	Driver    string   `json:"driver,omitempty"` // driver to bind the VF to
	Rebind    *bool    `json:"rebind,omitempty"` // rebind its own driver afterwards
	IfName    string   `json:"ifName,omitempty"` // in the pod; {index} stands for the number of the VF in the pod, starting at 1
	IPs       []string `json:"ips,omitempty"`    // requested from the IPAM plugin

	// Claimed lists the keys that the ResourceClaim itself sets, not its class. An annotation of the pod must not contradict them.
	Claimed []string `json:"claimed,omitempty"`
	// Unknown lists keys that this version does not support. Validate refuses them.
	Unknown []string `json:"-"`
}

// claimedKey is the JSON key of Claimed, which Podlace writes and users do not.
const claimedKey = "claimed"

// Keys returns the keys of all settings there are.
func Keys() []string {
	return []string{"vlan", "vlanQoS", "vlanProto", "mac", "spoofchk", "trust", "linkState", "minTxRate", "maxTxRate", "mtu", "driver",
		"rebind", "ifName", "ips"}
}

// fieldOf returns a pointer to the field of a key, a **int, *string, **bool or *[]string, or nil for an unknown key.
func (c *Config) fieldOf(key string) any {
	switch key {
	case "vlan":
		return &c.VLAN
	case "vlanQoS":
		return &c.VLANQoS
	case "vlanProto":
		return &c.VLANProto
	case "mac":
		return &c.MAC
	case "spoofchk":
		return &c.SpoofChk
	case "trust":
		return &c.Trust
	case "linkState":
		return &c.LinkState
	case "minTxRate":
		return &c.MinTxRate
	case "maxTxRate":
		return &c.MaxTxRate
	case "mtu":
		return &c.MTU
	case "driver":
		return &c.Driver
	case "rebind":
		return &c.Rebind
	case "ifName":
		return &c.IfName
	case "ips":
		return &c.IPs
	}
	return nil
}

// Has reports whether the setting with this key is set.
func (c *Config) Has(key string) bool {
	if c == nil {
		return false
	}
	switch f := c.fieldOf(key).(type) {
	case **int:
		return *f != nil
	case **bool:
		return *f != nil
	case *string:
		return *f != ""
	case *[]string:
		return len(*f) > 0
	}
	return false
}

// Set returns the keys of all settings that are set, in the order of Keys.
func (c *Config) Set() []string {
	return slices.DeleteFunc(Keys(), func(key string) bool { return !c.Has(key) })
}

// IsZero reports whether nothing is set.
func (c *Config) IsZero() bool { return len(c.Set()) == 0 && (c == nil || len(c.Unknown) == 0) }

// NeedsPF returns the key of the first setting that only the PF can set, or "". A MAC is one if the VF gets a driver of user space, because
// then no interface takes it.
func (c *Config) NeedsPF(userspace bool) string {
	for _, key := range []string{"vlan", "spoofchk", "trust", "linkState", "minTxRate", "maxTxRate"} {
		if c.Has(key) && c.Text(key) != "0" {
			return key
		}
	}
	if userspace && c.Has("mac") {
		return "mac"
	}
	return ""
}

// Text returns a setting as JSON for an error message, or "" if it is not set.
func (c *Config) Text(key string) string {
	if !c.Has(key) {
		return ""
	}
	switch f := c.fieldOf(key).(type) {
	case **int:
		return strconv.Itoa(**f)
	case **bool:
		return strconv.FormatBool(**f)
	case *string:
		return fmt.Sprintf("%+.80q", *f)
	case *[]string:
		return fmt.Sprintf("%+.80q", *f)
	}
	return ""
}

// String returns all settings in one line, such as: vlan 100, mac "02:00:00:00:00:01".
func (c *Config) String() string {
	var out []string
	for _, key := range c.Set() {
		out = append(out, key+" "+c.Text(key))
	}
	return strings.Join(out, ", ")
}

// Merge returns the settings of both configurations, those of `over` where both set a key. It accepts nil and changes neither; the
// result shares their values.
func Merge(base, over *Config) *Config {
	out := &Config{}
	if base != nil {
		*out = *base
	}
	if over == nil {
		return out
	}
	for _, key := range over.Set() {
		switch to := out.fieldOf(key).(type) {
		case **int:
			*to = *over.fieldOf(key).(**int)
		case **bool:
			*to = *over.fieldOf(key).(**bool)
		case *string:
			*to = *over.fieldOf(key).(*string)
		case *[]string:
			*to = *over.fieldOf(key).(*[]string)
		}
	}
	out.Claimed = union(out.Claimed, over.Claimed)
	out.Unknown = union(out.Unknown, over.Unknown)
	return out
}

func union(a, b []string) []string {
	a = slices.Clip(a)
	for _, s := range b {
		if !slices.Contains(a, s) {
			a = append(a, s)
		}
	}
	return a
}
