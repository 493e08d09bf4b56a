// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"sync"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/nodefile"
	"github.com/podlace/podlace/pkg/plugin"
)

// useClusterCIDR, in upper or lower case, stands for the pod CIDRs of all nodes in ipMasq.nonMasqueradeCIDRs.
const useClusterCIDR = "useClusterCidr"

// resolve replaces "auto" (key mtu) and useClusterCidr by the values of node.json, which it reads only for these, for ADD and STATUS.
func (c *Config) resolve(r *plugin.Request) error {
	if c.AutoMTU {
		file, node, err := nodefile.Of(r)
		if err != nil && file == nodefile.Path { // otherwise no file contains an MTU, and the uplink's MTU is used
			return plugin.Errorf(plugin.CodeConfig, "mtu auto: %w", err)
		}
		c.MTU = node.MTU
	}
	if !c.Masquerade.UseCluster {
		return nil
	}
	file, node, err := nodefile.Of(r)
	if err == nil && len(node.ClusterCIDRs) == 0 {
		err = fmt.Errorf("%s has no clusterCIDRs", file)
	}
	if err != nil {
		return plugin.WithHint(plugin.Errorf(plugin.CodeConfig, "ipMasq.nonMasqueradeCIDRs %s: %w", useClusterCIDR, err),
			`podlace-node writes the file; without it, write the cluster's CIDRs into its key clusterCIDRs, or in the place of %s`, useClusterCIDR)
	}
	c.Masquerade = c.Masquerade.withClusterCIDRs(node.ClusterCIDRs)
	return nil
}

// clusterCIDRs returns the exceptions that replaced useClusterCidr.
func (m Masquerade) clusterCIDRs() []netip.Prefix { return m.Except[m.listedCount():] }

// listedCount returns the number of exceptions that the configuration lists as CIDRs.
func (m Masquerade) listedCount() int { return max(0, len(m.Except)-max(0, m.Cluster)) }

// withClusterCIDRs returns a copy of m in which useClusterCidr stands for the given CIDRs.
func (m Masquerade) withClusterCIDRs(cidrs []netip.Prefix) Masquerade {
	m.Except = slices.Concat(m.Except[:m.listedCount()], cidrs)
	m.Cluster = len(cidrs)
	return m
}

// clusterCIDRs returns what useClusterCidr meant when the attachment's exceptions were last written, so CHECK and rollback need no
// node.json.
func (st state) clusterCIDRs(network string) []netip.Prefix {
	if st.Masquerade == "iptables" {
		return Masquerade{Except: st.Except, Cluster: st.Cluster}.clusterCIDRs()
	}
	m, _ := notedMasquerade(network)
	return m.clusterCIDRs()
}

// RenewClusterCIDRs updates the masquerade exceptions of networks and pods with useClusterCidr after clusterCIDRs in node.json changed. It
// is a no-op if they are current or node.json has none. The caller must not hold an attachment's lock, because it waits for them.
func RenewClusterCIDRs(log *slog.Logger) error {
	networks, err := attachment.Networks()
	errs := []error{err}
	read := readClusterCIDRs()
	for _, network := range networks {
		if err := renewNetwork(log.With("network", network), network, read); err != nil {
			errs = append(errs, fmt.Errorf("network %s: %w", network, err))
		}
	}
	return errors.Join(errs...)
}

// readClusterCIDRs returns a function that returns the clusterCIDRs of node.json, or nil. Only its first call reads the file.
func readClusterCIDRs() func() []netip.Prefix {
	return sync.OnceValue(func() []netip.Prefix {
		_, node, err := nodefile.Read()
		if err != nil {
			slog.Debug("masquerade exceptions are not updated", "error", err)
		}
		return node.ClusterCIDRs
	})
}

// renewNetwork updates the exceptions that all pods of the network share (nftables) and those of single pods (iptables).
func renewNetwork(log *slog.Logger, network string, read func() []netip.Prefix) error {
	errs := []error{renewShared(log, network, read)}
	pods, err := attachment.States[state](attachment.List(network, "bridge"))
	errs = append(errs, err)
	for _, pod := range pods {
		if pod.State.staleExceptions(read) {
			errs = append(errs, renewPod(log, pod.Key, read))
		}
	}
	return errors.Join(errs...)
}

func renewShared(log *slog.Logger, network string, read func() []netip.Prefix) error {
	if _, stale := staleNote(network, read); !stale {
		return nil
	}
	att, err := attachment.Waiting.Key(attachment.Key{Network: network})
	if err != nil {
		return err
	}
	defer att.Close()
	m, stale := staleNote(network, read)
	pods, err := attachment.States[state](attachment.List(network, "bridge"))
	if err != nil || !stale {
		return err
	}
	log.Info("updated the masquerade exceptions from node.json", "clusterCIDRs", m.clusterCIDRs())
	return writeMasquerade(att, m, pods)
}

// staleNote reports whether the network's note file, which has the masquerade configuration in force, differs from node.json in the CIDRs
// for useClusterCidr. If so, m is this configuration with the CIDRs of node.json. Without useClusterCidr it is never stale.
func staleNote(network string, read func() []netip.Prefix) (m Masquerade, stale bool) {
	m, ok := notedMasquerade(network)
	if !ok || m.Cluster == 0 {
		return m, false
	}
	cidrs := read()
	if len(cidrs) == 0 || slices.Equal(cidrs, m.clusterCIDRs()) {
		return m, false
	}
	return m.withClusterCIDRs(cidrs), true
}

// staleExceptions reports whether the pod's iptables rules exempt other CIDRs for useClusterCidr than node.json has. A pod with nftables
// masquerade has no such rules.
func (st state) staleExceptions(read func() []netip.Prefix) bool {
	if st.Masquerade != "iptables" || st.Cluster == 0 || st.Unfinished {
		return false
	}
	cidrs := read()
	return len(cidrs) > 0 && !slices.Equal(cidrs, st.clusterCIDRs(""))
}

// renewPod updates the exceptions of one pod. Like ADD and DEL, it locks the attachment before the network.
func renewPod(log *slog.Logger, key attachment.Key, read func() []netip.Prefix) error {
	att, rec, ok, err := attachment.Reopen[state](attachment.Waiting, key, "bridge")
	if err != nil || !ok {
		return err
	}
	defer att.Close()
	st := rec.State
	if !st.staleExceptions(read) {
		return nil
	}
	unlock, err := att.LockNetwork() // excludes processes that restore rules from the records
	if err != nil {
		return err
	}
	defer unlock()
	m := Masquerade{Except: st.Except, Cluster: st.Cluster}.withClusterCIDRs(read())
	st.Except, st.Cluster = m.Except, m.Cluster
	log.Info("updated the masquerade exceptions from node.json", "clusterCIDRs", m.clusterCIDRs(), "container", key.ContainerID)
	if err := masqueradeByIPTables(key, st.byIPTables(), st.Except, false); err != nil {
		return err
	}
	att.SaveProgress(st)
	return nil
}
