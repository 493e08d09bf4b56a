// SPDX-License-Identifier: Apache-2.0

// Package nodeagent implements podlace-node, the agent that connects the pods of all nodes of a cluster. It watches Kubernetes' Node
// objects, maintains this node's routes to pods on other nodes, writes node.json for the plugins, and installs these with their conflist.
// It creates only Events in Kubernetes and keeps no state of its own: the method step compares the kernel and the node's files with the
// wanted state.
package nodeagent

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"

	"github.com/podlace/podlace/pkg/agent/noderoutes"
	"github.com/podlace/podlace/pkg/cli/validate"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
	"github.com/podlace/podlace/pkg/strict"
	"github.com/podlace/podlace/pkg/yamlfile"
)

// conflistName is the conflist's file name, in the folder of the agent's configuration and in that of the runtime.
const conflistName = "10-podlace.conflist"

// config is the configuration file, which is the same on all nodes.
type config struct {
	ClusterCIDRs []netip.Prefix     `json:"clusterCIDRs"`
	Routes       bool               `json:"routes"` // false: another program connects the nodes, and the agent changes nothing in the kernel
	OffLink      noderoutes.OffLink `json:"offLink"`
	AddressCIDRs []netip.Prefix     `json:"addressCIDRs"`
	MTU          int                `json:"mtu"`
	VXLAN        noderoutes.VXLAN   `json:"vxlan"`
	BinDir       string             `json:"binDir"`  // empty: no binaries are installed
	ConfDir      string             `json:"confDir"` // empty: no conflist is written
	TakeOver     bool               `json:"takeOver"`
	Adopt        []int              `json:"adopt"` // protocols of routes that the agent may take over; in the file strings
	APIServer    string             `json:"apiServer"`

	conflist []byte   // from the file beside the configuration
	findings []string // keys of the conflist that do not have the effect that they suggest
}

func (c config) equal(other config) bool { return reflect.DeepEqual(c, other) }

// Limits of numbers in the configuration.
const (
	minMTU, maxMTU = 576, 65535
	maxVNI         = 1<<24 - 1
	maxPort        = 65535
)

// offLinks returns the valid values of the key offLink.
func offLinks() []noderoutes.OffLink {
	return []noderoutes.OffLink{noderoutes.OffLinkRefuse, noderoutes.OffLinkVXLAN, noderoutes.OffLinkFabric}
}

func defaults() config {
	return config{Routes: true, OffLink: noderoutes.OffLinkRefuse, VXLAN: noderoutes.VXLAN{VNI: 142, Port: 8472},
		BinDir: "/opt/cni/bin", ConfDir: "/etc/cni/net.d"}
}

// readConfig reads the configuration file and the conflist beside it. Its error has the file, line and key of each mistake.
func readConfig(file string) (c config, err error) {
	data, err := store.ReadFile(file)
	if err != nil {
		return c, fmt.Errorf("read the configuration: %w", err)
	}
	if c, err = parseConfig(file, data); err != nil || c.ConfDir == "" {
		return c, err
	}
	path := filepath.Join(filepath.Dir(file), conflistName)
	if c.conflist, err = store.ReadFile(path); err != nil {
		return c, fmt.Errorf(`read the conflist ("confDir": "" disables it): %w`, err)
	}
	r := &strict.Report{File: path}
	if root, ok := r.ParseJSON(c.conflist); ok {
		if _, err := pluginTypes(c.conflist); err != nil {
			r.Fail(root.Place, "%v", err)
		}
	}
	if err := r.Err(); err != nil {
		return c, err
	}
	for _, p := range validate.Files([]yamlfile.File{{Name: path, Data: c.conflist}}, validate.Node{}) {
		c.findings = append(c.findings, plugin.Plain(p.String(), 300))
	}
	return c, nil
}

// reload reads the configuration again, and reports whether there are changes to apply. An invalid configuration becomes a problem, and the
// agent keeps the previous one.
func (a *agent) reload() (changed bool) {
	defer func() {
		for _, text := range a.config.findings {
			a.addProblem("conflist", errors.New(text), "correct "+conflistName+" in the ConfigMap or the file", false)
		}
	}()
	c, err := readConfig(a.Config)
	if err != nil {
		if a.refusal != err.Error() {
			a.log.Error("the new configuration is invalid: the previous one stays in use until the file is corrected", "error", err)
		}
		a.refusal = err.Error()
		a.addProblem("configuration", err, "correct the ConfigMap or the file; until then the previous configuration applies", false)
		return false
	}
	a.refusal = ""
	news := !c.equal(a.inFile)
	a.inFile = c
	if news {
		a.log.Info("the configuration has changed", "file", a.Config)
	}
	if c.Routes != a.config.Routes || c.APIServer != a.config.APIServer || c.BinDir != a.config.BinDir || c.ConfDir != a.config.ConfDir {
		later := errors.New("routes, apiServer, binDir and confDir take effect at the next start of podlace-node")
		if news {
			a.log.Warn(later.Error(), "file", a.Config)
		}
		a.addProblem("configuration", later, "restart podlace-node on this node", false)
		if c.ConfDir == "" { // without confDir no conflist is read
			c.conflist, c.findings = a.config.conflist, a.config.findings
		}
		c.Routes, c.APIServer, c.BinDir, c.ConfDir = a.config.Routes, a.config.APIServer, a.config.BinDir, a.config.ConfDir
	}
	changed = !c.equal(a.config)
	a.config = c
	return changed
}

