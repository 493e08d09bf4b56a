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

// packageLayers lists the packages by layer, from the lowest layer to the highest. A package may only import packages of lower layers.
// Packages of the same layer may not import each other.
func packageLayers() [][]string {
	return [][]string{
		{".", "conf", "pkg/fault", "pkg/kubelet", "pkg/meter", "pkg/pci/pcitest", "pkg/claim/claimtest", "pkg/ports", "pkg/probes",
			"pkg/probes/probestest", "pkg/watch"},
		{"pkg/child"},
		{"pkg/plugin", "pkg/sandbox"},
		{"pkg/vfconfig"},
		{"pkg/allocation"},
		{"pkg/store", "pkg/podresources", "pkg/nft", "pkg/kernel/kerneltest"},
		{"pkg/kernel", "pkg/iptables", "pkg/nodefile", "pkg/claim"},
		{"pkg/attachment"},
		{"pkg/ipam", "pkg/pci", "pkg/reference", "pkg/noderoutes"},
		{"pkg/bridge", "pkg/hostlocal", "pkg/loopback", "pkg/portmap", "pkg/bandwidth", "pkg/sriov", "pkg/demo"},
		{"pkg/reconcile", "pkg/pool", "pkg/podlacepod"},
		{"pkg/validate"},
		{"pkg/rollback", "pkg/devicefiles", "pkg/doctor", "pkg/podmetrics"}, // rollback reads configurations like the collector
		{"pkg/dra"},
		{"pkg/cli", "pkg/deviceplugin", "pkg/nodeagent"},
		{"plugins/bridge", "plugins/host-local", "plugins/loopback", "plugins/portmap", "plugins/bandwidth", "plugins/sriov", "plugins/podlace",
			"plugins/podlace-pod", "plugins/sriov-device-plugin", "plugins/podlace-node"},
	}
}

