// SPDX-License-Identifier: Apache-2.0

package hostlocal

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"slices"
	"strings"

	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"

	"github.com/podlace/podlace/pkg/ipam"
	"github.com/podlace/podlace/pkg/plugin"
)

// DefaultDir contains the lease folders of all networks without a dataDir.
const DefaultDir = "/var/lib/cni/networks"

// Config is the validated configuration of one request.
type Config struct {
	Dir      string // lease folder of this network
	Sets     []RangeSet
	Routes   []*types.Route
	DNS      types.DNS
	Strict   bool // STATUS fails if a set is exhausted
	requests []request
}

// request is an address that a pod requests. The lowest rank takes precedence: by CONVENTIONS.md of CNI, "args" precedes CNI_ARGS.
type request struct {
	addr netip.Addr
	rank int
}

type rawConfig struct {
	IPAM struct {
		rawRange
		Type         string       `json:"type"`
		Ranges       [][]rawRange `json:"ranges"`
		Routes       []rawRoute   `json:"routes"`
		DataDir      string       `json:"dataDir"`
		ResolvConf   string       `json:"resolvConf"`
		StrictStatus bool         `json:"strictStatus"`
	} `json:"ipam"`
	RuntimeConfig struct {
		IPRanges [][]rawRange `json:"ipRanges"`
		IPs      []string     `json:"ips"`
	} `json:"runtimeConfig"`
	Args struct {
		CNI struct {
			IPs []string `json:"ips"`
		} `json:"cni"`
	} `json:"args"`
}

// Parse reads and validates the configuration of ADD, CHECK or STATUS.
func Parse(r *plugin.Request) (Config, error) {
	var raw rawConfig
	if err := r.DecodeWithin("ipam", &raw); err != nil {
		return Config{}, err
	}
	cfg := Config{Dir: LeaseDir(r.Network, raw.IPAM.DataDir), Strict: raw.IPAM.StrictStatus}
	var errs []error
	add := func(err error) { errs = append(errs, plugin.WithKey("ipam", err)) }
	if raw.IPAM.DataDir != "" && !filepath.IsAbs(raw.IPAM.DataDir) {
		add(plugin.KeyErrorf("dataDir", "ipam dataDir %q: want an absolute path", raw.IPAM.DataDir))
	}
	sets, partial := parseSets(r, raw, add)
	cfg.Sets = sets
	add(checkPerFamily(r.CNIVersion, cfg.Sets))
	cfg.requests = parseRequests(r, raw, add)
	cfg.Routes = parseRoutes(raw.IPAM.Routes, add)
	if raw.IPAM.ResolvConf != "" {
		dns, err := readResolvConf(raw.IPAM.ResolvConf)
		add(plugin.WithKey("resolvConf", err))
		cfg.DNS = dns
	}
	if err := errors.Join(errs...); err != nil {
		return Config{}, err
	}
	if partial {
		cfg.Routes = slices.DeleteFunc(cfg.Routes, cfg.hasNoAddressFor)
	}
	return cfg, nil
}

// parseDir returns the lease folder for DEL and GC, which use the default in place of an invalid value.
func parseDir(r *plugin.Request) string { return LeaseDir(r.Network, dataDirOf(ipam.Object(r.Config))) }

func dataDirOf(object json.RawMessage) string {
	var raw struct {
		DataDir string `json:"dataDir"`
	}
	_ = json.Unmarshal(object, &raw)
	return raw.DataDir
}

// LeaseDir returns the folder of a network's leases. An empty dataDir means DefaultDir.
func LeaseDir(network, dataDir string) string {
	if dataDir == "" {
		dataDir = DefaultDir
	}
	return filepath.Join(dataDir, network)
}

// rangeLists returns the ranges in order: those of the runtime, the one directly in "ipam", and those in the key "ranges".
func (raw rawConfig) rangeLists() [][]rawRange {
	lists := raw.RuntimeConfig.IPRanges
	if raw.IPAM.Subnet != "" {
		lists = append(lists, []rawRange{raw.IPAM.rawRange})
	}
	for i, list := range raw.IPAM.Ranges {
		for k := range list {
			list[k].Key = fmt.Sprintf("ranges[%d][%d]", i, k)
		}
	}
	return append(lists, raw.IPAM.Ranges...)
}

// hasNoAddressFor reports whether no range set has the family of a route, so that pods get no address of it.
func (c Config) hasNoAddressFor(route *types.Route) bool {
	is4 := route.Dst.IP.To4() != nil
	return !slices.ContainsFunc(c.Sets, func(s RangeSet) bool { return s.is4() == is4 })
}

// parseSets returns the range sets, or none after an error. partial is true if a family is left out because the node has no podCIDR for it.
func parseSets(r *plugin.Request, raw rawConfig, fail func(error)) (sets []RangeSet, partial bool) {
	lists := raw.rangeLists()
	if len(lists) == 0 {
		fail(plugin.WithHint(plugin.Errorf(plugin.CodeConfig, "ipam: no IP ranges specified"), `give "ranges": [[{"subnet": "10.58.0.0/16"}]]`))
	}
	lists, partial, err := resolvePodCIDRs(r, lists)
	fail(err)
	sets = make([]RangeSet, len(lists))
	for i, list := range lists {
		for _, raw := range list {
			r, wrong := parseRange(raw)
			fail(plugin.WithKey(raw.Key, wrong))
			err = cmp.Or(err, wrong)
			sets[i] = append(sets[i], r)
		}
	}
	if err == nil {
		err = checkSets(sets)
		fail(err)
	}
	if err != nil {
		return nil, false
	}
	return sets, partial
}

// checkPerFamily fails if pods get several addresses of one family with a CNI version before 0.3.0.
func checkPerFamily(v string, sets []RangeSet) error {
	n := map[bool]int{}
	for _, s := range sets {
		n[s.is4()]++
	}
	if ok, _ := version.GreaterThanOrEqualTo(v, "0.3.0"); !ok && max(n[true], n[false]) > 1 {
		return plugin.Errorf(plugin.CodeConfig, "CNI version %s does not support more than 1 address per family", v)
	}
	return nil
}

func parseRequests(r *plugin.Request, raw rawConfig, fail func(error)) (requests []request) {
	for rank, source := range [][]string{raw.RuntimeConfig.IPs, raw.Args.CNI.IPs, strings.Fields(r.Args["IP"])} {
		for _, s := range source {
			bare, _, _ := strings.Cut(s, "/")
			addr, err := netip.ParseAddr(bare)
			if err != nil || addr.Zone() != "" {
				fail(plugin.Errorf(plugin.CodeConfig, "requested address %q: want an IP address", s))
			}
			requests = append(requests, request{addr.Unmap(), rank})
		}
	}
	return requests
}
