// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/reconcile"
	"github.com/podlace/podlace/pkg/validate"
)

const noNetwork = "no configuration names a plugin of Podlace"

// isOurs reports whether a network's main plugin is bridge or sriov. The type name may have the prefix of cluster installations. The
// reference plugins have the same names, so the check of binaries finds out to which project the program belongs.
func isOurs(net reconcile.Network) bool {
	main := plugin.Kind(net.Plugins[0].Type)
	return main == "bridge" || main == "sriov"
}

// The check conflist reports configurations that the runtime does not use.
func (n *node) conflist() (found []Finding) {
	switch {
	case errors.Is(n.confErr, fs.ErrNotExist):
		return []Finding{{Level: Error, What: "there is no folder " + n.ConfDir, Evidence: n.confErr.Error(),
			Consequence: "the node stays NotReady, no pod gets a network",
			Command:     "install -D -m 600 conf/10-podlace.conflist " + n.ConfDir + "/10-podlace.conflist"}}
	case n.confErr != nil:
		return unknown("the network configurations", n.confErr)
	}
	for _, note := range n.notes {
		found = append(found, Finding{Level: Warning, What: "a configuration file cannot be used", Evidence: note,
			Consequence: "runtimes skip it; CRI-O and old versions of containerd stop at it",
			Command:     "correct the file, or rename it so that it does not end in .conf, .conflist or .json"})
	}
	ours := slices.IndexFunc(n.networks, isOurs)
	switch {
	case ours < 0:
		found = append(found, Finding{Level: Error, What: noNetwork, Evidence: n.listNetworks(),
			Consequence: "pods get another network, or none",
			Command:     "install -m 600 conf/10-podlace.conflist " + n.ConfDir + "/"})
	case ours > 0 && !n.takesAll():
		first := n.networks[0]
		found = append(found, Finding{Level: Error, What: "the runtime takes another configuration than Podlace's",
			Evidence:    fmt.Sprintf("%s sorts before %s", first.File, n.networks[ours].File),
			Consequence: fmt.Sprintf("new pods get the network %q", first.Name),
			Command:     fmt.Sprintf("mv %s %s.unused", first.File, first.File)})
	}
	found = append(found, n.defaultNetwork()...)
	return append(found, n.permissions()...)
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

// takesAll reports whether a runtime loads the configurations of several networks. A runtime of this kind also loads configuration files
// after the first one.
func (n *node) takesAll() bool {
	return slices.ContainsFunc(n.runtimes, func(r runtimeConfig) bool { return r.Network != "" })
}

// defaultNetwork reports a cni_default_network in CRI-O's configuration if it does not name a network of Podlace.
func (n *node) defaultNetwork() (found []Finding) {
	for _, r := range n.runtimes {
		named := func(net reconcile.Network) bool { return net.Name == r.Network && isOurs(net) }
		if r.Network != "" && !slices.ContainsFunc(n.networks, named) {
			found = append(found, Finding{Level: Error, What: r.Name + " takes a network that is not Podlace's",
				Evidence:    fmt.Sprintf("%s: cni_default_network = %q; %s", r.File, r.Network, n.listNetworks()),
				Consequence: "new pods get that network, or fail if no configuration has it",
				Command:     "remove cni_default_network from " + r.File + " and restart " + r.Name})
		}
	}
	return found
}

// The function permissions reports configurations that users other than root can write.
func (n *node) permissions() (found []Finding) {
	for _, net := range n.networks {
		info, err := os.Stat(net.File)
		if err != nil || info.Mode().Perm()&0o022 == 0 {
			continue
		}
		found = append(found, Finding{Level: Warning, What: "other users than root can change a network configuration",
			Evidence:    fmt.Sprintf("%s has the mode %04o", net.File, info.Mode().Perm()),
			Consequence: "such a user can make the runtime start any plugin with any configuration as root",
			Command:     "chmod 600 " + net.File,
			fix:         func() error { return os.Chmod(net.File, 0o600) }})
	}
	return found
}

// The check conflistKeys reports settings that have another effect than they suggest, and pod subnets that overlap the node's subnets.
func (n *node) conflistKeys() (found []Finding) {
	if len(n.networks) == 0 {
		return skipped("there is no configuration")
	}
	this, err := validate.ThisNode()
	if err != nil {
		found = unknown("the subnets of the node", err)
	}
	for _, net := range n.networks {
		for _, f := range validate.Config(net.Text, this) {
			found = append(found, Finding{Level: Warning, What: net.File + ": " + f.Key, Evidence: f.Text,
				Consequence: "the setting does not have the effect that it suggests", Command: "edit " + net.File})
		}
	}
	return found
}

// ownNetworks returns the networks whose main plugin isOurs accepts.
func (n *node) ownNetworks() []reconcile.Network {
	return slices.DeleteFunc(slices.Clone(n.networks), func(net reconcile.Network) bool { return !isOurs(net) })
}

// pluginTypes returns the names of all plugins in Podlace's networks, including the IPAM plugins.
func (n *node) pluginTypes() (types []string) {
	for _, net := range n.ownNetworks() {
		for _, p := range net.Plugins {
			types = append(types, p.Type)
			if p.IPAM != "" {
				types = append(types, p.IPAM)
			}
		}
	}
	slices.Sort(types)
	return slices.Compact(types)
}

// The check binaries reports plugins that are missing, that belong to another project, or that have another version than the others.
func (n *node) binaries() (found []Finding) {
	types := n.pluginTypes()
	if len(types) == 0 {
		return skipped(noNetwork)
	}
	found = n.loopback()
	versions := map[string][]string{}
	for _, name := range types {
		path := filepath.Join(n.BinDir, name)
		version, err := reconcile.Version(path)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			found = append(found, Finding{Level: Error, What: "the plugin " + name + " is missing", Evidence: err.Error(),
				Consequence: "no pod starts", Command: n.installCommand(name)})
		case errors.Is(err, reconcile.ErrForeign):
			found = append(found, Finding{Level: Warning, What: "the plugin " + name + " is not Podlace's", Evidence: err.Error(),
				Consequence: "keys that only Podlace's plugin knows have no effect, and its errors are not Podlace's",
				Command:     "make install CNI_BIN_DIR=" + n.BinDir})
		case err != nil:
			found = append(found, Finding{Level: Error, What: "the plugin " + name + " does not start", Evidence: err.Error(),
				Consequence: "no pod starts", Command: startCommand(path, err)})
		default:
			versions[version] = append(versions[version], name)
		}
	}
	if len(versions) > 1 {
		found = append(found, Finding{Level: Warning, What: "the plugins have different versions", Evidence: versionsText(versions),
			Consequence: "an older plugin may refuse a record of a newer one", Command: "make install CNI_BIN_DIR=" + n.BinDir})
	}
	return found
}

// The check status calls STATUS of each plugin in Podlace's networks, as a runtime does.
func (n *node) status() (found []Finding) {
	if len(n.pluginTypes()) == 0 {
		return skipped(noNetwork)
	}
	for _, net := range n.ownNetworks() {
		for _, err := range reconcile.Status(net, n.BinDir) {
			found = append(found, Finding{Level: Error, What: fmt.Sprintf("network %q is not ready", net.Name), Evidence: err.Error(),
				Consequence: "containerd from 2.0 and CRI-O report the node NotReady",
				Command:     "podlace explain CODE tells what a code means"})
		}
	}
	return found
}
