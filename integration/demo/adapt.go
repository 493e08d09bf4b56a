// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"fmt"
	"net/netip"
)

// The functions below adapt a chain to a machine that lacks a kernel feature.

// rewrite replaces the configurations of the chain's plugins with what change returns for them.
func (r *runner) rewrite(change func(plugins []map[string]any) []map[string]any) error {
	var conf map[string]any
	var list struct {
		Plugins []map[string]any `json:"plugins"`
	}
	for _, into := range []any{&conf, &list} {
		if err := json.Unmarshal(r.List.Bytes, into); err != nil {
			return fmt.Errorf("conflist: %w", err)
		}
	}
	conf["plugins"] = change(list.Plugins)
	raw, err := json.Marshal(conf)
	if err != nil {
		return fmt.Errorf("conflist: %w", err)
	}
	return r.use(raw)
}

// removeCapability switches a capability off, so that the plugin that has it gets no ports or limits.
func (r *runner) removeCapability(name string) error {
	return r.rewrite(func(plugins []map[string]any) []map[string]any {
		for _, p := range plugins {
			if capabilities, ok := p["capabilities"].(map[string]any); ok {
				delete(capabilities, name)
			}
		}
		return plugins
	})
}

// disableMasquerade switches masquerade off. Pods' packets then leave the node with the pods' own addresses.
func (r *runner) disableMasquerade() error {
	return r.rewrite(func(plugins []map[string]any) []map[string]any {
		plugins[0]["ipMasq"] = false
		return plugins
	})
}

// disableIPv6 removes all IPv6 subnets and routes.
func (r *runner) disableIPv6() error {
	return r.rewrite(func(plugins []map[string]any) []map[string]any {
		for _, p := range plugins {
			dropIPv6(p["ipam"])
		}
		return plugins
	})
}

// dropIPv6 returns a JSON value without IPv6 subnets and routes, and reports whether anything is left.
func dropIPv6(value any) (rest any, ok bool) {
	switch v := value.(type) {
	case map[string]any:
		if isIPv6(v["subnet"]) || isIPv6(v["dst"]) {
			return nil, false
		}
		for key, item := range v {
			if v[key], ok = dropIPv6(item); !ok {
				delete(v, key)
			}
		}
	case []any:
		var kept []any
		for _, item := range v {
			if item, ok := dropIPv6(item); ok {
				kept = append(kept, item)
			}
		}
		return kept, len(kept) > 0 || len(v) == 0
	}
	return value, true
}

func isIPv6(value any) bool {
	text, _ := value.(string)
	prefix, err := netip.ParsePrefix(text)
	return err == nil && prefix.Addr().Is6()
}
