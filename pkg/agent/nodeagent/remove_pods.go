// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/cli/reconcile"
	"github.com/podlace/podlace/pkg/cli/rollback"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// remainingPods returns the pods that still need Podlace, each as namespace/name. It first removes attachments whose network namespace is
// gone, because a runtime that uses another network never calls DEL for them.
func (r *removal) remainingPods() (pods, notes []string, err error) {
	if r.binDir == "" {
		return nil, nil, nil
	}
	networks := r.knownNetworks()
	notes, err = collectDead(networks, r.binDir)
	list, listErr := reconcile.List(networks)
	_, damaged, badErr := attachment.Scan()
	for _, a := range reconcile.AddDamaged(list, damaged) {
		if hasRecord(a) {
			pods = append(pods, describePod(a))
		}
	}
	return pods, notes, errors.Join(err, listErr, badErr)
}

// collectDead calls GC of the plugins in binDir to remove attachments whose network namespace is gone.
func collectDead(networks []reconcile.Network, binDir string) (notes []string, err error) {
	list, err := reconcile.List(networks)
	if err != nil {
		return nil, err
	}
	reconcile.Judge(list, reconcile.Runtimes{}, false)
	dead := map[string]bool{}
	for _, a := range list {
		if !isPodlaces(a, networks) || !plugin.NetnsVisible(a.Netns) {
			a.Dead = ""
		}
		if a.Dead != "" {
			dead[a.Network] = true
		}
	}
	var errs []error
	for _, network := range slices.Sorted(maps.Keys(dead)) {
		plan := reconcile.NewPlan(configuration(networks, network), list, binDir)
		notes = append(notes, plan.Notes...)
		errs = append(errs, plan.Collect(list))
	}
	return notes, errors.Join(errs...)
}

// knownNetworks returns Podlace's networks as found in the runtime's folder, the agent's conflist, the records of attachments, and by
// earlier calls.
func (r *removal) knownNetworks() []reconcile.Network {
	for _, dir := range []string{r.confDir, filepath.Dir(r.config)} {
		found, _, _ := reconcile.Networks(dir) // without a configuration, records and leases suffice
		for _, n := range found {
			if filepath.Base(n.File) == conflistName {
				r.addNetwork(n)
			}
		}
	}
	names, _ := attachment.Networks() // remaining reports this error too
	for _, name := range names {
		r.addNetwork(reconcile.Network{Name: name})
	}
	return r.known
}

// addNetwork adds a network to r.known, for later calls: the conflist is deleted before the pods of the network are.
func (r *removal) addNetwork(n reconcile.Network) {
	if !slices.ContainsFunc(r.known, func(other reconcile.Network) bool { return other.Name == n.Name }) {
		r.known = append(r.known, n)
	}
}

// checkFolder returns an error if the agent ran on this node, but no plugin of Podlace is in binDir.
func (r *removal) checkFolder() error {
	_, err := store.ReadFile(store.Root + "/" + statusName)
	if r.binDir == "" || err != nil || slices.ContainsFunc(programs(), func(p program) bool {
		_, err := os.Lstat(filepath.Join(r.binDir, p.to))
		return !p.missing && err == nil
	}) {
		return nil
	}
	return fmt.Errorf("podlace-node ran on this node, but no plugin of Podlace is in %s: make the manifest with the same COMPONENTS as for the installation "+
		"(k3s and crio name other folders). If the plugins were removed by hand, remove %s/%s on this node", r.binDir, store.Root, statusName)
}

func configuration(networks []reconcile.Network, name string) reconcile.Network {
	for _, n := range networks {
		if n.Name == name {
			return n
		}
	}
	return reconcile.Network{Name: name}
}

// isPodlaces reports whether an attachment has a record of a Podlace plugin or is in one of its networks.
func isPodlaces(a *reconcile.Attachment, networks []reconcile.Network) bool {
	return hasRecord(a) || slices.ContainsFunc(networks, func(n reconcile.Network) bool { return n.Name == a.Network })
}

// hasRecord reports whether an attachment has a record of a Podlace plugin. With only a lease, it may be another program's.
func hasRecord(a *reconcile.Attachment) bool {
	return len(a.Damaged) > 0 || slices.ContainsFunc(a.Holders, func(plugin string) bool { return plugin != "host-local" })
}

func describePod(a *reconcile.Attachment) string {
	switch {
	case a.Pod != "":
		return plugin.Plain(a.Pod, reconcile.MaxName)
	case a.ContainerID != "":
		return "container " + plugin.Plain(a.ContainerID, reconcile.MaxName)
	}
	return "the pod of the record " + a.Damaged[0].Record + ", which cannot be read"
}

// removeLeftovers removes stale state of the plugins, which belongs to no pod.
func (r *removal) removeLeftovers(networks []reconcile.Network) error {
	var others []reconcile.Network
	if r.confDir != "" {
		others, _, _ = reconcile.Networks(r.confDir)
	}
	return rollback.Leftovers(networks, others, func(text string) { r.printLines(text) })
}
