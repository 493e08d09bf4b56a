// SPDX-License-Identifier: Apache-2.0

package portmap

import (
	"cmp"
	"net/netip"
	"slices"
	"strings"
	"unicode"

	types100 "github.com/containernetworking/cni/pkg/types/100"

	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/ports"
)

// defaultMarkBit is that of the reference plugin. Bits 14 and 15 belong to kube-proxy and the kubelet.
const defaultMarkBit = 13

// With the default, an ADD holds the lock of all hostPorts for at most 0.2 seconds. The upper limit keeps an attachment's record below the
// size limit of files in the state folder.
const (
	defaultHostPorts  = 1024
	maxHostPortsLimit = 10000
)

// Config is the validated configuration of an ADD or CHECK.
type Config struct {
	Backend string // "nftables" or "iptables"
	Unset   bool   // the configuration names no backend
	SNAT    bool
	MasqAll bool
	iptablesRules
	Ports []ports.Port // portMappings, one per address family; their targets are unspecified

	RefuseListeners bool // refuseHostListeners
	MaxHostPorts    int
}

// rawMapping is one entry of the capability portMappings.
type rawMapping struct {
	HostPort      int    `json:"hostPort"`
	ContainerPort int    `json:"containerPort"`
	Protocol      string `json:"protocol"`
	HostIP        string `json:"hostIP"`
}

type rawConfig struct {
	Backend              *string   `json:"backend"`
	SNAT                 *bool     `json:"snat"`
	MasqAll              bool      `json:"masqAll"`
	MarkMasqBit          *int      `json:"markMasqBit"`
	ExternalSetMarkChain *string   `json:"externalSetMarkChain"`
	ConditionsV4         *[]string `json:"conditionsV4"`
	ConditionsV6         *[]string `json:"conditionsV6"`
	RefuseHostListeners  bool      `json:"refuseHostListeners"`
	MaxHostPorts         *int      `json:"maxHostPorts"`
	RuntimeConfig        struct {
		PortMaps []rawMapping `json:"portMappings"`
	} `json:"runtimeConfig"`
}

// Keys returns an empty configuration, from whose type plugin.SchemaOf derives the JSON keys.
func Keys() any { return rawConfig{} }

// Parse reads the configuration of an ADD, CHECK or STATUS.
func Parse(r *plugin.Request) (Config, error) {
	var raw rawConfig
	if err := r.Decode(&raw); err != nil {
		return Config{}, err
	}
	c := Config{SNAT: raw.SNAT == nil || *raw.SNAT, MasqAll: raw.MasqAll, RefuseListeners: raw.RefuseHostListeners}
	for _, step := range []func(*Config, rawConfig) error{parseBackend, parseIPTables, parseConditions, parseMaxHostPorts, parseMappings} {
		if err := step(&c, raw); err != nil {
			return Config{}, err
		}
	}
	return c, nil
}

// parseBackend reads the key "backend". Without it, a key that only iptables understands selects iptables; otherwise nftables is used if
// the kernel has it.
func parseBackend(c *Config, raw rawConfig) error {
	only := iptablesOnly(raw)
	switch {
	case raw.Backend != nil && *raw.Backend != "":
		c.Backend = *raw.Backend
	case len(only) > 0:
		c.Backend = "iptables"
	default:
		c.Backend, c.Unset = "nftables", true
	}
	if c.Backend != "nftables" && c.Backend != "iptables" {
		return plugin.KeyErrorf("backend", "backend %+.80q: want nftables or iptables", c.Backend)
	}
	if c.Backend == "nftables" && len(only) > 0 {
		return plugin.KeyErrorf("backend", "backend nftables was requested, but configuration contains options of iptables: %s",
			strings.Join(only, ", "))
	}
	return nil
}

func iptablesOnly(raw rawConfig) []string {
	var keys []string
	if raw.ExternalSetMarkChain != nil {
		keys = append(keys, "externalSetMarkChain")
	}
	if raw.MarkMasqBit != nil {
		keys = append(keys, "markMasqBit")
	}
	for key, list := range map[string]*[]string{"conditionsV4": raw.ConditionsV4, "conditionsV6": raw.ConditionsV6} {
		if list != nil && len(*list) > 0 && isIPTables(*list) {
			keys = append(keys, key)
		}
	}
	slices.Sort(keys)
	return keys
}

// isIPTables reports whether the conditions have the syntax of iptables. Like the reference plugin, it looks only at the first character.
func isIPTables(conditions []string) bool {
	return strings.HasPrefix(conditions[0], "-") || strings.HasPrefix(conditions[0], "!")
}

