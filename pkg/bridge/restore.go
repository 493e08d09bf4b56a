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
// another, then masquerade and the rules of VLAN gateways. It changes nothing that is in place.
func Restore(host *kernel.Node, log *slog.Logger) error {
	return restoreAll(host, log, attachment.Waiting)
}

func restoreAll(host *kernel.Node, log *slog.Logger, locks attachment.Locker) error {
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
	return errors.Join(errs...)
}

func restoreNetwork(host *kernel.Node, log *slog.Logger, locks attachment.Locker, network string) error {
	// The key without a container is the lock of the network.
	att, err := locks.Key(attachment.Key{Network: network})
	if err != nil {
		return locks.Tolerate(err)
	}
	defer att.Close()
	log = log.With("network", network)
	errs := []error{restoreMasquerade(host, log, att)}
	records, err := attachment.List(network, "bridge")
	errs = append(errs, err, restoreVLANGateways(host, log, records))
	for _, is4 := range []bool{true, false} {
		errs = append(errs, locks.Tolerate(restoreIPTables(log, records, is4, locks == attachment.Waiting)))
	}
	return errors.Join(errs...)
}

// restoreMasquerade writes the sets and the chain of a network that has pods, if any of it is missing. What an ADD has not written yet is not
// missing.
func restoreMasquerade(host *kernel.Node, log *slog.Logger, att *attachment.Attachment) error {
	var m Masquerade
	if text, noted := att.Noted(masqueraded); !noted || json.Unmarshal([]byte(text), &m) != nil {
		return nil
	}
	all, written, err := allMasquerade(att.Network, m)
	if err != nil || len(written.Sources) == 0 {
		return err
	}
	missing, err := missingMasquerade(host, written)
	if err != nil {
		return err
	}
	if has, err := hasMasquerade(host, att.Network); err != nil || has && missing.empty() {
		return err
	}
	log.Info("masquerade is missing and is restored from the records")
	return SetMasquerade(all)
}

// restoreVLANGateways writes the rules of the gateways that the pods of VLANs have.
func restoreVLANGateways(host *kernel.Node, log *slog.Logger, records []attachment.Record) error {
	var errs []error
	seen := map[string]bool{}
	for _, rec := range records {
		var st state
		if json.Unmarshal(rec.State, &st) != nil || st.VLANs.ID == 0 || len(st.Gateways) == 0 {
			continue
		}
		name := vlanGateway(st.Bridge, st.VLANs.ID)
		if seen[name] {
			continue
		}
		seen[name] = true
		link, ok, err := host.Link(name)
		if err == nil && ok && checkVLANGateway(host, rulesOf(kernel.Link{Name: st.Bridge}, link)) != nil {
			log.Info("the rules of a VLAN's gateway are missing and are restored from the records", "gateway", name)
			err = EnsureVLANGateway(host, rulesOf(kernel.Link{Name: st.Bridge}, link))
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// restoreIPTables writes the rules of pods that are masqueraded by iptables and have none. Without wait it fails as busy where it would wait
// for a lock.
func restoreIPTables(log *slog.Logger, records []attachment.Record, is4, wait bool) error {
	byKey := map[attachment.Key][]string{}
	for _, rec := range records {
		var st state
		if json.Unmarshal(rec.State, &st) != nil || st.Unfinished || st.Masquerade != "iptables" {
			continue
		}
		if lines := masqueradeLines(rec.Key, is4, st.Addresses, st.Except); len(lines) > 0 {
			byKey[rec.Key] = lines
		}
	}
	if len(byKey) == 0 {
		return nil
	}
	table, err := iptables.Open(is4, wait)
	if err != nil {
		return err
	}
	defer table.Close()
	nat, lines := table.NAT(), []string(nil)
	for key, own := range byKey {
		if chain := masqueradeChain(key); len(nat.Rules("POSTROUTING", "-j "+chain+" ")) == 0 || len(nat.Rules(chain)) == 0 {
			lines = append(append(lines, nat.Deletions("POSTROUTING", chain)...), own...)
		}
	}
	if len(lines) > 0 {
		log.Info("masquerade is missing and is restored from the records", "program", "iptables", "lines", len(lines))
	}
	return table.Apply(lines)
}

// intact reports whether the kernel has what a pod of the configuration shares with others, or the network has no pod. It reads one record at
// most. What cannot be read counts as intact.
func (c Config) intact(host *kernel.Node, network string) bool {
	pod, ok := attachment.AnyIn(network, "bridge")
	var st state
	if !ok || json.Unmarshal(pod.State, &st) != nil || st.Unfinished {
		return true
	}
	if st.Guard != nil {
		if has, err := hasGuards(host); err == nil && !has {
			return false
		}
	}
	if name := c.gatewayName(); name != c.Bridge {
		link, ok, err := host.Link(name)
		if err == nil && ok && checkVLANGateway(host, rulesOf(kernel.Link{Name: c.Bridge}, link)) != nil {
			return false
		}
	}
	if text, noted := attachment.NotedIn(network, masqueraded); noted && text != "" {
		if has, err := hasMasquerade(host, network); err == nil && !has {
			return false
		}
	}
	return st.Masquerade != "iptables" || !slices.ContainsFunc(st.Addresses, func(a netip.Prefix) bool {
		return iptables.LacksChain(&host.NFT, a.Addr().Is4(), masqueradeChain(pod.Key))
	})
}
