// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/bandwidth"
	"github.com/podlace/podlace/pkg/bridge"
	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/cli/reconcile"
	"github.com/podlace/podlace/pkg/hostlocal"
	"github.com/podlace/podlace/pkg/nodefile"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/poddevices"
	"github.com/podlace/podlace/pkg/portmap"
	"github.com/podlace/podlace/pkg/store"
)

func (n *node) attachmentsIn(state string) []*reconcile.Attachment {
	return slices.DeleteFunc(slices.Clone(n.attachments), func(a *reconcile.Attachment) bool { return a.State != state })
}

// addresses reports range sets that are almost full, and changed subnets if live pods have addresses of the old one.
func (n *node) addresses() (found []Finding) {
	for _, net := range n.ownNetworks() {
		for _, p := range net.Plugins {
			if plugin.Kind(p.IPAM) == "host-local" {
				found = append(found, n.addressesOf(net, p)...)
			}
		}
	}
	return append(found, n.changedSubnets()...)
}

func (n *node) addressesOf(net reconcile.Network, p reconcile.Plugin) (found []Finding) {
	r := &plugin.Request{Plugin: "host-local", Network: net.Name, CNIVersion: net.CNIVersion, Config: p.Config(),
		Log: slog.New(slog.DiscardHandler)}
	usage, err := hostlocal.ReadUsage(r)
	if err != nil {
		return []Finding{{Level: Error, Code: "addresses-unusable",
			What: fmt.Sprintf("network %q has no usable addresses", net.Name), Evidence: err.Error(),
			Consequence: "no pod of this network starts", Command: addressesCommand(err, "podlace validate "+net.File)}}
	}
	for _, u := range usage {
		if float64(u.Leased)*100 < u.Size*fullAt {
			continue
		}
		f := Finding{Level: Warning, Code: "addresses-few", What: fmt.Sprintf("network %q has few addresses left", net.Name),
			Evidence:    fmt.Sprintf("%s of %s", u, u.Set),
			Consequence: "new pods wait once all are leased",
			Command:     n.adviceForLeases(net.Name)}
		if u.Full() {
			f.Level, f.Code, f.What = Error, "addresses-none", fmt.Sprintf("network %q has no addresses left", net.Name)
			f.Consequence = "new pods wait until another pod ends"
		}
		found = append(found, f)
	}
	return found
}

// adviceForLeases returns how to get addresses of a network: by gc only if it can find dead pods. A lease alone names no namespace, so gc
// needs a runtime that does not know its container.
func (n *node) adviceForLeases(network string) string {
	has := func(state string) bool {
		return slices.ContainsFunc(n.attachmentsIn(state), func(a *reconcile.Attachment) bool { return a.Network == network })
	}
	const more = "enlarge the range, or move pods to another node"
	switch {
	case has(reconcile.Gone):
		return "podlace gc --yes; then " + more
	case has(reconcile.Unknown):
		return "run podlace gc while the runtime runs, because only the runtime knows whether a pod of the reference plugins is dead; then " + more
	}
	return more
}

// records reports attachments whose pods are gone, live ones without a lease, and damaged record files.
func (n *node) records() (found []Finding) {
	if n.attachmentsErr != nil {
		return unknown("the records and leases", n.attachmentsErr)
	}
	if gone := n.attachmentsIn(reconcile.Gone); len(gone) > 0 {
		found = append(found, Finding{Level: Warning, Code: "dead-attachments",
			What:        fmt.Sprintf("attachments of pods that are gone: %d", len(gone)),
			Evidence:    fmt.Sprintf("for example container %s of network %q", gone[0].ContainerID, gone[0].Network),
			Consequence: "they hold addresses, hostPorts or VFs until the runtime or gc removes them",
			Command:     "podlace gc lists them; podlace gc --yes removes them"})
	}
	unleased, damaged, err := hostlocal.Unleased("")
	found = append(found, unknown("the records", err)...)
	if len(unleased) > 0 {
		found = append(found, Finding{Level: Error, Code: "lease-missing",
			What:        fmt.Sprintf("pods without a lease of their address: %d", len(unleased)),
			Evidence:    fmt.Sprintf("for example container %s of network %q", unleased[0].ContainerID, unleased[0].Network),
			Consequence: "ADD may give the address to another pod",
			Command:     "podlace reload"})
	}
	for _, d := range damaged {
		found = append(found, Finding{Level: Error, Code: "damaged-record",
			What: "a record cannot be read", Evidence: fmt.Sprintf("%s: %v", d.Path(), d.Reason),
			Consequence: "the rules and limits of its pod are not restored after a flush",
			Command:     "delete the pod: its DEL removes what the record stands for"})
	}
	return found
}

