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

// annotation is where a pod says what it wants of its VFs: an object with their interfaces, as the configuration names them, and what of
// each.
const annotation = "podlace.io/vfs"

// choices are what a pod may choose, where the configuration does not allow less. VLAN, trust and checks of what it sends protect others
// from the pod, which therefore never has a say in them.
var choices = []string{"mac", "ips", "name"}

// choice is what a pod wants of one VF.
type choice struct {
	MAC  net.HardwareAddr
	IPs  []string // as IPAM plugins take them in runtimeConfig.ips
	Name string
}

func parseAllowed(c *config, raw rawConfig, _ *plugin.Request) error {
	c.Allowed = choices
	if raw.AllowAnnotations != nil {
		c.Allowed = *raw.AllowAnnotations
	}
	for _, key := range c.Allowed {
		if !slices.Contains(choices, key) {
			return plugin.WithHint(plugin.Errorf(plugin.CodeConfig, "allowAnnotations %q: want some of %s", key, strings.Join(choices, ", ")),
				"all else of a VF is the admin's")
		}
	}
	return nil
}

// parseChoices reads the annotation of the pod, which tenants write.
func parseChoices(c *config, raw rawConfig, _ *plugin.Request) error {
	text, ok := raw.RuntimeConfig.Annotations[annotation]
	if !ok {
		return nil
	}
	var wanted map[string]map[string]json.RawMessage
	if err := json.Unmarshal([]byte(text), &wanted); err != nil {
		return plugin.WithHint(plugin.Errorf(plugin.CodeConfig, "annotation %s: want an object of interfaces, each an object, in JSON",
			annotation), `such as {"net1": {"mac": "02:00:00:00:00:01"}}`)
	}
	c.Choices = map[string]choice{}
	for _, ifname := range slices.Sorted(maps.Keys(wanted)) {
		of, err := c.parseChoice(wanted[ifname])
		if err != nil {
			return plugin.Errorf(plugin.CodeConfig, "annotation %s: %.20q: %w", annotation, ifname, err)
		}
		c.Choices[ifname] = of
	}
	return nil
}

func (c *config) parseChoice(keys map[string]json.RawMessage) (of choice, err error) {
	for key, value := range keys {
		if !slices.Contains(c.Allowed, key) {
			return of, plugin.Errorf(plugin.CodeConfig, "%.20q is not for pods to choose here, which may choose %q", key, c.Allowed)
		}
		var text string
		var list []string
		if key == "ips" {
			err = json.Unmarshal(value, &list)
		} else {
			err = json.Unmarshal(value, &text)
		}
		if err != nil {
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

func (c *config) validIPs(ips []string) error {
	if c.IPAM == "" {
		return plugin.Errorf(plugin.CodeConfig, "VFs have no addresses here: the configuration has no ipam")
	}
	for _, ip := range ips {
		if err := vfconfig.CheckIP(ip); err != nil {
			return plugin.Errorf(plugin.CodeConfig, "%w", err)
		}
	}
	return nil
}

// choose gives VFs what their pod has chosen for them.
func choose(r *plugin.Request, cfg config, vfs []vf) error {
	for _, ifname := range slices.Sorted(maps.Keys(cfg.Choices)) {
		i := slices.IndexFunc(vfs, func(v vf) bool { return v.Default == ifname })
		if i < 0 {
			return plugin.Errorf(plugin.CodeConfig, "annotation %s: the pod has no VF that is %.20q", annotation, ifname)
		}
		if err := vfs[i].choose(r, ifname, cfg.Choices[ifname]); err != nil {
			return err
		}
	}
	return nil
}

// choose gives a VF, which the configuration names ifname, what its pod has chosen for it.
func (v *vf) choose(r *plugin.Request, ifname string, of choice) error {
	if err := v.contradicts(ifname, of); err != nil {
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
		return plugin.Errorf(plugin.CodeConfig, "annotation %s: %s: name %s: the runtime looks for %s", annotation, ifname, of.Name, r.IfName)
	}
	v.Name = of.Name
	return nil
}
