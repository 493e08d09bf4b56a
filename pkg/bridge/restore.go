// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
)

// Restore restores the state of all attachments of the node from their records, after a flush. The order is: guards, which protect pods
// from one another; masquerade; the rules of VLAN gateways; forwarding, gateway addresses with their routes, and port flags. It does not
// change existing state.
func Restore(host *kernel.Node, log *slog.Logger, locks attachment.Locker) error {
	if pods, err := attachment.Any("bridge"); err != nil || !pods {
		return err
	}
	errs := []error{repairGuards(host, log, locks)}
	networks, err := attachment.Networks()
	errs = append(errs, err)
	for _, network := range networks {
		if err := repairNetwork(host, log, locks, network); err != nil {
			errs = append(errs, fmt.Errorf("network %s: %w", network, err))
		}
	}
	return errors.Join(append(errs, forgetFlushedVLANs(host))...)
}

// restoreFlushed restores the rules of all networks if a chain is missing or empty. It queries one chain per table, and only on a node that
// has or had rules. It only logs failures, because this ADD is about another pod.
func (j *job) restoreFlushed() {
	t, err := j.host.NFT.Open("")
	if err != nil {
		return
	}
	for _, place := range baseChains() {
		if chain, ok, err := t.Chain(place); err == nil && (!ok || chain.Uses == 0) {
			if err := Restore(j.host, j.r.Log, attachment.Waiting); err != nil {
				j.r.Log.Warn("rules of other pods could not be restored", "error", err)
			}
			return
		}
	}
}

// baseChains returns base chains that exist unless the rules were flushed: the guards' chain, each network's masquerade chain, and the VLAN
// gateways' chain.
func baseChains() (all []nft.Place) {
	if _, ok := attachment.NodeNoted(guarded); ok {
		all = append(all, nft.Place{Family: unix.NFPROTO_BRIDGE, Table: nft.GuardTable, Chain: guardChain})
	}
	networks, _ := attachment.Networks()
	for _, network := range networks {
		if text, _ := attachment.NotedIn(network, masqueraded); text != "" {
			chain := MasqueradeSets{Network: network}.chainName()
			all = append(all, nft.Place{Family: unix.NFPROTO_INET, Table: nft.MasqueradeTable, Chain: chain})
		}
	}
	if _, ok := attachment.NodeNoted(vlanTable); ok {
		all = append(all, nft.Place{Family: unix.NFPROTO_INET, Table: nft.VLANTable, Chain: vlanChain})
	}
	return all
}

func repairNetwork(host *kernel.Node, log *slog.Logger, locks attachment.Locker, network string) error {
	// A key without a container stands for the network's lock.
	att, err := locks.Key(attachment.Key{Network: network})
	if err != nil {
		return locks.Tolerate(err)
	}
	defer att.Close()
	log = log.With("network", network)
	pods, err := attachment.States[state](attachment.List(network, "bridge"))
	errs := []error{err, repairMasquerade(host, log, att, pods), repairVLANGateways(host, log, pods),
		repairPaths(host, log, network, finished(pods)), repairPorts(host, log, finished(pods))}
	for _, is4 := range []bool{true, false} {
		errs = append(errs, locks.Tolerate(repairIPTables(log, pods, is4, locks == attachment.Waiting)))
	}
	return errors.Join(errs...)
}

// finished leaves out pods of unfinished ADDs, which may not have written all their rules yet.
func finished(pods []attachment.Of[state]) []attachment.Of[state] {
	return slices.DeleteFunc(slices.Clone(pods), func(pod attachment.Of[state]) bool { return pod.State.Unfinished })
}

// Intact reports whether the kernel has the state that pods of all networks share. It covers all networks, because a runtime may call
// STATUS for only one. It reads one record per network. Unreadable state counts as intact.
func Intact(host *kernel.Node) bool {
	_, needGuards := attachment.NodeNoted(guarded)
	networks, _ := attachment.Networks()
	for _, network := range networks {
		if text, _ := attachment.NotedIn(network, masqueraded); text != "" {
			if isDifferent(compareMasquerade(host, MasqueradeSets{Network: network, Local: multicast()})) {
				return false
			}
		}
		key, st, ok := oldest(network)
		if !ok {
			continue
		}
		if st.lacksRules(host, key) {
			return false
		}
		needGuards = needGuards || st.Guard != nil
	}
	if needGuards && isDifferent(guardDrift(host)) {
		return false
	}
	if _, noted := attachment.NodeNoted(vlanTable); !noted {
		return true
	}
	ok, err := hasVLANTable(host)
	return ok || err != nil
}

// oldest returns the oldest pod of a network. Any flush removed this pod's rules too, while younger pods may have been attached after the
// flush.
func oldest(network string) (key attachment.Key, st state, ok bool) {
	for rec := range attachment.OldestIn(network, "bridge") {
		var st state
		if json.Unmarshal(rec.State, &st) == nil && !st.Unfinished {
			return rec.Key, st, true
		}
	}
	return key, st, false
}

// lacksRules reports whether the kernel lacks paths or rules of one pod.
func (st state) lacksRules(host *kernel.Node, key attachment.Key) bool {
	if _, lost, _ := st.lostGateway(host); lost {
		return true
	}
	for _, p := range st.paths() {
		if lost, _ := p.missingParts(host, key.Network); len(lost) > 0 {
			return true
		}
	}
	return slices.ContainsFunc(st.byIPTables(), func(a netip.Prefix) bool {
		return iptables.LacksChain(&host.NFT, a.Addr().Is4(), masqueradeChain(key))
	})
}