// parseConfig parses a configuration file. Its error has all mistakes.
func parseConfig(file string, data []byte) (config, error) {
	c := defaults()
	r := &strict.Report{File: file}
	if root, ok := r.ParseJSON(data); ok {
		r.Object(root, c.fields(r))
	}
	return c, r.Err()
}

// fields returns the keys of the configuration file, with functions that store their values in c.
func (c *config) fields(r *strict.Report) strict.Fields {
	return strict.Fields{
		"clusterCIDRs": strict.ListTo(r, &c.ClusterCIDRs, parsePodCIDR),
		"routes":       r.Bool(&c.Routes),
		"offLink":      strict.To(r, &c.OffLink, strict.OneOf(offLinks()...)),
		"addressCIDRs": strict.ListTo(r, &c.AddressCIDRs, parseCIDR),
		"mtu": strict.To(r, &c.MTU, func(text json.Number) (int, error) {
			n, err := strict.Between(minMTU, maxMTU)(text)
			if text == "0" {
				return 0, nil
			} else if err != nil {
				err = fmt.Errorf("%w, or 0 for the MTU of the uplink", err)
			}
			return n, err
		}),
		"vxlan": func(v strict.Value) {
			r.Object(v, strict.Fields{
				"vni":  strict.To(r, &c.VXLAN.VNI, strict.Between(1, maxVNI)),
				"port": strict.To(r, &c.VXLAN.Port, strict.Between(1, maxPort)),
			})
		},
		"binDir":    strict.To(r, &c.BinDir, parseFolder),
		"confDir":   strict.To(r, &c.ConfDir, parseFolder),
		"takeOver":  r.Bool(&c.TakeOver),
		"adopt":     strict.ListTo(r, &c.Adopt, parseProtocol),
		"apiServer": strict.To(r, &c.APIServer, parseURL),
	}
}

func parseCIDR(text string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(text)
	switch {
	case err != nil || p.Addr().Is4In6():
		return p, fmt.Errorf("%+.80q: want a CIDR such as 10.244.0.0/16 or fd00::/48", text)
	case p.Bits() == 0:
		return p, fmt.Errorf("%s covers all addresses of its family: want the CIDR of the cluster, such as 10.244.0.0/16", p)
	case p != p.Masked():
		return p, fmt.Errorf("%s has host bits set: want %s", p, p.Masked())
	}
	return p, nil
}

// parsePodCIDR refuses CIDRs with addresses that pods cannot have: useClusterCidr would otherwise exempt connections from the masquerading
// that they need.
func parsePodCIDR(text string) (netip.Prefix, error) {
	p, err := parseCIDR(text)
	if r, ok := noderoutes.ForPods(p); err == nil && !ok {
		err = fmt.Errorf("%s overlaps %s, which pods cannot use: want the CIDR of the cluster, such as 10.244.0.0/16", p, r)
	}
	return p, err
}

// parseFolder refuses a relative path, because users do not know the agent's working directory.
func parseFolder(path string) (string, error) {
	if path != "" && (!filepath.IsAbs(path) || path != filepath.Clean(path)) {
		return "", fmt.Errorf("%+.80q: want an absolute path, or an empty string for none", path)
	}
	return path, nil
}

func parseURL(text string) (string, error) {
	u, err := url.Parse(text)
	if text != "" && (err != nil || u.Host == "" || u.Scheme != "https" && u.Scheme != "http") {
		return "", fmt.Errorf("%+.80q: want a URL such as https://192.0.2.1:6443", text)
	}
	return text, nil
}

// parseProtocol returns the number of a routing protocol. It refuses those of the kernel and of Podlace, whose routes must never be taken
// over.
func parseProtocol(name string) (int, error) {
	known := map[string]int{"boot": 3, "static": 4} // /etc/iproute2/rt_protos
	n, err := known[name], error(nil)
	if n == 0 {
		n, err = strconv.Atoi(name)
	}
	if err == nil && n == noderoutes.Protocol {
		return 0, fmt.Errorf("%q is the protocol of Podlace's own routes: want boot, static, or the number of another routing protocol, 3 to 255", name)
	}
	if err != nil || n < 3 || n > 255 {
		return 0, fmt.Errorf("%+.80q: want boot, static, or the number of a routing protocol, 3 to 255", name)
	}
	return n, nil
}

// pluginTypes returns the plugin types in a conflist, which are the file names of the binaries.
func pluginTypes(conflist []byte) (types []string, err error) {
	var list struct {
		Name    string `json:"name"`
		Plugins []struct {
			Type string `json:"type"`
		} `json:"plugins"`
	}
	err = json.Unmarshal(conflist, &list)
	for _, p := range list.Plugins {
		types = append(types, p.Type)
	}
	if err != nil || list.Name == "" || len(types) == 0 || slices.Contains(types, "") {
		return nil, errNoConflist
	}
	return types, nil
}

var errNoConflist = errors.New(`want a CNI configuration such as {"cniVersion": "1.0.0", "name": "podlace", "plugins": [{"type": "podlace-pod"}]}`)
