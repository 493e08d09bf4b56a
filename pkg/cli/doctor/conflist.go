// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/cli/reconcile"
	"github.com/podlace/podlace/pkg/cli/validate"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/yamlfile"
)

const noNetwork = "no configuration names a plugin of Podlace"

// isOurs reports whether a network's main plugin is bridge or sriov, also with the prefix "podlace-". The reference plugins have the same
// type names, so the check "binaries" finds out whose the binary is.
func isOurs(net reconcile.Network) bool {
	main := net.Main()
	return main == "bridge" || main == "sriov"
}

// conflist reports configurations that the runtime does not use.
func (n *node) conflist() (found []Finding) {
	switch {
	case errors.Is(n.confErr, fs.ErrNotExist):
		return []Finding{n.unlessAgent(Finding{Level: Error, Code: "no-conf-dir", What: "there is no folder " + n.ConfDir,
			Evidence: n.confErr.Error(), Consequence: "the node stays NotReady, no pod gets a network",
			Command: n.conflistCommand("install -D -m 600 ")})}
	case n.confErr != nil:
		return unknown("the network configurations", n.confErr)
	}
	for _, note := range n.notes {
		found = append(found, Finding{Level: Warning, Code: "unusable-file", What: "a configuration file cannot be used", Evidence: note,
			Consequence: "runtimes skip it; CRI-O and old versions of containerd stop at it",
			Command:     "correct the file, or rename it so that it does not end in .conf, .conflist or .json"})
	}
	switch {
	case !slices.ContainsFunc(n.networks, isOurs):
		found = append(found, n.unlessAgent(Finding{Level: Error, Code: "no-network", What: noNetwork, Evidence: n.listNetworks(),
			Consequence: "pods get another network, or none",
			Command:     n.conflistCommand("install -m 600 ")}))
	case n.hidden() > 0 && !n.namesDefault() && !n.multusTakesOurs():
		first, hidden := n.networks[0], n.networks[n.hidden()]
		f := Finding{Level: map[bool]Level{true: Warning, false: Error}[isOurs(first)], Code: "other-network",
			What:        fmt.Sprintf("the runtime does not take the network %q", hidden.Name),
			Evidence:    fmt.Sprintf("%s sorts before %s", first.File, hidden.File),
			Consequence: fmt.Sprintf("new pods get the network %q", first.Name),
			Command:     fmt.Sprintf("drain the node, and then: mv %s %[1]s.unused; the runtime calls DEL with the file that sorts first", first.File)}
		if n.hasMultus() {
			f.Consequence = "Multus hands new pods to another network"
			f.Command = fmt.Sprintf(`write "clusterNetwork": %q instead of "delegates" into %s`, hidden.Name, first.File)
		}
		found = append(found, f)
	}
	found = slices.Concat(found, n.defaultNetwork(), n.permissions())
	if len(found) == 0 && len(n.networks) > 1 && !n.takesAll() {
		return []Finding{{Level: OK, What: fmt.Sprintf("of all networks, the runtime takes %q in %s", n.networks[0].Name, n.networks[0].File)}}
	}
	return found
}

// hidden returns the index of a network that the first file hides, or 0. That is only one with our shipped name or with running pods whose
// default interface it made, because other networks with bridge may be of podman, or there for Multus.
func (n *node) hidden() int {
	return 1 + slices.IndexFunc(n.networks[1:], func(net reconcile.Network) bool {
		hasPod := func(a *reconcile.Attachment) bool {
			return a.Network == net.Name && a.IfName == "eth0" && !a.Since.IsZero()
		}
		shipped := net.Name == "podlace" || !isOurs(n.networks[0]) && strings.HasPrefix(filepath.Base(net.File), "10-podlace")
		return isOurs(net) && (shipped || slices.ContainsFunc(n.attachmentsIn(reconcile.Alive), hasPod))
	})
}

// unlessAgent turns the error about a missing configuration into a warning if podlace-node runs or has run, because it writes the file.
func (n *node) unlessAgent(f Finding) Finding {
	if _, err := readAgentStatus(); n.running["podlace-node"] || err == nil {
		f.Level, f.Command = Warning, "podlace-node status, in the pod of podlace-node or on the node, shows what it waits for"
	}
	return f
}

func (n *node) listNetworks() string {
	list := []string{n.ConfDir + " is empty"}
	if len(n.notes) > 0 {
		list[0] = "no file in " + n.ConfDir + " can be used"
	}
	for i, net := range n.networks {
		list = append(list[:i], fmt.Sprintf("%s: network %q with %s", net.File, net.Name, net.Plugins[0].Type))
	}
	return strings.Join(list, "; ")
}

// takesAll reports whether a runtime on this node loads the configurations of several networks, as CRI-O does with cni_default_network.
// Others load only the first file, which may be of Multus.
func (n *node) takesAll() bool {
	return n.hasMultus() || n.namesDefault()
}

