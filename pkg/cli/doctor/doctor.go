// SPDX-License-Identifier: Apache-2.0

// Package doctor examines a node for problems that keep Podlace from working now or later. Each finding has the evidence, the consequence,
// and a command that corrects it. The examination changes nothing; Fix applies a remedy if it cannot harm pods.
package doctor

import (
	"cmp"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/cli/reconcile"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

// Level is the severity of a finding.
type Level string

// Severity levels of findings, from the lowest to the highest.
const (
	OK      Level = "ok"
	Skipped Level = "skipped" // does not apply to this node
	Warning Level = "warning" // pods work, with a risk or a loss
	Error   Level = "error"   // pods cannot start, or have no network
)

// Finding is one result of a check.
type Finding struct {
	Check       string             `json:"check"`
	Level       Level              `json:"level"`
	Code        plugin.FindingCode `json:"code,omitempty"` // name of the check, unless the check can find several problems
	What        string             `json:"what"`
	File        string             `json:"file,omitempty"`
	Line        int                `json:"line,omitempty"`
	Column      int                `json:"column,omitempty"`
	Evidence    string             `json:"evidence,omitempty"`
	Consequence string             `json:"consequence,omitempty"`
	Command     string             `json:"command,omitempty"` // a shell command, or the text for a file
	Fixable     bool               `json:"fixable,omitempty"` // Fix can apply the remedy

	Fix func() error `json:"-"`
}

// Options holds the folders that doctor examines.
type Options struct {
	ConfDir string // folder with the network configurations; "" for the runtime's folder
	BinDir  string // folder with the plugins; "" for the runtime's folder
	Root    string // folder that stands for /; only files of other programs are read below it
}

// node holds what the checks read about the node.
type node struct {
	Options
	host     *kernel.Node
	running  map[string]bool // names of the running programs (/proc/PID/comm)
	runtimes []runtimeConfig
	noCRI    string              // why a containerd is not among the runtimes, or ""
	networks []reconcile.Network // networks in the order of their files
	notes    []string            // unusable configurations
	confErr  error               // reason why the folder of the configurations cannot be read

	beforeStatus   map[string][]Finding // findings of checks before STATUS restored what it could
	attachments    []*reconcile.Attachment
	attachmentsErr error
}

// check examines one subject, such as the kernel's features. run returns nil if it finds no problem.
type check struct {
	name string
	fine string // says that all is well
	run  func(*node) []Finding
}

// checks returns all checks, those of features that every pod needs first.
func checks() []check {
	return []check{
		{"kernel-features", "the kernel has all features", (*node).kernelFeatures},
		{"runtime", "the runtime's configuration names these folders", (*node).runtimeFolders},
		{"conflist", "the runtime takes a configuration with bridge or sriov; the check binaries says whose they are", (*node).conflist},
		{"conflist-keys", "each key of the configurations has an effect", (*node).conflistKeys},
		{"binaries", "all plugins are in place, of one version", (*node).binaries},
		{"addresses", "addresses are left", (*node).addresses},
		{"records", "all records belong to living pods", (*node).records},
		{"status", "all plugins are ready", (*node).status},
		{"ports", "all pods are connected to their bridge", (*node).portsNow}, // after "status", which restores ports, rules and forwarding
		{"rules", "no rules are missing", (*node).rulesNow},
		{"pods", "CHECK of the live pods succeeds", (*node).pods},
		{"node-agent", "podlace-node is ready", (*node).agent},
		{"forwarding", "the kernel forwards packets", (*node).forwarding},
		{"forward-policy", "no other firewall drops the packets of pods", (*node).forwardPolicy},
		{"firewall-reload", "no service flushes the rules unnoticed", (*node).firewallReload},
		{"iptables-variants", "one variant of iptables is in use", (*node).iptablesVariants},
		{"networkmanager", "NetworkManager leaves the interfaces alone", (*node).networkManager},
		{"networkd", "systemd-networkd leaves the interfaces alone", (*node).networkd},
		{"routes", "the node has a route to and from each pod", (*node).routes},
		{"rp-filter", "reverse path filters pass the packets of pods", (*node).rpFilter},
		{"router-advertisements", "the default route of IPv6 stays", (*node).routerAdvertisements},
		{"mtu", "the MTU of the bridges fits the uplink", (*node).mtu},
		{"conntrack", "the connection table has room", (*node).conntrack},
		{"neighbours", "the neighbour table has room", (*node).neighbours},
		{"disk", "the state folders have room", (*node).disk},
		{"kubelet", "the kubelet's folders for devices are in place", (*node).kubelet},
	}
}

// Names returns the names of all checks.
func Names() (names []string) {
	for _, c := range checks() {
		names = append(names, c.name)
	}
	return names
}

// Examine runs all checks, or only the named ones. It needs root.
func Examine(o Options, only ...string) ([]Finding, error) {
	for _, name := range only {
		if !slices.Contains(Names(), name) {
			return nil, fmt.Errorf("there is no check %q: want %s", name, strings.Join(Names(), ", "))
		}
	}
	n, err := look(o)
	if err != nil {
		return nil, err
	}
	defer n.host.Close()
	var all []Finding
	for _, c := range checks() {
		if len(only) > 0 && !slices.Contains(only, c.name) {
			continue
		}
		found := skipped(Unseen)
		if n.seen(c.name) {
			found = c.run(n)
		}
		if len(found) == 0 {
			found = []Finding{{Level: OK, What: c.fine}}
		}
		for _, f := range found {
			f.Check, f.Fixable = c.name, f.Fix != nil
			if f.Level == Warning || f.Level == Error {
				f.Code = cmp.Or(f.Code, plugin.FindingCode(c.name))
			}
			all = append(all, f)
		}
	}
	return all, nil
}

// look reads what several checks need.
func look(o Options) (*node, error) {
	n := findFolders(o)
	n.networks, n.notes, n.confErr = reconcile.Networks(n.ConfDir)
	n.attachments, n.attachmentsErr = reconcile.List(n.networks)
	var err error
	n.host, err = kernel.Host()
	return n, err
}

// Folders replaces empty folders by those that this node's container runtime uses.
func Folders(o Options) Options { return findFolders(o).Options }

func findFolders(o Options) *node {
	n := &node{Options: o}
	n.running = n.programs()
	n.runtimes = n.readRuntimes()
	conf, bin := defaultConfDir, defaultBinDir
	if len(n.runtimes) > 0 {
		conf, bin = n.runtimes[0].ConfDir, n.runtimes[0].BinDirs[0]
	}
	n.ConfDir, n.BinDir = cmp.Or(n.ConfDir, conf), cmp.Or(n.BinDir, bin)
	return n
}

// path returns the path of another program's file below n.Root.
func (n *node) path(name string) string { return filepath.Join("/", n.Root, name) }

// skipped returns a finding that says why a check does not apply to this node.
func skipped(why string) []Finding { return []Finding{{Level: Skipped, What: why}} }

// unknown returns a finding that says that a check could not read its data, or nothing without an error.
func unknown(what string, err error) []Finding {
	if err == nil {
		return nil
	}
	return []Finding{{Level: Warning, Code: "unreadable",
		What: "could not read " + what, Evidence: err.Error(), Consequence: "this check is incomplete",
		Command: "correct what the evidence names, and run podlace doctor again"}}
}
