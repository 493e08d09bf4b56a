// SPDX-License-Identifier: Apache-2.0

package deps

import (
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "github.com/podlace/podlace/"

// packageLayers lists the packages from the lowest layer to the highest. A package may import only lower layers, not its own.
func packageLayers() [][]string {
	return [][]string{
		{"pkg/fault", "pkg/ports", "pkg/strict"},
		{"pkg/plugin"},
		{"pkg/vfconfig"},
		{"pkg/child"},
		{"pkg/store", "pkg/nft", "pkg/poddevices"},
		{"pkg/kernel", "pkg/iptables", "pkg/nodefile", "pkg/yamlfile"},
		{"pkg/attachment", "pkg/claim"},
		{"pkg/ipam", "pkg/pci"},
		{"pkg/reference"},
		{"pkg/bridge", "pkg/hostlocal", "pkg/loopback", "pkg/portmap", "pkg/bandwidth", "pkg/sriov"},
		{"pkg/podlacepod", "pkg/restore"},
		{".", "conf", "pkg/agent/netcheck", "pkg/cli/chain", "pkg/cli/sandbox", "pkg/cli/kubelet", "pkg/daemon/probes", "pkg/daemon/watch"},
		{"pkg/cli/reconcile", "pkg/agent/noderoutes", "pkg/daemon/pool"},
		{"pkg/daemon/poolfile"},
		{"pkg/cli/validate", "pkg/daemon/podresources"},
		{"pkg/cli/rollback", "pkg/daemon/devicefiles"}, // rollback reads configurations like the collector
		{"pkg/cli/doctor", "pkg/agent/podmetrics", "pkg/daemon/dra"},
		{"pkg/cli", "pkg/agent/nodeagent", "pkg/daemon/deviceplugin", "pkg/daemon/claimcheck"},
		{"plugins/bridge", "plugins/host-local", "plugins/loopback", "plugins/portmap", "plugins/bandwidth", "plugins/sriov", "plugins/podlace",
			"plugins/podlace-pod", "plugins/podlace-podresources", "plugins/sriov-device-plugin", "plugins/podlace-node"},
	}
}

// allowedImporters maps each restricted package or module to its permitted importers. A module's name stands for all its packages, and a
// name that ends in "/" for a folder. Tests may import everything.
func allowedImporters() map[string][]string {
	return map[string][]string{
		// No shipped program links integration/.
		module + "integration": {"integration/"},
		module + "pkg/daemon": {"pkg/daemon/", "pkg/agent/", "pkg/cli", "pkg/cli/", "plugins/sriov-device-plugin",
			"plugins/podlace-podresources", "integration/"},
		// podlace must not link gRPC
		module + "pkg/daemon/podresources": {"pkg/daemon/deviceplugin", "pkg/daemon/dra", "plugins/podlace-podresources", "integration/"},
		module + "pkg/agent":               {"pkg/agent/", "plugins/podlace-node"},
		module + "pkg/cli":                 {"pkg/cli", "pkg/cli/", "pkg/agent/", "plugins/podlace", "integration/"},

		// Direct access to the kernel. pkg/cli/sandbox must not use pkg/kernel, whose tests use it.
		"github.com/vishvananda/netlink": {"pkg/kernel", "pkg/cli/sandbox", "integration/"},
		"github.com/google/nftables":     {"pkg/nft", "pkg/reference", "pkg/bridge", "pkg/portmap", "integration/"},
		"github.com/mdlayher/netlink":    {"pkg/nft", "pkg/kernel"},
		// pkg/plugin opens namespaces and compares error numbers, pkg/store locks files and creates unnamed ones, pkg/hostlocal checks access
		// rights, pkg/bridge, pkg/portmap and pkg/reference write nf_tables rules, and pkg/daemon/dra reserves space on a disk.
		"golang.org/x/sys/unix": {"pkg/nft", "pkg/iptables", "pkg/reference", "pkg/kernel", "pkg/plugin", "pkg/store", "pkg/cli/sandbox",
			"pkg/hostlocal", "pkg/bridge", "pkg/portmap", "pkg/daemon/dra", "integration/"},
		"os/exec": {"pkg/child", "pkg/fault", "pkg/poddevices", "pkg/iptables", "pkg/ipam", "pkg/cli/sandbox", "pkg/cli/reconcile", "pkg/cli",
			"integration/"},

		// Low-level packages return typed errors. Codes and hints for runtimes and operators are those of pkg/plugin.
		module + "pkg/plugin": {"pkg/attachment", "pkg/bandwidth", "pkg/bridge", "pkg/hostlocal", "pkg/ipam", "pkg/loopback", "pkg/nodefile",
			"pkg/podlacepod", "pkg/portmap", "pkg/restore", "pkg/sriov", "pkg/store", "pkg/vfconfig", "pkg/daemon/", "pkg/agent/", "pkg/cli",
			"pkg/cli/", "integration/"},
		// The main plugins pass their host-local implementation to pkg/ipam, which must not import it.
		module + "pkg/hostlocal": {"plugins/bridge", "plugins/sriov", "plugins/host-local", "pkg/podlacepod", "pkg/restore",
			"pkg/agent/", "pkg/cli", "pkg/cli/"},
		// Only packages that change the system, start a program or write the plugin's result.
		module + "pkg/fault": {"pkg/nft", "pkg/iptables", "pkg/kernel", "pkg/bridge", "pkg/portmap", "pkg/store", "pkg/pci",
			"pkg/child", "pkg/plugin", "pkg/daemon/dra", "pkg/agent/nodeagent", "pkg/attachment", "pkg/ipam"},
		"testing":                       {"integration/"},
		"github.com/safchain/ethtool":   nil, // it clears a megabyte for each VF
		"github.com/coreos/go-iptables": {"pkg/iptables"},
		"github.com/spf13/cobra":        {"pkg/cli", "pkg/agent/nodeagent", "pkg/daemon/claimcheck"},

		// A plugin with CNI's package invoke would also contain net/http and OpenTelemetry. skel would check the network namespace only after the
		// first change of the system.
		"github.com/containernetworking/cni/libcni":     {"pkg/cli/chain", "pkg/cli/reconcile", "integration/"},
		"github.com/containernetworking/cni/pkg/invoke": {"pkg/cli/chain", "integration/"},
		"github.com/containernetworking/cni/pkg/skel":   nil,
		// Mostly for the daemons and the command podlace, not for CNI plugins.
		"k8s.io": {"pkg/daemon/deviceplugin", "pkg/daemon/dra", "pkg/daemon/claimcheck", "pkg/daemon/podresources",
			"pkg/agent/nodeagent"},
		"github.com/google/cel-go": {"pkg/daemon/claimcheck"},
		"sigs.k8s.io":              nil,
		"go.yaml.in/yaml":          {"pkg/yamlfile"}, // YAML with line numbers
		"google.golang.org/grpc":   {"pkg/daemon/deviceplugin", "pkg/daemon/podresources"},
		"github.com/prometheus/client_golang": {"pkg/daemon/deviceplugin", "pkg/daemon/dra", "pkg/daemon/probes", "pkg/agent/nodeagent",
			"pkg/agent/podmetrics", "integration/"},
		"net/http":                     {"pkg/daemon/probes"},
		"github.com/fsnotify/fsnotify": {"pkg/daemon/watch"},
		"github.com/pelletier/go-toml": {"pkg/cli/doctor"}, // configurations of runtimes
		"golang.org/x/net":             nil,
		"C":                            nil,
	}
}

// goFiles returns the main module's Go files by package.
func goFiles(t *testing.T) map[string][]string {
	t.Helper()
	root := os.DirFS("../..")
	found := map[string][]string{}
	err := fs.WalkDir(root, ".", func(name string, entry fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case entry.IsDir() && name != "." && (strings.HasPrefix(entry.Name(), ".") || entry.Name() == "testdata" || hasGoMod(root, name)):
			return fs.SkipDir
		case strings.HasSuffix(name, ".go"):
			found[path.Dir(name)] = append(found[path.Dir(name)], name)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func hasGoMod(root fs.FS, dir string) bool {
	_, err := fs.Stat(root, path.Join(dir, "go.mod"))
	return err == nil
}

// packageImports returns the imports of each package for all build tags, without those of tests.
func packageImports(t *testing.T) map[string][]string {
	t.Helper()
	out := map[string][]string{}
	for pkg, names := range goFiles(t) {
		for _, name := range names {
			if strings.HasSuffix(name, "_test.go") {
				continue
			}
			f, err := parser.ParseFile(token.NewFileSet(), filepath.Join("../..", name), nil, parser.ImportsOnly)
			if err != nil {
				t.Fatal(err)
			}
			for _, spec := range f.Imports {
				imported, _ := strconv.Unquote(spec.Path.Value)
				out[pkg] = append(out[pkg], imported)
			}
		}
	}
	return out
}

func TestArrowsPointDown(t *testing.T) {
	layer := map[string]int{}
	for i, packages := range packageLayers() {
		for _, p := range packages {
			layer[p] = i
		}
	}
	all := packageImports(t)
	for _, pkg := range slices.Sorted(maps.Keys(goFiles(t))) {
		own, known := layer[pkg]
		if isBelow(pkg, "integration") {
			continue
		}
		if !known {
			t.Errorf("%s is in no layer: add it to packageLayers in integration/deps/imports_test.go, above all packages that it imports", pkg)
		}
		for _, imported := range all[pkg] {
			other, ok := strings.CutPrefix(imported, module)
			if below, known := layer[other]; ok && known && below >= own {
				t.Errorf("%s imports %s, which is not below it: remove the import, or move %s up in packageLayers of integration/deps/imports_test.go",
					pkg, other, pkg)
			}
		}
	}
}

func TestOnly(t *testing.T) {
	for pkg, list := range packageImports(t) {
		for _, imported := range list {
			for what, who := range allowedImporters() {
				if isBelow(imported, what) && !allowed(pkg, who) {
					t.Errorf("%s imports %s: remove the import, or add %q to the importers of %q in integration/deps/imports_test.go", pkg, imported, pkg, what)
				}
			}
		}
	}
}

// Production code imports only these packages of containernetworking/plugins and coreos/go-iptables, each in one place.
func TestGivenPackages(t *testing.T) {
	uses := map[string]string{
		"github.com/containernetworking/plugins/pkg/ns": "pkg/plugin",   // opens the namespaces of pods
		"github.com/coreos/go-iptables/iptables":        "pkg/iptables", // reads chains in CHECK
	}
	used := map[string]bool{}
	for pkg, list := range packageImports(t) {
		for _, imported := range list {
			if isBelow(imported, "github.com/containernetworking/plugins") || isBelow(imported, "github.com/coreos/go-iptables") {
				used[imported] = true
				if uses[imported] != pkg {
					t.Errorf("%s imports %s: remove the import, or add the pair to uses in TestGivenPackages with the reason", pkg, imported)
				}
			}
		}
	}
	for what := range uses {
		if !used[what] {
			t.Errorf("no package imports %s: remove it from uses in TestGivenPackages", what)
		}
	}
}

// isBelow reports whether a package is the second one or in a subfolder of it.
func isBelow(pkg, parent string) bool { return pkg == parent || strings.HasPrefix(pkg, parent+"/") }

func allowed(pkg string, who []string) bool {
	return slices.ContainsFunc(who, func(w string) bool { return pkg == w || strings.HasSuffix(w, "/") && strings.HasPrefix(pkg, w) })
}

// A folder below plugins has only a short main function, without logic that needs tests.
func TestMainsAreSmall(t *testing.T) {
	for pkg, names := range goFiles(t) {
		if !strings.HasPrefix(pkg, "plugins/") {
			continue
		}
		source, err := os.ReadFile(filepath.Join("../..", pkg, "main.go"))
		if err != nil || len(names) != 1 || strings.Count(string(source), "\n") > 15 {
			t.Errorf("%s: %v, main.go has %d lines, %v: keep only a main.go of at most 15 lines, and move the rest to pkg/", pkg, names,
				strings.Count(string(source), "\n"), err)
		}
	}
}