// namesDefault reports whether a runtime's configuration names the network of pods.
func (n *node) namesDefault() bool {
	return slices.ContainsFunc(n.runtimes, func(r runtimeConfig) bool { return r.Network != "" })
}

// hasMultus reports whether the first configuration is of Multus, which can attach pods to any other network.
func (n *node) hasMultus() bool {
	if len(n.networks) == 0 {
		return false
	}
	isMultus, _ := reconcile.MultusNetwork(n.networks[0].Text, "", "")
	return isMultus
}

// multusTakesOurs reports whether the first configuration is of Multus and hands pods to a network of Podlace by default.
func (n *node) multusTakesOurs() bool {
	return slices.ContainsFunc(n.networks[1:], func(net reconcile.Network) bool {
		isMultus, takes := reconcile.MultusNetwork(n.networks[0].Text, net.Name, filepath.Base(net.File))
		return isMultus && takes && isOurs(net)
	})
}

// defaultNetwork reports a cni_default_network in CRI-O's configuration that is no Podlace network.
func (n *node) defaultNetwork() (found []Finding) {
	for _, r := range n.runtimes {
		named := func(net reconcile.Network) bool { return net.Name == r.Network && isOurs(net) }
		if r.Network != "" && !slices.ContainsFunc(n.networks, named) {
			found = append(found, Finding{Level: Error, Code: "default-network", What: r.Name + " takes a network that is not Podlace's",
				Evidence:    fmt.Sprintf("%s: cni_default_network = %q; %s", r.setter, r.Network, n.listNetworks()),
				Consequence: "new pods get that network, or fail if no configuration has it",
				Command:     "remove cni_default_network from " + r.setter + " and restart " + r.Name})
		}
	}
	return found
}

// permissions reports configuration files that users other than root can write.
func (n *node) permissions() (found []Finding) {
	for _, net := range n.networks {
		info, err := os.Stat(net.File)
		if err != nil || info.Mode().Perm()&0o022 == 0 {
			continue
		}
		found = append(found, Finding{Level: Warning, Code: "writable-file", What: "other users than root can change a network configuration",
			Evidence:    fmt.Sprintf("%s has the mode %04o", net.File, info.Mode().Perm()),
			Consequence: "such a user can make the runtime start any plugin with any configuration as root",
			Command:     "chmod go-w " + net.File,
			Fix:         func() error { return os.Chmod(net.File, info.Mode().Perm()&^0o022) }})
	}
	return found
}

// conflistKeys reports settings whose names suggest another effect, and pod subnets that overlap the node's.
func (n *node) conflistKeys() (found []Finding) {
	if len(n.networks) == 0 {
		return skipped("there is no configuration")
	}
	this, err := validate.ThisNode()
	found = unknown("the subnets of the node", err)
	var files []yamlfile.File
	for _, net := range n.networks {
		files = append(files, yamlfile.File{Name: net.File, Data: net.Text})
	}
	for _, p := range validate.Files(files, this) {
		f := Finding{Level: Warning, Code: p.Code, What: p.Where(), Evidence: p.Text, File: p.File, Line: p.Line, Column: p.Column,
			Consequence: "the setting does not have the effect that it suggests", Command: fmt.Sprintf("edit line %d of %s", p.Line, p.File)}
		unused := !slices.ContainsFunc(n.ownNetworks(), func(net reconcile.Network) bool { return net.File == p.File })
		switch {
		case p.Error && unused:
			f.Consequence = "no pod of this network would start; the runtime does not use it"
		case p.Error:
			f.Level, f.Consequence = Error, "no pod of this network starts"
		}
		found = append(found, f)
	}
	return found
}

// ownNetworks returns the networks with bridge or sriov that pods use: those that a runtime or Multus takes, and those with a record.
// Others may be of podman, which has a folder of plugins of its own.
func (n *node) ownNetworks() (own []reconcile.Network) {
	for _, net := range n.networks {
		first := len(own) == 0 && !n.takesAll()
		named := func(r runtimeConfig) bool { return r.Network == net.Name }
		if isOurs(net) && (first || n.hasMultus() || slices.ContainsFunc(n.runtimes, named) || n.hasRecord(net.Name)) {
			own = append(own, net)
		}
	}
	return own
}

// isOwn reports whether a network is Podlace's, also if it has no configuration any more.
func (n *node) isOwn(network string) bool {
	return n.hasRecord(network) || slices.ContainsFunc(n.ownNetworks(), func(net reconcile.Network) bool { return net.Name == network })
}

func (n *node) hasRecord(network string) bool {
	return slices.ContainsFunc(n.attachments, func(a *reconcile.Attachment) bool { return a.Network == network && !a.Since.IsZero() })
}

