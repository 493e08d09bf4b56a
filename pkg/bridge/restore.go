// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nft"
	"github.com/podlace/podlace/pkg/plugin"
)

// Restore brings back the state of all attachments on the node from their records, for example after a flush: guards first, which protect
// pods from each other, then for each network masquerade, VLAN gateways' rules, bridges with their ports and flags, forwarding, and gateway
// addresses with their routes.
func Restore(host *kernel.Node, log *slog.Logger, locks attachment.Locker) error {
	if pods, err := attachment.Any("bridge"); err != nil || !pods {
		return err
	}
	errs := []error{restoreGuards(host, log, locks)}
	networks, err := attachment.Networks()
	errs = append(errs, err)
	for _, network := range networks {
		if err := restoreNetwork(host, log, locks, network); err != nil {
			errs = append(errs, fmt.Errorf("network %s: %w", network, err))
		}
	}
	return errors.Join(append(errs, forgetFlushed(host, vlanSchema()))...)
}

// restoreFlushed restores the rules of all networks if a base chain is missing or empty. It sends one query for each base chain, so none on
// a node that never had rules. Errors are only logged, because the current ADD is for another pod.
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

// baseChains returns the base chains that the node should have: those of the guards, of each network's masquerade, and of the VLAN
// gateways. If one is missing, another program flushed the rules.
func baseChains() (all []nft.Place) {
	if isNoted(nft.GuardTable) {
		all = append(all, nft.Place{Family: unix.NFPROTO_BRIDGE, Table: nft.GuardTable, Chain: guardChain})
	}
	networks, _ := attachment.Networks()
	for _, network := range networks {
		if _, noted := notedMasquerade(network); noted {
			m := MasqueradeSets{Network: network}
			all = append(all, m.chain(m.chainName()))
		}
	}
	if isNoted(nft.VLANTable) {
		all = append(all, nft.Place{Family: unix.NFPROTO_INET, Table: nft.VLANTable, Chain: vlanChain})
	}
	return all
}

// isNoted reports whether a note file says that the node should have a table. After a flush, only it or the records of all pods can tell.
func isNoted(table string) bool {
	_, noted := attachment.ReadNote(attachment.OfNode, table)
	return noted
}

func noteTable(table string) error {
	if isNoted(table) {
		return nil
	}
	return attachment.WriteNote(attachment.OfNode, table, "")
}

// forgetFlushed removes the note file of a table that is missing, which it checks again because of concurrent ADDs, and that no pod needs.
func forgetFlushed(host *kernel.Node, s nft.Schema) error {
	if !isNoted(s.Table) {
		return nil
	}
	if ok, err := s.Intact(&host.NFT); ok || err != nil {
		return err
	}
	if err := attachment.RemoveNote(attachment.OfNode, s.Table); err != nil {
		return err
	}
	if ok, err := s.Intact(&host.NFT); !ok || err != nil {
		return err
	}
	return noteTable(s.Table)
}

func restoreNetwork(host *kernel.Node, log *slog.Logger, locks attachment.Locker, network string) error {
	// a key with only a network selects the lock of the network
	att, err := locks.Key(attachment.Key{Network: network})
	if err != nil {
		return locks.Tolerate(err)
	}
	defer att.Close()
	log = log.With("network", network)
	pods, err := attachment.States[state](attachment.List(network, "bridge"))
	errs := []error{err, restoreMasquerade(host, log, att, pods), restoreVLANGateways(host, log, pods)}
	if locks == attachment.Waiting {
		errs = append(errs, restoreBridges(host, log, finished(pods)))
	} else { // STATUS, which runtimes call again and again, leaves a bridge that an admin deleted or set down
		errs = append(errs, restorePorts(host, log, finished(pods)))
	}
	errs = append(errs, restorePaths(host, log, network, finished(pods)))
	for _, is4 := range []bool{true, false} {
		errs = append(errs, locks.Tolerate(restoreIPTables(log, pods, is4, locks == attachment.Waiting)))
	}
	return errors.Join(errs...)
}

// finished returns the pods without those of unfinished ADDs, which may not have written all their rules yet.
func finished(pods []attachment.Of[state]) []attachment.Of[state] {
	return slices.DeleteFunc(slices.Clone(pods), func(pod attachment.Of[state]) bool { return pod.State.Unfinished })
}

// Lost returns which of the state that pods share the kernel lacks, in all networks, because a runtime may call STATUS for only one. It
// reads one record of each network. State that cannot be read counts as present.
func Lost(host *kernel.Node) (lost []string) {
	needGuards := isNoted(nft.GuardTable)
	networks, _ := attachment.Networks()
	for _, network := range networks {
		if _, noted := notedMasquerade(network); noted &&
			plugin.IsDifferent(compareMasquerade(host, MasqueradeSets{Network: network, Local: multicast()})) {
			lost = append(lost, "masquerade of network "+network)
		}
		if key, st, ok := oldestPod(network); ok {
			lost = append(lost, st.lost(host, key)...)
			needGuards = needGuards || st.Guard != nil
		}
	}
	if needGuards && plugin.IsDifferent(guardDrift(host)) {
		lost = append(lost, "protection by "+nft.GuardTable)
	}
	if isNoted(nft.VLANTable) {
		if ok, err := vlanSchema().Intact(&host.NFT); !ok && err == nil {
			lost = append(lost, "rules of "+nft.VLANTable)
		}
	}
	return lost
}

// oldestPod returns the record of a network's oldest pod. Only this pod surely lacks rules after a flush, because a younger one may have
// been attached afterwards.
func oldestPod(network string) (key attachment.Key, st state, ok bool) {
	for rec := range attachment.OldestIn(network, "bridge") {
		if st, err := attachment.StateOf[state](rec); err == nil && !st.Unfinished {
			return rec.Key, st, true
		}
	}
	return key, st, false
}

// lost returns which rules of the pod the kernel lacks, and which routes and addresses through which the node reaches it.
func (st state) lost(host *kernel.Node, key attachment.Key) (lost []string) {
	if _, missing, _ := st.missingGatewayRules(host); missing {
		lost = append(lost, "rules of gateway "+st.gatewayLink())
	}
	for _, p := range st.paths() {
		parts, _ := p.missingParts(host, key.Network)
		for _, part := range parts {
			if !slices.Contains(lost, part.what) {
				lost = append(lost, part.what)
			}
		}
	}
	for _, a := range st.byIPTables() {
		if iptables.LacksRules(&host.NFT, a.Addr().Is4(), masqueradeChain(key)) {
			lost = append(lost, "iptables' masquerade of "+a.Addr().String())
		}
	}
	return lost
}
