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

	"github.com/pelletier/go-toml/v2"
)

// runtimeConfig holds the CNI settings of a container runtime's configuration.
type runtimeConfig struct {
	Name    string // containerd or CRI-O
	File    string // path of the configuration; "" if there is none and the defaults apply
	ConfDir string
	BinDirs []string // folders in the order in which the runtime searches for a plugin
	Network string   // name of the only network that the runtime uses, or ""
	setter  string   // the file that sets Network
	err     error    // reason why the configuration cannot be read
	noCRI   string   // plugin of the CRI that containerd's configuration disables, so that no kubelet can use it

	InternalLoopback bool // containerd itself sets lo up, without the plugin loopback
}

// Folders of a runtime whose configuration names no others.
const (
	defaultConfDir = "/etc/cni/net.d"
	defaultBinDir  = "/opt/cni/bin"
)

// comm matches the files in /proc with the name of a running program, of at most 15 bytes (proc_pid_comm(5)).
const comm = "proc/[0-9]*/comm"

func (n *node) programs() map[string]bool {
	names := map[string]bool{}
	files, _ := filepath.Glob(n.path(comm))
	for _, file := range files {
		if text, err := os.ReadFile(file); err == nil {
			names[strings.TrimSpace(string(text))] = true
		}
	}
	return names
}

// containerdPlace is a configuration file of containerd, with the folders that apply if it does not set them.
type containerdPlace struct{ file, confDir, binDir string }

// containerdPlaces returns the configuration files of the running containerd processes, or the usual files if none runs or its command line
// cannot be read.
func (n *node) containerdPlaces() (places []containerdPlace) {
	usual := []containerdPlace{
		{"/var/lib/rancher/k3s/agent/etc/containerd/config.toml", "/var/lib/rancher/k3s/agent/etc/cni/net.d", "/var/lib/rancher/k3s/data/cni"},
		{"/var/lib/rancher/rke2/agent/etc/containerd/config.toml", defaultConfDir, defaultBinDir},
		{containerdConfig, defaultConfDir, defaultBinDir},
	}
	files, _ := filepath.Glob(n.path(comm))
	for _, file := range files {
		if text, err := os.ReadFile(file); err != nil || strings.TrimSpace(string(text)) != "containerd" {
			continue
		}
		args, err := os.ReadFile(filepath.Join(filepath.Dir(file), "cmdline"))
		if err != nil || len(args) == 0 {
			return usual
		}
		place := containerdPlace{configArgument(strings.Split(string(args), "\x00")), defaultConfDir, defaultBinDir}
		if i := slices.IndexFunc(usual, func(p containerdPlace) bool { return p.file == place.file }); i >= 0 {
			place = usual[i]
		}
		if !slices.Contains(places, place) {
			places = append(places, place)
		}
	}
	if len(places) == 0 {
		return usual
	}
	return places
}

// containerdConfig is the file of a containerd without the flag --config (containerd(8)).
const containerdConfig = "/etc/containerd/config.toml"

// configArgument returns the configuration file in containerd's command line.
func configArgument(args []string) string {
	for i, arg := range args {
		name, value, ok := strings.Cut(arg, "=")
		if !slices.Contains([]string{"-c", "-config", "--config"}, name) {
			continue
		}
		if !ok && i+1 < len(args) {
			value = args[i+1]
		}
		return filepath.Clean(value)
	}
	return containerdConfig
}

// readRuntimes returns the runtimes that run on this node or have a configuration file.
func (n *node) readRuntimes() (all []runtimeConfig) {
	for _, place := range n.containerdPlaces() {
		there := n.exists(place.file)
		if !there && (!n.running["containerd"] || len(all) > 0) {
			continue
		}
		c := runtimeConfig{Name: "containerd", ConfDir: place.confDir, BinDirs: []string{place.binDir}}
		if there {
			c.File = place.file
			c.err = c.readContainerd(n, place.file, 0)
		} else if place.file != containerdConfig {
			continue
		}
		if c.noCRI != "" { // as in the package of Docker
			n.noCRI = fmt.Sprintf("%s disables the plugin %s", place.file, c.noCRI)
			continue
		}
		all = append(all, c)
	}
	if n.running["crio"] || n.exists("/etc/crio/crio.conf") || n.exists("/etc/crio/crio.conf.d") {
		all = append(all, n.readCRIO())
	}
	return all
}

func (n *node) exists(name string) bool {
	_, err := os.Stat(n.path(name))
	return err == nil
}

// maxImports is how deep imports of containerd's configuration may nest.
const maxImports = 8

