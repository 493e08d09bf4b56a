// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/iptables"
	"github.com/podlace/podlace/pkg/kernel"
)

// Restore restores the rules of all attachments of the node from the records, after a flush: guards first, which protect pods from one
// another, then masquerade and the rules of VLAN gateways, then forwarding, gateway addresses with their routes, and the flags of ports. It
// changes nothing that is in place.
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
	return errors.Join(errs...)
}

func repairNetwork(host *kernel.Node, log *slog.Logger, locks attachment.Locker, network string) error {
	// The key without a container is the lock of the network.
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

// finished leaves out pods whose ADD has not come to its end: it may not have made all of their rules yet.
func finished(pods []attachment.Of[state]) []attachment.Of[state] {
	return slices.DeleteFunc(slices.Clone(pods), func(pod attachment.Of[state]) bool { return pod.State.Unfinished })
}

// intact reports whether the kernel has what a pod of the network shares with others, or the network has no pod. It reads one record at
// most. What cannot be read counts as intact.
func intact(host *kernel.Node, network string) bool {
	pod, ok := attachment.AnyIn(network, "bridge")
	var st state
	if !ok || json.Unmarshal(pod.State, &st) != nil || st.Unfinished {
		return true
	}
	if st.Guard != nil && isDifferent(compareGuards(host)) {
		return false
	}
	if _, lost, _ := st.lostGateway(host); lost {
		return false
	}
	for _, p := range st.paths() {
		if lost, _ := p.lost(host, network); len(lost) > 0 {
			return false
		}
	}
	if text, noted := attachment.NotedIn(network, masqueraded); noted && text != "" {
		if isDifferent(compareMasquerade(host, MasqueradeSets{Network: network, Local: multicast()})) {
			return false
		}
	}
	return st.Masquerade != "iptables" || !slices.ContainsFunc(st.Addresses, func(a netip.Prefix) bool {
		return iptables.LacksChain(&host.NFT, a.Addr().Is4(), masqueradeChain(pod.Key))
	})
}
