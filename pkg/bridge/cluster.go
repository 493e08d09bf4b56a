// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"encoding/json"
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

// useClusterCIDR is the word in ipMasq.nonMasqueradeCIDRs, in any case of letters, that stands for the CIDRs of the pods of all nodes.
const useClusterCIDR = "useClusterCidr"

// resolve puts what node.json says in the place of the words, for an ADD or STATUS. Without a word the file is not read.
func (c *Config) resolve(r *plugin.Request) error {
	if c.AutoMTU {
		file, node, err := nodefile.Of(r)
		if err != nil && file == nodefile.Path { // a file that is not there says nothing about the MTU, as does flannel's
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
	c.Masquerade = c.Masquerade.with(node.ClusterCIDRs)
	return nil
}

// clusterCIDRs returns the exceptions that useClusterCidr stands for.
func (m Masquerade) clusterCIDRs() []netip.Prefix { return m.Except[m.listed():] }

// listed returns how many exceptions the configuration lists by themselves.
func (m Masquerade) listed() int { return max(0, len(m.Except)-max(0, m.Cluster)) }

// with returns m with other CIDRs for useClusterCidr.
func (m Masquerade) with(cidrs []netip.Prefix) Masquerade {
	m.Except = slices.Concat(m.Except[:m.listed()], cidrs)
	m.Cluster = len(cidrs)
	return m
}

// clusterCIDRs returns what useClusterCidr stood for when the exceptions of an attachment were last written. CHECK and rollback need no
// node.json.
func (st state) clusterCIDRs(network string) []netip.Prefix {
	m := Masquerade{Except: st.Except, Cluster: st.Cluster}
	if st.Masquerade != "iptables" {
		text, _ := attachment.NotedIn(network, masqueraded)
		m = Masquerade{}
		_ = json.Unmarshal([]byte(text), &m)
	}
	return m.clusterCIDRs()
}

// RenewClusterCIDRs writes the exceptions from masquerade of live networks anew, after clusterCIDRs of node.json changed: of those networks
// and pods whose exceptions came from useClusterCidr. It is a no-op where they are up to date, or if the file has none. It waits for
// locks of attachments, so the caller must not hold one.
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

// readClusterCIDRs returns a function that reads node.json at its first call, and returns nil if the file has no CIDRs.
func readClusterCIDRs() func() []netip.Prefix {
	return sync.OnceValue(func() []netip.Prefix {
		_, node, err := nodefile.Read()
		if err != nil {
			slog.Debug("exceptions from masquerade stay as they are", "error", err)
		}
		return node.ClusterCIDRs
	})
}

// renewNetwork renews the exceptions that pods share, and those of each pod that has its own.
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
	log.Info("the exceptions from masquerade follow node.json", "clusterCIDRs", m.clusterCIDRs())
	return writeMasquerade(att, m, pods)
}

// staleNote returns what the network shall masquerade by node.json, and whether that is other than what it does. The configuration of a
// network without the word does not change.
func staleNote(network string, read func() []netip.Prefix) (m Masquerade, stale bool) {
	text, _ := attachment.NotedIn(network, masqueraded)
	if json.Unmarshal([]byte(text), &m) != nil || m.Cluster == 0 {
		return m, false
	}
	cidrs := read()
	if len(cidrs) == 0 || slices.Equal(cidrs, m.clusterCIDRs()) {
		return m, false
	}
	return m.with(cidrs), true
}

// staleExceptions reports whether node.json has other CIDRs than the rules of a pod that is masqueraded by iptables.
func (st state) staleExceptions(read func() []netip.Prefix) bool {
	if st.Masquerade != "iptables" || st.Cluster == 0 || st.Unfinished {
		return false
	}
	cidrs := read()
	return len(cidrs) > 0 && !slices.Equal(cidrs, st.clusterCIDRs(""))
}

// renewPod takes the lock of the pod before that of the network, as ADD and DEL do.
func renewPod(log *slog.Logger, key attachment.Key, read func() []netip.Prefix) error {
	att, rec, ok, err := attachment.Waiting.Reopen(key, "bridge")
	if err != nil || !ok {
		return err
	}
	defer att.Close()
	var st state
	if err := json.Unmarshal(rec.State, &st); err != nil || !st.staleExceptions(read) {
		return err
	}
	unlock, err := att.LockNetwork() // against those who restore rules from the records
	if err != nil {
		return err
	}
	defer unlock()
	m := Masquerade{Except: st.Except, Cluster: st.Cluster}.with(read())
	st.Except, st.Cluster = m.Except, m.Cluster
	log.Info("the exceptions from masquerade follow node.json", "clusterCIDRs", m.clusterCIDRs(), "container", key.ContainerID)
	if err := masqueradeByIPTables(key, st.byIPTables(), st.Except); err != nil {
		return err
	}
	att.Resave(st)
	return nil
}