// readContainerd reads the CNI settings of a containerd configuration of version 2 or later with its imports (containerd-config.toml(5)). A
// value of an imported file wins.
func (c *runtimeConfig) readContainerd(n *node, file string, depth int) error {
	var raw struct {
		Imports []string `toml:"imports"`
		Off     []string `toml:"disabled_plugins"`
		Plugins map[string]struct {
			CNI cniSettings `toml:"cni"`
		} `toml:"plugins"`
	}
	if err := readTOML(n.path(file), &raw); err != nil {
		return err
	}
	for _, name := range raw.Off {
		if slices.Contains([]string{"cri", "io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"}, name) {
			c.noCRI = name
		}
	}
	for _, plugin := range []string{"io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime"} {
		c.setCNI(raw.Plugins[plugin].CNI)
	}
	var errs []error
	for _, pattern := range raw.Imports {
		if !filepath.IsAbs(pattern) {
			pattern = filepath.Join(filepath.Dir(file), pattern)
		}
		files, _ := filepath.Glob(n.path(pattern))
		for _, f := range files {
			if depth < maxImports {
				errs = append(errs, c.readContainerd(n, strings.TrimPrefix(f, filepath.Join("/", n.Root)), depth+1))
			}
		}
	}
	return errors.Join(errs...)
}

// cniSettings is the section cni of containerd's configuration.
type cniSettings struct {
	ConfDir  string   `toml:"conf_dir"`
	BinDir   string   `toml:"bin_dir"`
	BinDirs  []string `toml:"bin_dirs"`
	Loopback *bool    `toml:"use_internal_loopback"`
}

func (c *runtimeConfig) setCNI(cni cniSettings) {
	c.ConfDir = cmp.Or(cni.ConfDir, c.ConfDir)
	if cni.BinDir != "" {
		c.BinDirs = []string{cni.BinDir}
	}
	if len(cni.BinDirs) > 0 {
		c.BinDirs = cni.BinDirs
	}
	if cni.Loopback != nil {
		c.InternalLoopback = *cni.Loopback
	}
}

// readCRIO reads crio.conf and the drop-ins, of which later files win (crio.conf(5)).
func (n *node) readCRIO() runtimeConfig {
	c := runtimeConfig{Name: "CRI-O", ConfDir: defaultConfDir, BinDirs: []string{defaultBinDir}}
	files, _ := filepath.Glob(n.path("/etc/crio/crio.conf.d/*"))
	var errs []error
	for _, file := range append([]string{n.path("/etc/crio/crio.conf")}, files...) {
		var raw struct {
			CRIO struct {
				Network struct {
					Default string   `toml:"cni_default_network"`
					Dir     string   `toml:"network_dir"`
					BinDirs []string `toml:"plugin_dirs"`
				} `toml:"network"`
			} `toml:"crio"`
		}
		err := readTOML(file, &raw)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		c.File, errs = strings.TrimPrefix(file, filepath.Join("/", n.Root)), append(errs, err)
		network := raw.CRIO.Network
		if network.Dir != "" {
			c.ConfDir = filepath.Clean(network.Dir)
		}
		if network.Default != "" {
			c.Network, c.setter = network.Default, c.File
		}
		if len(network.BinDirs) > 0 {
			c.BinDirs = network.BinDirs
		}
	}
	c.err = errors.Join(errs...)
	return c
}

func readTOML(file string, into any) error {
	text, err := os.ReadFile(file)
	if err == nil {
		err = toml.Unmarshal(text, into)
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("%s: %w", file, err)
	}
	return err
}

// runtimeFolders reports folders in the runtimes' configurations other than those that doctor examines.
func (n *node) runtimeFolders() (found []Finding) {
	if len(n.runtimes) == 0 {
		return []Finding{{Level: Warning, Code: "no-runtime", What: "no container runtime was found",
			Evidence:    cmp.Or(n.noCRI, "neither containerd nor crio runs, and neither has a configuration in /etc"),
			Consequence: "doctor examines " + n.ConfDir + " and " + n.BinDir + ", which the runtime may not read",
			Command:     "podlace doctor --conf-dir FOLDER --bin-dir FOLDER"}}
	}
	served := false
	for _, r := range n.runtimes {
		differs := n.compareFolders(r)
		served = served || len(differs) == 0
		found = append(found, differs...)
	}
	for i, f := range found {
		if served && f.Level == Error { // such as Docker's containerd beside that of k3s
			found[i].Level, found[i].Command = Warning, "if this runtime starts pods for Podlace: "+f.Command
		}
	}
	return found
}

func (n *node) compareFolders(r runtimeConfig) (found []Finding) {
	source := cmp.Or(r.File, "its defaults")
	if r.err != nil {
		return unknown("the configuration of "+r.Name, r.err)
	}
	if filepath.Clean(r.ConfDir) != filepath.Clean(n.ConfDir) {
		found = append(found, Finding{Level: Error, Code: "runtime-conf-dir", What: r.Name + " reads no configuration in " + n.ConfDir,
			Evidence:    fmt.Sprintf("%s names %s", source, r.ConfDir),
			Consequence: "pods get the network of the other folder",
			Command:     "podlace doctor --conf-dir " + r.ConfDir})
	}
	clean := func(dir string) bool { return filepath.Clean(dir) == filepath.Clean(n.BinDir) }
	if !slices.ContainsFunc(r.BinDirs, clean) {
		found = append(found, Finding{Level: Error, Code: "runtime-bin-dir", What: r.Name + " looks for no plugin in " + n.BinDir,
			Evidence:    fmt.Sprintf("%s names %s", source, strings.Join(r.BinDirs, ", ")),
			Consequence: "pods get the plugins of the other folder, or none",
			Command:     n.makeInstall(r.BinDirs[0])})
	}
	return found
}
