// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"cmp"
	"encoding/json"
	"path/filepath"

	"github.com/podlace/podlace/pkg/hostlocal"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/store"
)

// warnOfLeases logs a warning for each configuration that takeOver will rename whose pods have leases that the agent's conflist does not
// read. ADD would then give their addresses to new pods, except those to which the node has a host route.
func (a *agent) warnOfLeases(names []string) {
	ours := leaseFolder(a.config.conflist)
	for _, name := range names {
		path := filepath.Join(a.config.ConfDir, name)
		text, err := store.ReadFile(path)
		if err != nil {
			continue // as a runtime does
		}
		if theirs := leaseFolder(text); theirs == "" || theirs != ours {
			a.log.Warn("new pods may get addresses of running pods, whose leases this network does not read: give the conflist the name of their "+
				"network and their ipam.dataDir, or delete these pods", "file", path, "theirLeases", cmp.Or(theirs, "unknown"), "ourLeases", ours)
		}
	}
}

// leaseFolder returns the folder of a configuration's leases, or "" if host-local does not assign its addresses. flannel names host-local
// only to the plugin that it calls.
func leaseFolder(configuration []byte) string {
	type entry struct {
		Type string
		IPAM struct{ Type, DataDir string }
	}
	var list struct {
		entry
		Name    string
		Plugins []entry
	}
	_ = json.Unmarshal(configuration, &list) // what cannot be read is unknown
	for _, p := range append(list.Plugins, list.entry) {
		if plugin.Kind(p.IPAM.Type) == "host-local" || p.Type == "flannel" {
			return hostlocal.LeaseDir(list.Name, p.IPAM.DataDir)
		}
	}
	return ""
}
