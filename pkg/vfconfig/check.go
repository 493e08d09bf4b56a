// SPDX-License-Identifier: Apache-2.0

package vfconfig

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"

	"github.com/podlace/podlace/pkg/plugin"
)

const (
	// IndexMark stands for the number of the VF in an ifName.
	IndexMark = "{index}"
	// MaxVFs is the maximum number of VFs of a pod.
	MaxVFs = 99
)

// Validate returns an error if a value is invalid or two settings contradict each other. Unlike Complete, it accepts vlanQoS and
// vlanProto without a vlan, which may come from another source.
func (c *Config) Validate() error {
	return c.check(func(key string) string { return key }, false)
}

// Complete checks the final settings of a VF. In its error messages, keys are spelt as in the conflist or claim, to which `name`
// converts them.
func (c *Config) Complete(name func(key string) string) error { return c.check(name, true) }

func (c *Config) check(name func(string) string, complete bool) error {
	if c == nil {
		return nil
	}
	if len(c.Unknown) > 0 {
		return fmt.Errorf("%+.40q: this version does not know the key", c.Unknown[0])
	}
	for _, key := range Keys() {
		if err := c.checkKey(key); err != nil {
			return plugin.WithKey(name(key), fmt.Errorf("%s %w", name(key), err))
		}
		if err := c.checkRelation(key, name, complete); err != nil {
			return err
		}
	}
	return nil
}

// checkRelation returns an error if the setting contradicts one whose key is earlier in Keys().
func (c *Config) checkRelation(key string, name func(string) string, complete bool) error {
	switch key {
	case "vlanProto":
		untagged := c.VLAN == nil && complete || c.VLAN != nil && *c.VLAN == 0
		if untagged && (c.VLANQoS != nil && *c.VLANQoS != 0 || strings.EqualFold(c.VLANProto, "802.1ad")) {
			return plugin.WithKey(name(key), fmt.Errorf("%s and %s need a %s that is not 0", name("vlanQoS"), name("vlanProto"), name("vlan")))
		}
	case "maxTxRate":
		if c.MinTxRate != nil && c.MaxTxRate != nil && *c.MaxTxRate != 0 && *c.MinTxRate > *c.MaxTxRate {
			return plugin.WithKey(name("minTxRate"), fmt.Errorf("%s %d: more than %s %d", name("minTxRate"), *c.MinTxRate, name(key), *c.MaxTxRate))
		}
	}
	return nil
}

// checkKey checks the value of a single setting. Its error starts with the wrong value.
func (c *Config) checkKey(key string) error {
	switch f := c.fieldOf(key).(type) {
	case **int:
		if *f != nil {
			return checkNumber(key, **f)
		}
	case *string:
		if *f != "" {
			return checkText(key, *f)
		}
	case *[]string:
		return checkIPs(*f)
	}
	return nil
}

func checkNumber(key string, n int) error {
	least, most, want := 0, 1<<31-1, "Mbit/s, 0 for no limit"
	switch key {
	case "vlan":
		most, want = 4094, "0-4094, 0 for none"
	case "vlanQoS":
		most, want = 7, "0-7"
	case "mtu": // ETH_MIN_MTU and IP_MAX_MTU of the kernel
		least, most, want = 68, 65535, "68-65535"
	}
	if n < least || n > most {
		return fmt.Errorf("%d: want %s", n, want)
	}
	return nil
}

func checkText(key, s string) error {
	ok, want := true, ""
	switch key {
	case "vlanProto":
		ok, want = strings.EqualFold(s, "802.1q") || strings.EqualFold(s, "802.1ad"), "802.1q or 802.1ad"
	case "spoofchk", "trust":
		ok, want = s == "on" || s == "off", "on or off"
	case "linkState":
		ok, want = s == "auto" || s == "enable" || s == "disable", "auto, enable or disable"
	case "driver":
		ok = s != "" && !strings.ContainsAny(s, "/ \t\n") && !strings.HasPrefix(s, ".")
		want = "the name of a driver, such as vfio-pci"
	case "mac":
		if _, err := ParseMAC(s); err != nil {
			return fmt.Errorf("%q: %w", s, err)
		}
	case "ifName":
		if s == "lo" || s == "eth0" {
			return fmt.Errorf("%q: every pod already has an interface of this name", s)
		}
		if strings.Count(s, IndexMark) > 1 {
			return fmt.Errorf("%q: %s stands twice", s, IndexMark)
		}
		if err := plugin.ValidIfName(ExpandName(s, MaxVFs)); err != nil {
			return fmt.Errorf("%q: %w", s, err)
		}
	}
	if !ok {
		return fmt.Errorf("%q: want %s", s, want)
	}
	return nil
}

func checkIPs(ips []string) error {
	for _, ip := range ips {
		if err := CheckIP(ip); err != nil {
			return err
		}
	}
	return nil
}

// CheckIP returns an error for an address that IPAM plugins do not accept in runtimeConfig.ips.
func CheckIP(ip string) error {
	if _, err := netip.ParseAddr(ip); err == nil {
		return nil
	}
	if _, err := netip.ParsePrefix(ip); err == nil {
		return nil
	}
	return fmt.Errorf("%q: want an address, with or without a prefix length", ip)
}

// ParseMAC parses the MAC address of a VF.
func ParseMAC(s string) (net.HardwareAddr, error) {
	mac, err := net.ParseMAC(s)
	if err != nil || len(mac) != 6 || mac[0]&1 != 0 || bytes.Equal(mac, make([]byte, 6)) {
		return nil, errors.New("want a unicast MAC address of 6 bytes")
	}
	return mac, nil
}

// ExpandName replaces {index} in an interface name by the number of the VF.
func ExpandName(ifName string, index int) string {
	return strings.Replace(ifName, IndexMark, fmt.Sprint(index), 1)
}
