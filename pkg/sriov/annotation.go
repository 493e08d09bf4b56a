// SPDX-License-Identifier: Apache-2.0

package sriov

import (
	"encoding/json"
	"fmt"
	"maps"
	"net"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/vfconfig"
)

// annotationKey is the annotation in which a pod sets properties of its VFs: a JSON object with an object of properties for each
// interface name of the configuration.
const annotationKey = "podlace.io/vfs"

// allowedChoices are the keys that allowAnnotations may let a pod set. By default a pod sets none, because it could take the MAC or address
// of another. VLAN, trust and the checks of sent packets are never among them, because they protect other pods.
var allowedChoices = []string{"mac", "ips", "name"}

// vfChoice is what a pod chose for one VF.
type vfChoice struct {
	MAC  net.HardwareAddr
	IPs  []string // in the format of runtimeConfig.ips
	Name string
}

func parseAllowed(c *requestConfig, raw rawConfig, _ *plugin.Request) error {
	c.Allowed = raw.AllowAnnotations
	for _, key := range c.Allowed {
		if !slices.Contains(allowedChoices, key) {
			return plugin.WithHint(plugin.KeyErrorf("allowAnnotations", "allowAnnotations %q: want some of %s", key,
				strings.Join(allowedChoices, ", ")),
				"only the configuration may set the other settings of a VF")
		}
	}
	return nil
}

// parseChoices reads the pod's annotation. A tenant writes it, so it is not trusted.
func parseChoices(c *requestConfig, raw rawConfig, _ *plugin.Request) error {
	text, ok := raw.RuntimeConfig.Annotations[annotationKey]
	if !ok {
		return nil
	}
	var wanted map[string]map[string]json.RawMessage
	if err := json.Unmarshal([]byte(text), &wanted); err != nil {
		return plugin.WithHint(plugin.Errorf(plugin.CodeConfig, "annotation %s: want a JSON object of interfaces, each with an object",
			annotationKey), `for example {"net1": {"mac": "02:00:00:00:00:01"}}`)
	}
	c.Choices = map[string]vfChoice{}
	for _, ifname := range slices.Sorted(maps.Keys(wanted)) {
		of, err := c.parseChoice(wanted[ifname])
		if err != nil {
			return plugin.Errorf(plugin.CodeConfig, "annotation %s: %.20q: %w", annotationKey, ifname, err)
		}
		c.Choices[ifname] = of
	}
	return nil
}

func (c *requestConfig) parseChoice(keys map[string]json.RawMessage) (of vfChoice, err error) {
	for key, value := range keys {
		if !slices.Contains(c.Allowed, key) {
			return of, plugin.WithHint(plugin.Errorf(plugin.CodeConfig, "%.20q: pods may only choose %q on this node", key, c.Allowed),
				"allowAnnotations of the plugin sriov lists what pods may choose, of %s", strings.Join(allowedChoices, ", "))
		}
		var text string
		var list []string
		if err = json.Unmarshal(value, map[bool]any{true: &list, false: &text}[key == "ips"]); err != nil {
			err = fmt.Errorf("want %s", map[bool]string{true: "a list of addresses", false: "a text"}[key == "ips"])
		} else {
			switch key {
			case "mac":
				of.MAC, err = vfconfig.ParseMAC(text)
			case "name":
				of.Name, err = text, plugin.ValidIfName(text)
			case "ips":
				of.IPs, err = list, c.validIPs(list)
			}
		}
		if err != nil {
			return of, plugin.Errorf(plugin.CodeConfig, "%s %.100s: %w", key, value, err)
		}
	}
	return of, nil
}

func (c *requestConfig) validIPs(ips []string) error {
	if c.IPAM == "" {
		return plugin.Errorf(plugin.CodeConfig, "the configuration has no ipam, so VFs get no addresses")
	}
	for _, ip := range ips {
		if err := vfconfig.CheckIP(ip); err != nil {
			return plugin.Errorf(plugin.CodeConfig, "%w", err)
		}
	}
	return nil
}

func applyChoices(r *plugin.Request, cfg requestConfig, vfs []vf) error {
	for _, ifname := range slices.Sorted(maps.Keys(cfg.Choices)) {
		i := slices.IndexFunc(vfs, func(v vf) bool { return v.Default == ifname })
		if i < 0 {
			return plugin.Errorf(plugin.CodeConfig, "annotation %s: the pod has no VF with the name %.20q", annotationKey, ifname)
		}
		if err := vfs[i].applyChoice(r, ifname, cfg.Choices[ifname]); err != nil {
			return err
		}
	}
	return nil
}

// applyChoice applies the pod's choice to a VF. ifname is the VF's name in the configuration.
func (v *vf) applyChoice(r *plugin.Request, ifname string, of vfChoice) error {
	if err := v.checkClaimed(ifname, of); err != nil {
		return err
	}
	if of.MAC != nil {
		v.Fixed = of.MAC
	}
	if of.IPs != nil {
		v.IPs = of.IPs
	}
	if of.Name == "" || of.Name == v.Name {
		return nil
	}
	if v.Name == r.IfName {
		return plugin.Errorf(plugin.CodeConfig, "annotation %s: %s: name %s: the runtime requires the name %s", annotationKey, ifname, of.Name, r.IfName)
	}
	v.Name = of.Name
	return nil
}
