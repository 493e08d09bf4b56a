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

// Chains maps each parent chain to the chains that it jumps to, in the nat table and, below POSTROUTING, also in the mangle table.
//
// The chains of iptables-nft are in nf_tables, so Podlace changes them through netlink. It starts an iptables program only if legacy
// xtables have a nat table.
type Chains map[string][]string

// RemoveChain removes a chain of IPv4 and IPv6, and the parent's rules that jump to it. It looks in nf_tables and in legacy xtables,
// because the node's iptables variant may have changed since the chain was written. It is a no-op if the chain does not exist.
func RemoveChain(parent, chain string) error {
	chains := Chains{parent: {chain}}
	return errors.Join(nft.Remove("nft delete chain "+chain, nft.Removal{Chains: chains.Jumps()}), chains.RemoveLegacy())
}

// RemoveMangle is RemoveChain for a chain below POSTROUTING in the mangle table alone.
func RemoveMangle(chain string) error {
	chains := Chains{postrouting: {chain}}
	return errors.Join(nft.Remove("nft delete chain "+chain, nft.Removal{Chains: chains.jumps("mangle")}), chains.removeLegacy("mangle"))
}

const postrouting = "POSTROUTING"

// Jumps returns the chains as nf_tables jumps of IPv4 and IPv6.
func (c Chains) Jumps() []nft.Jump { return append(c.jumps("nat"), c.jumps("mangle")...) }

func (c Chains) jumps(table string) (all []nft.Jump) {
	for _, is4 := range []bool{true, false} {
		for parent, names := range c.in(table) {
			for _, name := range names {
				all = append(all, nft.Jump{Parent: place(is4, table, parent), Chain: name})
			}
		}
	}
	return all
}

func (c Chains) in(table string) Chains {
	if table == "nat" {
		return c
	}
	return Chains{postrouting: c[postrouting]}
}

// Place returns where nf_tables has a chain of the nat table.
func Place(is4 bool, chain string) nft.Place { return place(is4, "nat", chain) }

func place(is4 bool, table, chain string) nft.Place {
	return nft.Place{Family: nft.FamilyOf(is4).Proto, Table: table, Chain: chain}
}

// LacksRules reports whether a chain of the nat table, or that of the same name in the mangle table, is certainly missing or empty. It
// starts no program, so it returns false while iptables-legacy, whose rules it cannot read, is in use.
func LacksRules(conn *nft.Conn, is4 bool, chain string) bool {
	if LegacyUsed(is4) {
		return false
	}
	t, err := conn.Open("")
	if err != nil {
		return false
	}
	for _, table := range []string{"nat", "mangle"} {
		if rules, err := t.Rules(place(is4, table, chain)); err == nil && len(rules) == 0 {
			return true
		}
	}
	return false
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

// RemoveLegacy removes the chains of IPv4 and IPv6 from legacy xtables. It is a no-op without the legacy tables.
func (c Chains) RemoveLegacy() error {
	return errors.Join(c.removeLegacy("nat"), c.removeLegacy("mangle"))
}

func (c Chains) removeLegacy(table string) error {
	var errs []error
	for _, is4 := range []bool{true, false} {
		if !hasLegacy(is4, table) {
			continue
		}
		for parent, names := range c.in(table) {
			for _, chain := range names {
				err := removeLegacy(legacyProgram(is4), table, parent, chain)
				if errs = append(errs, err); isBusy(err) {
					return errors.Join(errs...) // a retry would wait just as long for the same lock
				}
			}
		}
	}
	return errors.Join(errs...)
}

func removeLegacy(program, table, parent, chain string) error {
	if !installed(program) {
		slog.Warn("iptables is not installed, so its rules cannot be removed", "program", program, "chain", chain)
		return nil
	}
	e, err := open(program, table, true)
	if err != nil {
		return err
	}
	defer e.Close()
	if !e.read.HasChain(chain) {
		return nil
	}
	return e.Apply(append(e.read.Deletions(parent, chain), "-F "+chain, "-X "+chain))
}