// allowedImporters maps each restricted package or module to the packages that may import it. The name of a module stands for all packages
// of the module. Tests may import every package. A name that ends in "/" stands for all packages of a folder.
func allowedImporters() map[string][]string {
	return map[string][]string{
		// The following packages may access the kernel directly. pkg/sandbox is one of them: it must not use pkg/kernel, because the tests of
		// pkg/kernel use pkg/sandbox.
		"github.com/vishvananda/netlink": {"pkg/kernel", "pkg/kernel/kerneltest", "pkg/sandbox", "integration/harness"},
		"github.com/google/nftables":     {"pkg/nft", "pkg/kernel/kerneltest", "pkg/reference", "pkg/bridge", "pkg/portmap"},
		"github.com/mdlayher/netlink":    {"pkg/nft"},
		// The following packages need system calls of golang.org/x/sys/unix: pkg/plugin opens namespaces and compares error numbers, pkg/store
		// locks files and creates unnamed files, and pkg/hostlocal checks access rights. pkg/bridge, pkg/portmap and pkg/reference use it to
		// write nf_tables rules.
		"golang.org/x/sys/unix": {"pkg/nft", "pkg/iptables", "pkg/reference", "pkg/kernel", "pkg/kernel/kerneltest", "pkg/plugin", "pkg/store",
			"pkg/sandbox", "pkg/meter", "pkg/hostlocal", "pkg/bridge",
			"pkg/portmap", "integration/"},
		"os/exec": {"pkg/child", "pkg/fault", "pkg/iptables", "pkg/ipam", "pkg/kernel/kerneltest", "pkg/sandbox", "pkg/demo", "pkg/reconcile",
			"pkg/cli", "integration/"},

		// pkg/kernel and other low-level packages must not import pkg/plugin. pkg/plugin contains error codes and hints for runtimes and
		// operators; low-level packages return typed errors.
		module + "pkg/plugin": {"pkg/attachment", "pkg/bandwidth", "pkg/bridge", "pkg/cli", "pkg/demo", "pkg/hostlocal", "pkg/ipam",
			"pkg/loopback", "pkg/deviceplugin", "pkg/doctor", "pkg/dra", "pkg/nodeagent", "pkg/nodefile", "pkg/podlacepod", "pkg/podmetrics",
			"pkg/pool", "pkg/portmap", "pkg/reconcile", "pkg/rollback", "pkg/sriov", "pkg/store", "pkg/validate", "pkg/vfconfig",
			"integration/harness"},
		// pkg/ipam must not import pkg/hostlocal, because the main plugins pass their host-local implementation to pkg/ipam.
		module + "pkg/hostlocal": {"plugins/bridge", "plugins/sriov", "plugins/host-local", "pkg/podlacepod", "pkg/reconcile", "pkg/rollback",
			"pkg/cli", "pkg/doctor", "pkg/podmetrics", "pkg/validate"},
		// Only packages that change the system, start a program or write the plugin's result may import pkg/fault.
		module + "pkg/fault": {"pkg/nft", "pkg/iptables", "pkg/kernel", "pkg/bridge", "pkg/portmap", "pkg/store", "pkg/pci",
			"pkg/child", "pkg/plugin", "pkg/dra", "pkg/nodeagent", "pkg/attachment", "pkg/ipam"},
		module + "pkg/sandbox":           {"pkg/kernel/kerneltest", "pkg/demo", "pkg/cli", "integration/"},
		module + "pkg/kernel/kerneltest": {"integration/harness"},
		module + "pkg/probes/probestest": nil,
		module + "pkg/pci/pcitest":       {"integration/harness/card"},
		module + "pkg/claim/claimtest":   {"integration/bench"},
		module + "pkg/demo":              {"pkg/cli"},
		module + "pkg/kubelet":           {"pkg/cli", "integration/"},
		module + "pkg/reconcile":         {"pkg/rollback", "pkg/doctor", "pkg/cli", "pkg/nodeagent", "pkg/podmetrics", "integration/"},
		module + "pkg/rollback":          {"pkg/cli", "pkg/nodeagent"},
		module + "pkg/cli":               {"plugins/podlace"},
		"testing":                        {"pkg/kernel/kerneltest", "pkg/pci/pcitest", "integration/"},
		"github.com/safchain/ethtool":    {"pkg/pci"},
		"github.com/coreos/go-iptables":  {"pkg/iptables"},
		"github.com/spf13/cobra":         {"pkg/cli", "pkg/nodeagent"},

		// A plugin that imports CNI's package invoke would also contain net/http and OpenTelemetry. The package skel would check the network
		// namespace only after the first change of the system.
		"github.com/containernetworking/cni/libcni":     {"pkg/demo", "integration/harness"},
		"github.com/containernetworking/cni/pkg/invoke": {"pkg/demo", "integration/harness"},
		"github.com/containernetworking/cni/pkg/skel":   nil,
		// Most of the following modules and packages are only for the daemons and for the command podlace, not for CNI plugins.
		"k8s.io":                 {"pkg/deviceplugin", "pkg/dra", "pkg/nodeagent"},
		"sigs.k8s.io":            {"pkg/cli"},      // manifests in YAML
		"go.yaml.in/yaml":        {"pkg/validate"}, // YAML with line numbers
		"google.golang.org/grpc": {"pkg/deviceplugin"},
		"github.com/prometheus/client_golang": {"pkg/deviceplugin", "pkg/dra", "pkg/nodeagent", "pkg/podmetrics", "pkg/probes",
			"pkg/probes/probestest"},
		"net/http":                     {"pkg/probes"},
		"github.com/fsnotify/fsnotify": {"pkg/watch"},
		module + "pkg/probes":          {"pkg/deviceplugin", "pkg/dra", "pkg/nodeagent"},
		module + "pkg/watch":           {"pkg/deviceplugin", "pkg/dra", "pkg/nodeagent"},
		module + "pkg/dra":             {"pkg/deviceplugin"},
		module + "pkg/deviceplugin":    {"plugins/sriov-device-plugin"},
		module + "pkg/nodeagent":       {"plugins/podlace-node"},
		module + "pkg/doctor":          {"pkg/cli"},
		module + "pkg/podmetrics":      {"pkg/nodeagent"},
		"github.com/pelletier/go-toml": {"pkg/doctor"},       // configurations of runtimes
		"golang.org/x/net":             {"pkg/podresources"}, // only hpack, which imports no other package
		"C":                            nil,
	}
}

// goFiles returns the Go files of the main module, by package.
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

// hasGoMod reports whether a folder is a separate module.
func hasGoMod(root fs.FS, dir string) bool {
	_, err := fs.Stat(root, path.Join(dir, "go.mod"))
	return err == nil
}

// packageImports returns the imports of each package for all build tags, without the imports of tests.
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

// TestGivenPackages checks that production code imports only the listed packages of the modules containernetworking/plugins and
// coreos/go-iptables. Each listed package has only one importer in Podlace.
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

// isBelow reports whether the first package is the second package or is in a subfolder of the second package.
func isBelow(pkg, parent string) bool { return pkg == parent || strings.HasPrefix(pkg, parent+"/") }

func allowed(pkg string, who []string) bool {
	return slices.ContainsFunc(who, func(w string) bool { return pkg == w || strings.HasSuffix(w, "/") && strings.HasPrefix(pkg, w) })
}

// TestMainsAreSmall checks that each folder below plugins contains only a short main function. A short main function has no logic that
// needs tests.
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