// pluginTypes returns the plugin binaries that Podlace's networks need, including IPAM plugins. host-local is left out if it runs inside
// Podlace's bridge or sriov, because no file is necessary then.
func (n *node) pluginTypes() (types []string) {
	for _, net := range n.ownNetworks() {
		for _, p := range net.Plugins {
			types = append(types, p.Type)
			if p.IPAM != "" && !n.runsInProcess(p.IPAM, p.Type) {
				types = append(types, p.IPAM)
			}
		}
	}
	slices.Sort(types)
	return slices.Compact(types)
}

// runsInProcess reports whether the IPAM plugin runs inside the process of the main plugin.
func (n *node) runsInProcess(ipam, main string) bool {
	if plugin.Kind(ipam) != "host-local" {
		return false
	}
	_, err := reconcile.Version(filepath.Join(n.BinDir, main))
	return !errors.Is(err, reconcile.ErrForeign)
}

// binaries reports plugins that are missing, another project's, or of another version than the rest.
func (n *node) binaries() (found []Finding) {
	types := n.pluginTypes()
	found = n.cachedPlugins(types)
	if len(types) == 0 {
		return append(found, skipped(noNetwork)...)
	}
	found = append(found, n.loopback()...)
	versions := map[string][]string{}
	for _, name := range types {
		path := filepath.Join(n.BinDir, name)
		version, err := reconcile.Version(path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			found = append(found, Finding{Level: Error, Code: "plugin-missing", What: "the plugin " + name + " is missing", Evidence: err.Error(),
				Consequence: "no pod starts", Command: n.installCommand(name)})
		case errors.Is(err, reconcile.ErrForeign) && !hasPlugin(name): // such as tuning
		case errors.Is(err, reconcile.ErrForeign):
			found = append(found, Finding{Level: Warning, Code: "plugin-foreign",
				What: "the plugin " + name + " is not Podlace's", Evidence: err.Error(),
				Consequence: "keys that only Podlace's plugin knows have no effect, and its errors are not Podlace's",
				Command:     n.makeInstall(n.BinDir)})
		case err != nil:
			found = append(found, Finding{Level: Error, Code: "plugin-broken", What: "the plugin " + name + " does not start", Evidence: err.Error(),
				Consequence: "no pod starts", Command: startCommand(path, err)})
		default:
			versions[version] = append(versions[version], name)
		}
	}
	if len(versions) > 1 {
		found = append(found, Finding{Level: Warning, Code: "plugin-versions",
			What: "the plugins have different versions", Evidence: versionsText(versions),
			Consequence: "an older plugin may refuse a record of a newer one", Command: n.installCommand(types[0])})
	}
	return found
}

// cachedPlugins reports missing plugins that only libcni's cache of a pod names. CRI-O and podman delete a pod with the configuration in
// the cache, containerd with the current one.
func (n *node) cachedPlugins(known []string) (found []Finding) {
	if len(n.runtimes) > 0 && !slices.ContainsFunc(n.runtimes, func(r runtimeConfig) bool { return r.Name != "containerd" }) {
		return nil
	}
	var types []string
	for _, kind := range plugin.Kinds() {
		types = append(types, plugin.TypesOf(kind)...)
	}
	for _, user := range reconcile.Users(nil, types...) {
		if slices.Contains(known, user.Plugin) || !strings.HasPrefix(user.Plugin, plugin.ClusterPrefix) && !n.isOwn(user.Network) {
			continue
		}
		known = append(known, user.Plugin)
		if _, err := os.Stat(filepath.Join(n.BinDir, user.Plugin)); err != nil {
			found = append(found, Finding{Level: Warning, Code: "plugin-missing", What: "the plugin " + user.Plugin + " is missing",
				Evidence:    user.File + " names it, and " + err.Error(),
				Consequence: "CRI-O and podman cannot delete this pod",
				Command:     n.installCommand(user.Plugin)})
		}
	}
	return found
}

// status calls STATUS of each plugin in Podlace's networks, as a runtime does.
func (n *node) status() (found []Finding) {
	if len(n.pluginTypes()) == 0 {
		return skipped(noNetwork)
	}
	n.beforeStatus = map[string][]Finding{"ports": n.ports(), "rules": n.rules()}
	for _, net := range n.ownNetworks() {
		for _, err := range reconcile.Status(net, n.BinDir) {
			var code plugin.FindingCode
			if refusal, ok := errors.AsType[reconcile.Refusal](err); ok {
				code = plugin.FindingCode(fmt.Sprint(refusal.Code))
			}
			found = append(found, Finding{Level: Error, Code: code, What: fmt.Sprintf("network %q is not ready", net.Name), Evidence: err.Error(),
				Consequence: "containerd from 2.0 and CRI-O report the node NotReady",
				Command:     addressesCommand(err, "podlace explain "+string(cmp.Or(code, "status")))})
		}
	}
	return found
}
