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

// useClusterCIDR is a keyword in ipMasq.nonMasqueradeCIDRs. The keyword stands for the pod CIDRs of all nodes. The keyword may be written
// in upper or lower case.
const useClusterCIDR = "useClusterCidr"

// resolve() replaces the keywords "auto" (key mtu) and useClusterCidr in the configuration by the values in node.json. ADD and STATUS call
// resolve(). resolve() reads node.json only if the configuration contains one of these keywords.
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

// clusterCIDRs returns the masquerade exceptions that replaced the keyword useClusterCidr.
func (m Masquerade) clusterCIDRs() []netip.Prefix { return m.Except[m.listedCount():] }

// listedCount returns the number of exceptions that the configuration lists as CIDRs.
func (m Masquerade) listedCount() int { return max(0, len(m.Except)-max(0, m.Cluster)) }

// withClusterCIDRs returns a copy of m in which the given CIDRs replace the current CIDRs for the keyword useClusterCidr.
func (m Masquerade) withClusterCIDRs(cidrs []netip.Prefix) Masquerade {
	m.Except = slices.Concat(m.Except[:m.listedCount()], cidrs)
	m.Cluster = len(cidrs)
	return m
}

// clusterCIDRs returns the CIDRs that replaced useClusterCidr when the exceptions of an attachment were last written. With these CIDRs,
// CHECK and rollback do not need node.json.
func (st state) clusterCIDRs(network string) []netip.Prefix {
	if st.Masquerade == "iptables" {
		return Masquerade{Except: st.Except, Cluster: st.Cluster}.clusterCIDRs()
	}
	m, _ := notedMasquerade(network)
	return m.clusterCIDRs()
}

// RenewClusterCIDRs updates the masquerade exceptions of networks and pods after the key clusterCIDRs in node.json changed.
// RenewClusterCIDRs updates only networks and pods whose configuration contains useClusterCidr. RenewClusterCIDRs is a no-op if the
// exceptions are current, or if node.json has no clusterCIDRs. The caller must not hold a lock of an attachment, because RenewClusterCIDRs
// waits for these locks.
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

// readClusterCIDRs returns a function. This function returns the CIDRs in the key clusterCIDRs of node.json, or nil if node.json lacks this
// key. Only the first call of this function reads the file.
func readClusterCIDRs() func() []netip.Prefix {
	return sync.OnceValue(func() []netip.Prefix {
		_, node, err := nodefile.Read()
		if err != nil {
			slog.Debug("masquerade exceptions are not updated", "error", err)
		}
		return node.ClusterCIDRs
	})
}

// renewNetwork updates the masquerade exceptions that all pods of the network share (nftables), and the masquerade exceptions of single
// pods (iptables).
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

// staleNote reads the network's note file with the masquerade configuration that is in force. The second result is true if the CIDRs for
// useClusterCidr in this file differ from node.json. If the second result is true, the first result is the masquerade configuration
// with the CIDRs from node.json. A configuration without useClusterCidr is never stale.
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

// staleExceptions reports whether the CIDRs that the pod's iptables rules exempt for useClusterCidr differ from the CIDRs in node.json.
// staleExceptions returns false for a pod with nftables masquerade.
func (st state) staleExceptions(read func() []netip.Prefix) bool {
	if st.Masquerade != "iptables" || st.Cluster == 0 || st.Unfinished {
		return false
	}
	cidrs := read()
	return len(cidrs) > 0 && !slices.Equal(cidrs, st.clusterCIDRs(""))
}

// renewPod updates the masquerade exceptions of one pod. renewPod takes the attachment's lock before the network's lock, in the same order
// as ADD and DEL.
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
	if err := masqueradeByIPTables(key, st.byIPTables(), st.Except); err != nil {
		return err
	}
	att.SaveProgress(st)
	return nil
}
