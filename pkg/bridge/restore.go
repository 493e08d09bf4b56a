// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"encoding/json"
	"errors"
	"fmt"

	"github.com/podlace/podlace/pkg/attachment"
	"github.com/podlace/podlace/pkg/kernel"
)

// Restore brings back the rules of all attachments of the node, after somebody flushed them: what protects pods from one another first,
// then masquerade. What is there is left alone.
func Restore(host *kernel.Node) error {
	errs := []error{restoreGuards(host)}
	networks, err := attachment.Networks()
	errs = append(errs, err)
	for _, network := range networks {
		if err := restoreNetwork(host, network); err != nil {
			errs = append(errs, fmt.Errorf("network %s: %w", network, err))
		}
	}
	return errors.Join(errs...)
}

func restoreNetwork(host *kernel.Node, network string) error {
	// The key without a container is the lock of the network.
	att, err := attachment.LockKey(attachment.Key{Network: network})
	if err != nil {
		return err
	}
	defer att.Close()
	var errs []error
	var m Masquerade
	if text, noted := att.Noted(masqueraded); noted && json.Unmarshal([]byte(text), &m) == nil {
		all, err := allMasquerade(network, m)
		if err == nil {
			err = host.SetMasquerade(all)
		}
		errs = append(errs, err)
	}
	records, err := attachment.List(network, "bridge")
	errs = append(errs, err)
	for _, is4 := range []bool{true, false} {
		errs = append(errs, restoreIPTables(host, records, is4))
	}
	return errors.Join(errs...)
}

// restoreIPTables writes the rules of pods that are masqueraded by iptables and have none.
func restoreIPTables(host *kernel.Node, records []attachment.Record, is4 bool) error {
	byKey := map[attachment.Key][]string{}
	for _, rec := range records {
		var st state
		if json.Unmarshal(rec.State, &st) != nil || st.Masquerade != "iptables" {
			continue
		}
		if lines := masqueradeLines(rec.Key, is4, st.Addresses, st.Except); len(lines) > 0 {
			byKey[rec.Key] = lines
		}
	}
	if len(byKey) == 0 {
		return nil
	}
	return host.EditNAT(is4, func(nat kernel.NAT) (lines []string, _ error) {
		for key, own := range byKey {
			if chain := masqueradeChain(key); len(nat.Rules("POSTROUTING", "-j "+chain+" ")) == 0 || len(nat.Rules(chain)) == 0 {
				lines = append(append(lines, nat.Deletions("POSTROUTING", chain)...), own...)
			}
		}
		return lines, nil
	})
}
