// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"errors"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/nft"
)

// Chains maps each parent chain of the nat table to the chains that it jumps to.
//
// The chains of iptables-nft are in nf_tables, so Podlace changes them through netlink. It starts an iptables program only if legacy
// xtables have a nat table.
type Chains map[string][]string

// RemoveChain removes a chain of IPv4 and IPv6, and the parent's rules that jump to it. It looks in nf_tables and in legacy xtables,
// because the node's iptables variant may have changed since the chain was written. It is a no-op if the chain does not exist.
func RemoveChain(parent, chain string) error {
	chains := Chains{parent: {chain}}
	err := nft.Remove("nft delete chain "+chain, nft.Removal{Chains: chains.Jumps()})
	return errors.Join(err, chains.RemoveLegacy())
}

// Jumps returns the chains as nf_tables jumps of IPv4 and IPv6.
func (c Chains) Jumps() (all []nft.Jump) {
	for _, is4 := range []bool{true, false} {
		for parent, names := range c {
			for _, name := range names {
				all = append(all, nft.Jump{Parent: Place(is4, parent), Chain: name})
			}
		}
	}
	return all
}

// Place returns where nf_tables has an iptables chain.
func Place(is4 bool, chain string) nft.Place {
	return nft.Place{Family: nft.FamilyOf(is4).Proto, Table: "nat", Chain: chain}
}

// LacksRules reports whether a chain of the nat table is certainly missing or empty. It starts no program, so it returns false while
// iptables-legacy, whose rules it cannot read, is in use.
func LacksRules(conn *nft.Conn, is4 bool, chain string) bool {
	if LegacyUsed(is4) {
		return false
	}
	t, err := conn.Open("")
	if err != nil {
		return false
	}
	rules, err := t.Rules(Place(is4, chain))
	return err == nil && len(rules) == 0
}

// LegacyTables returns the names of legacy xtables' tables. It reads the network namespace of the current thread, because the first thread
// of the process may be in another one.
func LegacyTables(is4 bool) ([]string, error) {
	data, err := os.ReadFile("/proc/thread-self/net/" + strings.TrimSuffix(name(is4), "tables") + "_tables_names")
	if errors.Is(err, fs.ErrNotExist) { // the kernel has not loaded legacy xtables
		err = nil
	}
	return strings.Fields(string(data)), err
}

// LegacyUsed reports whether legacy xtables have a nat table. The kernel hides it in the namespaces of an ordinary user; then the result is
// whether the node's iptables program is the legacy variant.
func LegacyUsed(is4 bool) bool { return hasLegacy(is4, "nat") }

func hasLegacy(is4 bool, table string) bool {
	tables, err := LegacyTables(is4)
	if errors.Is(err, fs.ErrPermission) {
		return IsLegacy(is4)
	}
	return slices.Contains(tables, table)
}

// LegacyFilter returns the filter table of legacy xtables in the format of iptables-save, or "" if there is none. It starts a program, so
// only an administrator's commands call it.
func LegacyFilter(is4 bool) (string, error) {
	if !hasLegacy(is4, "filter") {
		return "", nil
	}
	return run(legacyProgram(is4), "-save", "", nil, "-t", "filter")
}

// IsLegacy reports whether the node's iptables program is the legacy variant.
func IsLegacy(is4 bool) bool {
	path, err := lookPath(name(is4) + "-restore")
	if err == nil {
		path, err = filepath.EvalSymlinks(path)
	}
	return err == nil && strings.Contains(filepath.Base(path), "legacy")
}

// legacyProgram returns the program that changes legacy xtables: the one with the suffix "-legacy" if it is installed.
func legacyProgram(is4 bool) string {
	if legacy := name(is4) + "-legacy"; installed(legacy) {
		return legacy
	}
	return name(is4)
}

// RemoveLegacy removes the chains of IPv4 and IPv6 from legacy xtables. It is a no-op without a legacy nat table.
func (c Chains) RemoveLegacy() error {
	var errs []error
	for _, is4 := range []bool{true, false} {
		if !LegacyUsed(is4) {
			continue
		}
		for parent, names := range c {
			for _, chain := range names {
				err := removeLegacy(legacyProgram(is4), parent, chain)
				if errs = append(errs, err); isBusy(err) {
					return errors.Join(errs...) // a retry would wait just as long for the same lock
				}
			}
		}
	}
	return errors.Join(errs...)
}

func removeLegacy(program, parent, chain string) error {
	if !installed(program) {
		slog.Warn("iptables is not installed, so its rules cannot be removed", "program", program, "chain", chain)
		return nil
	}
	e, err := open(program, true)
	if err != nil {
		return err
	}
	defer e.Close()
	if !e.nat.HasChain(chain) {
		return nil
	}
	return e.Apply(append(e.nat.Deletions(parent, chain), "-F "+chain, "-X "+chain))
}