// portsNow and rulesNow report as a warning what STATUS has just restored.
func (n *node) portsNow() []Finding { return n.sinceStatus("ports", n.ports()) }
func (n *node) rulesNow() []Finding { return n.sinceStatus("rules", n.rules()) }

func (n *node) sinceStatus(check string, left []Finding) []Finding {
	for _, f := range n.beforeStatus[check] {
		if slices.ContainsFunc(left, func(l Finding) bool { return l.Code == f.Code && l.Consequence == f.Consequence }) {
			continue
		}
		f.Level, f.What = Warning, "restored by doctor's call of STATUS: "+f.What
		f.Code, f.Consequence = "restored", "until then: "+f.Consequence
		f.Command = "podlace doctor firewall-reload networkd networkmanager, to find the program that removes them"
		left = append(left, f)
	}
	return left
}

// rules reports missing firewall rules and bandwidth limits of live pods.
func (n *node) rules() (found []Finding) {
	if lost := bridge.Lost(n.host); len(lost) > 0 {
		found = append(found, Finding{Code: "rules-missing", What: "the kernel lacks " + strings.Join(lost, ", "),
			Consequence: "pods have no gateway, no masquerade, no forwarding or no protection from one another"})
	}
	if !portmap.Intact(n.host) || !portmap.IPTablesIntact() {
		found = append(found, Finding{Code: "rules-missing", What: "rules of the plugin portmap are missing",
			Consequence: "hostPorts do not answer"})
	}
	missing, bypassed := 0, []Finding(nil)
	records, err := attachment.AllOf("bandwidth")
	if err == nil {
		var list []bandwidth.Limits
		list, err = bandwidth.Look(context.Background(), n.host, records, 0)
		for _, l := range list {
			if l.Missing() && !l.Gone && !l.Deleted { // the checks "ports" and "pods" report deleted links
				missing++
			}
			bypassed = append(bypassed, bypass(l)...)
		}
	}
	if missing > 0 {
		found = append(found, Finding{Code: "limits-missing", What: fmt.Sprintf("limits of pods are missing: %d", missing),
			Consequence: "these pods send or receive without a limit"})
	}
	for i := range found {
		found[i].Level, found[i].Command = Error, "podlace reload"
		found[i].Evidence = "the records under " + store.Root + " name them, the kernel lacks them"
	}
	return slices.Concat(found, bypassed, unknown("the limits of pods", err))
}

// bypass reports another program's filter that takes a pod's frames ahead of its egress limit, or may do so.
func bypass(l bandwidth.Limits) []Finding {
	if l.Egress == nil || l.Egress.Bypass == "" {
		return nil
	}
	what := "the egress limit of " + cmp.Or(l.Pod, l.ContainerID) + " may have no effect"
	return []Finding{{Level: Warning, Code: "limit-bypassed", What: what, Evidence: l.Egress.Bypass, Consequence: "the pod may send without a limit",
		Command: "ask the owner of the filter whether its program accepts frames (TC_ACT_OK) or passes them on (TC_ACT_UNSPEC)"}}
}

// agentStatus is the part of podlace-node's status file that doctor reads.
type agentStatus struct {
	Ready    bool              `json:"ready"`
	Routes   bool              `json:"routes"` // it restores what other programs remove
	Peers    []json.RawMessage `json:"peers"`
	Problems []struct {
		What string `json:"what"`
		Why  string `json:"why"`
		Do   string `json:"do"`
	} `json:"problems"`
}

const agentStatusFile = store.Root + "/" + nodefile.StatusName

func readAgentStatus() (s agentStatus, err error) {
	text, err := store.ReadFile(agentStatusFile)
	if err == nil {
		err = json.Unmarshal(text, &s)
	}
	return s, err
}

