// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/hostlocal"
	"github.com/podlace/podlace/pkg/nodefile"
	"github.com/podlace/podlace/pkg/plugin"
)

// loopback returns a finding if the runtime starts the loopback plugin, which it does although no configuration names it, and the plugin is
// missing. Another project's is accepted.
func (n *node) loopback() []Finding {
	path := filepath.Join(n.BinDir, "loopback")
	starts := func(r runtimeConfig) bool { return r.Name == "containerd" && !r.InternalLoopback }
	if _, err := os.Stat(path); err == nil || !slices.ContainsFunc(n.runtimes, starts) {
		return nil
	}
	return []Finding{{Level: Error, Code: "plugin-missing", What: "the plugin loopback is missing",
		Evidence:    "containerd starts it for each pod; there is no " + path,
		Consequence: "no pod starts",
		Command:     n.installCommand("loopback")}}
}

// installCommand returns the remedy for a missing plugin. Those with the prefix "podlace-" come from podlace-node, except podlace-pod,
// which has this name everywhere, and it adds a missing loopback. Podlace cannot install other projects' plugins.
func (n *node) installCommand(name string) string {
	byAgent := strings.HasPrefix(name, plugin.ClusterPrefix)
	if name == plugin.PodType || name == "loopback" {
		_, err := readAgentStatus()
		byAgent = !errors.Is(err, fs.ErrNotExist)
	}
	if byAgent {
		return "podlace-node status, in the pod of podlace-node or on the node, shows why podlace-node does not install it"
	}
	if hasPlugin(name) {
		return n.makeInstall(n.BinDir)
	}
	return fmt.Sprintf("Podlace has no plugin %s: correct the type in %s, or install the plugin of its project into %s", name, n.ConfDir, n.BinDir)
}

func hasPlugin(name string) bool {
	return slices.Contains(plugin.Kinds(), plugin.Kind(name))
}

// packagedPlugins is where the deb and the rpm install the plugins.
const packagedPlugins = "/usr/libexec/podlace/cni"

// makeInstall returns the remedy that makes the runtime find the plugins. With the deb or the rpm it changes the runtime's configuration,
// because there is no source tree for 'make install'.
func (n *node) makeInstall(binDir string) string {
	if n.exists(packagedPlugins) {
		return "put " + packagedPlugins + " first in bin_dirs of containerd 2, bin_dir of containerd 1, or plugin_dirs of CRI-O, and restart it"
	}
	return "make install CNI_BIN_DIR=" + binDir
}

// conflistCommand returns the command that copies a shipped configuration into the runtime's folder, after its plugins. In a cluster it
// takes the subnet from the node's podCIDR, because with a fixed one, pods of several nodes would get the same addresses. The file has the
// name of podlace-node's, which replaces it. Beside another network it could assign addresses of that network's pods.
func (n *node) conflistCommand(install string) string {
	if len(n.networks) > 0 {
		return fmt.Sprintf("leave it if pods should get the network %q; otherwise docs/MOVING.md", n.networks[0].Name)
	}
	if _, err := os.Stat(filepath.Join(n.BinDir, "bridge")); err != nil {
		install = n.makeInstall(n.BinDir) + "; " + install
	}
	folder, name := "conf/", "10-podlace.conflist"
	switch {
	case n.kubeletUnit() == "k3s":
		name = "10-podlace-k3s.conflist" // has the podCIDR of the first node
	case n.running["kubelet"] || n.kubeletUnit() != "kubelet":
		name = "10-podlace-kubernetes.conflist"
	}
	if packaged := "/usr/share/doc/podlace/examples/"; n.exists(packaged + name) { // of the deb or the rpm
		folder = packaged
	}
	return install + folder + name + " " + n.ConfDir + "/10-podlace.conflist"
}

func startCommand(path string, err error) string {
	if errors.Is(err, fs.ErrPermission) {
		return "chmod 755 " + path
	}
	return "file " + path
}

// versionsText formats versions, each with the plugins that have it.
func versionsText(versions map[string][]string) string {
	var list []string
	for _, version := range slices.Sorted(maps.Keys(versions)) {
		list = append(list, version+": "+strings.Join(versions[version], ", "))
	}
	return strings.Join(list, "; ")
}

// addressesCommand returns the remedy for host-local's error, or another command if the error has a cause of its own.
func addressesCommand(err error, other string) string {
	switch {
	case strings.Contains(err.Error(), nodefile.Path):
		return "podlace-node status; without podlace-node, with the keys in conf/README.md: " + hostlocal.WriteNodeFile
	case strings.Contains(err.Error(), "lease folder"):
		return "ls -ld " + hostlocal.DefaultDir + "/*"
	}
	return other
}