func parseIPTables(c *Config, raw rawConfig) error {
	if c.MarkBit = defaultMarkBit; raw.MarkMasqBit != nil {
		c.MarkBit = *raw.MarkMasqBit
	}
	if c.MarkBit < 0 || c.MarkBit > 31 {
		return plugin.KeyErrorf("markMasqBit", "markMasqBit %d: want 0-31", c.MarkBit)
	}
	if raw.ExternalSetMarkChain == nil {
		return nil
	}
	if raw.MarkMasqBit != nil {
		return plugin.KeyErrorf("markMasqBit", "markMasqBit and externalSetMarkChain exclude each other")
	}
	c.MarkChain = *raw.ExternalSetMarkChain
	// The kernel limits chain names to 28 characters (XT_EXTENSION_MAXNAMELEN).
	if c.MarkChain == "" || c.MarkChain[0] == '-' || len(c.MarkChain) > 28 ||
		strings.ContainsFunc(c.MarkChain, func(r rune) bool { return !nameRune(r) }) {
		return plugin.KeyErrorf("externalSetMarkChain", "externalSetMarkChain %+.80q: want the name of an iptables chain", c.MarkChain)
	}
	return nil
}

func nameRune(r rune) bool {
	return r >= 'a' && r <= 'z' || r >= 'A' && r <= 'Z' || r >= '0' && r <= '9' || r == '-' || r == '_'
}

func parseConditions(c *Config, raw rawConfig) error {
	for _, f := range []struct {
		key      string
		list, to *[]string
	}{{"conditionsV4", raw.ConditionsV4, &c.ConditionsV4}, {"conditionsV6", raw.ConditionsV6, &c.ConditionsV6}} {
		if f.list == nil || len(*f.list) == 0 {
			continue
		}
		if !isIPTables(*f.list) {
			if c.Backend == "iptables" {
				return plugin.KeyErrorf("backend", "backend iptables was requested, but configuration contains options of nftables: %s", f.key)
			}
			return plugin.WithHint(
				plugin.WithKey(f.key, plugin.Errorf(plugin.CodeUnsupported, "%s %+.80q: this version of portmap does not support conditions of nftables", f.key, *f.list)),
				`use the iptables backend with conditions such as ["-d", "192.0.2.0/24"]`)
		}
		for _, word := range *f.list {
			if !isMatch(word) {
				return plugin.KeyErrorf(f.key, "%s: %+.80q is not allowed", f.key, word)
			}
		}
		*f.to = *f.list
	}
	return nil
}