// agent reports the problems in podlace-node's status file.
func (n *node) agent() (found []Finding) {
	s, err := readAgentStatus()
	if errors.Is(err, fs.ErrNotExist) {
		return skipped("podlace-node has not run here since the node started")
	}
	if err != nil {
		return unknown("the status of podlace-node", err)
	}
	if !n.running["podlace-node"] {
		found = append(found, Finding{Level: Error, Code: "agent-stopped",
			What: "podlace-node does not run", Evidence: "there is no process podlace-node",
			Consequence: "pods keep their network; changes of the cluster are missed",
			Command:     "kubectl get pods --all-namespaces -l app.kubernetes.io/name=podlace-node -o wide"})
	}
	level := Warning
	if !s.Ready {
		level = Error
	}
	for _, p := range s.Problems {
		found = append(found, Finding{Level: level, Code: "agent-problem",
			What: p.What, Evidence: p.Why, Consequence: "see podlace-node status", Command: p.Do})
	}
	return found
}

// minFree is the free share of a file system, in percent, below which the check "disk" warns.
const minFree = 5

// disk reports state folders on a file system that is almost full or read-only.
func (n *node) disk() (found []Finding) {
	for _, dir := range []string{store.Root, hostlocal.DefaultDir} {
		var st syscall.Statfs_t
		for ; syscall.Statfs(dir, &st) != nil && dir != "/"; dir = filepath.Dir(dir) { // the folder that a later ADD makes
		}
		f := Finding{Level: Error, What: "there is little room for the state in " + dir,
			Consequence: "ADD fails when it cannot write its record", Command: "df -h " + dir + "; df -i " + dir}
		switch {
		case st.Flags&syscall.MS_RDONLY != 0:
			f.What, f.Evidence = "the state in "+dir+" cannot be written", "it is read-only"
			f.Command = "journalctl -k; if it shows no error of the disk: mount -o remount,rw $(findmnt -n -o TARGET -T " + dir + ")"
		case st.Blocks > 0 && st.Bavail*100 < st.Blocks*minFree:
			f.Evidence = fmt.Sprintf("%d of %d blocks are free", st.Bavail, st.Blocks)
		case st.Files > 0 && st.Ffree*100 < st.Files*minFree:
			f.Evidence = fmt.Sprintf("%d of %d inodes are free", st.Ffree, st.Files)
		}
		if f.Evidence != "" {
			found = append(found, f)
		}
	}
	return found
}

// kubelet reports missing folders of the kubelet that the sriov plugin needs.
func (n *node) kubelet() (found []Finding) {
	uses := slices.ContainsFunc(n.networks, func(net reconcile.Network) bool { return net.Plugin("sriov") != nil })
	if !uses && n.exists(claim.Folder) {
		return []Finding{{Level: Error, Code: "sriov-missing", What: "no network attaches the VFs of ResourceClaims",
			Evidence:    fmt.Sprintf("%s exists, and no configuration in %s names sriov", claim.Folder, n.ConfDir),
			Consequence: "a pod with a ResourceClaim starts without its VF",
			Command:     "add the plugin sriov to the conflist of the pods' network: docs/DRA.md"}}
	}
	if !uses {
		return skipped("no configuration names sriov")
	}
	for _, f := range []struct{ file, consequence, command string }{
		{"/var/lib/kubelet/device-plugins/kubelet.sock", "sriov-device-plugin cannot register its resources",
			"systemctl status " + n.kubeletUnit()},
		{"/var/lib/kubelet/pod-resources/kubelet.sock", "sriov cannot ask which VFs a pod was allocated", "systemctl status " + n.kubeletUnit()},
		{poddevices.Socket, "sriov has to ask the kubelet, which takes longer", "systemctl status sriov-device-plugin"},
	} {
		if !n.exists(f.file) {
			found = append(found, Finding{Level: Warning, Code: "kubelet-socket",
				What: "the socket " + f.file + " is missing", Evidence: "no such file",
				Consequence: f.consequence, Command: f.command})
		}
	}
	if _, err := os.Stat(filepath.Join(n.BinDir, poddevices.Program)); err != nil {
		found = append(found, Finding{Level: Warning, Code: "plugin-missing", What: poddevices.Program + " is missing", Evidence: err.Error(),
			Consequence: "no pod starts while sriov-device-plugin does not run", Command: n.makeInstall(n.BinDir)})
	}
	return found
}

// kubeletUnit returns the systemd unit that runs the kubelet, which k3s and RKE2 have in their own process.
func (n *node) kubeletUnit() string {
	for _, unit := range []string{"k3s", "k3s-agent", "rke2-server", "rke2-agent"} {
		if n.hasUnit(unit + ".service") {
			return unit
		}
	}
	return "kubelet"
}