// isMatch rejects words that are not part of an iptables match, because they could change the rule or run a program (--modprobe), and words
// that iptables-restore would quote differently.
func isMatch(word string) bool {
	if word == "" || strings.ContainsAny(word, `"\`) || strings.ContainsFunc(word, unicode.IsControl) {
		return false
	}
	name, dashed := strings.CutPrefix(word, "-")
	long, isLong := strings.CutPrefix(name, "-")
	switch {
	case !dashed || name == "":
		return true // a value
	case !isLong && name[0] >= '0' && name[0] <= '9':
		return name[0] != '4' && name[0] != '6' // a value; -4 and -6 make iptables skip the rule in the other family
	case !isLong:
		return name == "f" || strings.ContainsRune("psdiom", rune(name[0])) // -f has no value, so other options may follow it
	}
	long, _, _ = strings.Cut(long, "=")
	return !slices.Contains(iptablesCommands, long) &&
		!slices.ContainsFunc([]string{"jump", "goto", "table", "modprobe", "help", "version"},
			func(o string) bool { return strings.HasPrefix(o, long) }) // an abbreviated option
}

// iptablesCommands are the long options of iptables that are commands or control its output.
var iptablesCommands = []string{"append", "check", "delete", "insert", "replace", "list", "list-rules", "flush", "zero",
	"new-chain", "delete-chain", "rename-chain", "policy", "verbose", "wait", "wait-interval", "exact", "line-numbers",
	"set-counters", "ipv4", "ipv6"}

func parseMaxHostPorts(c *Config, raw rawConfig) error {
	c.MaxHostPorts = defaultHostPorts
	if raw.MaxHostPorts != nil {
		c.MaxHostPorts = *raw.MaxHostPorts
	}
	if c.MaxHostPorts < 1 || c.MaxHostPorts > maxHostPortsLimit {
		return plugin.KeyErrorf("maxHostPorts", "maxHostPorts %d: want 1-%d", c.MaxHostPorts, maxHostPortsLimit)
	}
	return nil
}

// checkCount fails if one address family has more than maxHostPorts ports. A range counts as one.
func (c Config) checkCount(wanted []ports.Port) error {
	four := len(ports.OfFamily(wanted, true))
	n := max(four, len(wanted)-four)
	if n <= c.MaxHostPorts {
		return nil
	}
	return plugin.WithHint(plugin.Errorf(plugin.CodeConfig, "%d hostPorts: want at most %d", n, c.MaxHostPorts),
		"raise maxHostPorts; with nftables %d or more ports in sequence that lead to the same ports of the pod count as one", ports.MinRange)
}

func parseMappings(c *Config, raw rawConfig) error {
	seen := map[ports.Port]uint16{} // the pod's port for each node port and family
	for i, m := range raw.RuntimeConfig.PortMaps {
		list, err := parseMapping(m)
		if err != nil {
			return plugin.Errorf(plugin.CodeConfig, "portMappings[%d]: %w", i, err)
		}
		for _, p := range list {
			place := p
			place.To = netip.AddrPortFrom(p.To.Addr(), 0)
			if to, ok := seen[place]; ok && to != p.To.Port() {
				return plugin.Errorf(plugin.CodeConfig, "portMappings[%d]: hostPort %d leads to containerPort %d already", i, p.Port, to)
			}
			seen[place] = p.To.Port()
		}
		c.Ports = append(c.Ports, list...)
	}
	return nil
}

// parseMapping returns a port for each address family of the entry. 0.0.0.0 and :: mean all addresses of their family.
func parseMapping(raw rawMapping) (list []ports.Port, err error) {
	if raw.HostPort < 1 || raw.HostPort > 65535 {
		return nil, plugin.Errorf(plugin.CodeConfig, "Invalid host port number: %d, want 1-65535", raw.HostPort)
	}
	if raw.ContainerPort < 1 || raw.ContainerPort > 65535 {
		return nil, plugin.Errorf(plugin.CodeConfig, "Invalid container port number: %d, want 1-65535", raw.ContainerPort)
	}
	p := ports.Port{Protocol: cmp.Or(strings.ToLower(raw.Protocol), "tcp"), Port: uint16(raw.HostPort)} // the default in Kubernetes
	if p.Number() == 0 {
		return nil, plugin.Errorf(plugin.CodeConfig, "protocol %+.80q: want tcp, udp or sctp", raw.Protocol)
	}
	families := []netip.Addr{netip.IPv4Unspecified(), netip.IPv6Unspecified()}
	if raw.HostIP != "" {
		addr, err := netip.ParseAddr(raw.HostIP)
		if err != nil || addr.Zone() != "" || addr.Is4In6() {
			return nil, plugin.Errorf(plugin.CodeConfig, "hostIP %+.80q: want an IP address", raw.HostIP)
		}
		if err := checkHostIP(addr); err != nil {
			return nil, err
		}
		families = slices.DeleteFunc(families, func(f netip.Addr) bool { return f.Is4() != addr.Is4() })
		if !addr.IsUnspecified() {
			p.HostIP = addr
		}
	}
	for _, f := range families {
		p.To = netip.AddrPortFrom(f, uint16(raw.ContainerPort))
		list = append(list, p)
	}
	return list, nil
}

// checkHostIP rejects addresses at which no client can reach a pod.
func checkHostIP(addr netip.Addr) error {
	switch {
	case addr == netip.IPv6Loopback():
		return plugin.WithHint(
			plugin.Errorf(plugin.CodeConfig, "hostIP ::1: the kernel cannot route from ::1 to a pod (IPv6 has no route_localnet)"),
			"use 127.0.0.1, or leave hostIP out")
	case addr.IsMulticast(), addr == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return plugin.Errorf(plugin.CodeConfig, "hostIP %s: want the address of an interface, not one of a group", addr)
	case addr.Is6() && addr.IsLinkLocalUnicast():
		return plugin.Errorf(plugin.CodeConfig, "hostIP %s: link-local addresses are not routed, so their clients cannot reach a pod", addr)
	}
	return nil
}

// hostPorts points each hostPort at the pod's address of the same family, and leaves out families in which the pod has no address.
func (c Config) hostPorts(pod []netip.Prefix) []ports.Port {
	var out []ports.Port
	seen := map[ports.Port]bool{}
	for _, p := range c.Ports {
		i := slices.IndexFunc(pod, func(a netip.Prefix) bool { return a.Addr().Is4() == p.Is4() })
		if i < 0 {
			continue
		}
		p.To = netip.AddrPortFrom(pod[i].Addr(), p.To.Port())
		p.SNAT, p.MasqAll = c.SNAT, c.SNAT && c.MasqAll
		if !seen[p] {
			seen[p] = true
			out = append(out, p)
		}
	}
	if c.Backend == "nftables" {
		return ports.Ranges(out)
	}
	return out
}

// podAddresses returns the first address of each family in prevResult that is on the interface or names no interface.
func podAddresses(prev *types100.Result, ifname string) []netip.Prefix {
	byFamily := map[bool]netip.Prefix{}
	for _, ip := range prev.IPs {
		p, ok := kernel.Prefix(&ip.Address)
		if _, seen := byFamily[p.Addr().Is4()]; !ok || seen {
			continue
		}
		if i := ip.Interface; i != nil {
			if *i < 0 || *i >= len(prev.Interfaces) || prev.Interfaces[*i].Name != ifname || prev.Interfaces[*i].Sandbox == "" {
				continue
			}
		}
		byFamily[p.Addr().Is4()] = p
	}
	var out []netip.Prefix
	for _, is4 := range []bool{true, false} {
		if p, ok := byFamily[is4]; ok {
			out = append(out, p)
		}
	}
	return out
}
