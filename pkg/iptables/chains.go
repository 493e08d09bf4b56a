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

	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/pkg/nft"
)

// Chains maps a parent chain of the nat table to the chains to which it jumps.
//
// iptables-nft keeps its chains in nf_tables, so they are accessed without a program. A program is used only if legacy xtables have a nat
// table.
type Chains map[string][]string

// RemoveChain removes a chain and every rule of parent that jumps to it, in both families. It is a no-op if the chain is missing. It
// removes the chain from nf_tables and from legacy xtables, because the node's iptables variant may have changed since the chain was
// written.
func RemoveChain(parent, chain string) error {
	chains := Chains{parent: {chain}}
	err := nft.Remove("nft delete chain "+chain, nft.Removal{Chains: chains.Jumps()})
	return errors.Join(err, chains.RemoveLegacy())
}

// Jumps returns the chains in the form of nf_tables, in both families.
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

// Place returns the nf_tables place of an iptables chain.
func Place(is4 bool, chain string) nft.Place {
	if is4 {
		return nft.Place{Family: unix.NFPROTO_IPV4, Table: "nat", Chain: chain}
	}
	return nft.Place{Family: unix.NFPROTO_IPV6, Table: "nat", Chain: chain}
}

// LacksChain reports whether the nat table certainly lacks a chain. It starts no program, so it does not see rules of iptables-legacy. If
// those are in use, it returns false.
func LacksChain(conn *nft.Conn, is4 bool, chain string) bool {
	if LegacyUsed(is4) {
		return false
	}
	t, err := conn.Open("")
	if err != nil {
		return false
	}
	has, err := t.HasChain(Place(is4, chain))
	return err == nil && !has
}

// legacyTables returns the file in which legacy xtables list the tables in use. It is per thread: the process's first thread may have
// entered a pod.
func legacyTables(is4 bool) string {
	if is4 {
		return "/proc/thread-self/net/ip_tables_names"
	}
	return "/proc/thread-self/net/ip6_tables_names"
}

// LegacyUsed reports whether a nat table of legacy xtables is in use. In an ordinary user's namespaces the kernel does not report that.
// Then it returns whether the node's iptables is the legacy variant.
func LegacyUsed(is4 bool) bool {
	data, err := os.ReadFile(legacyTables(is4))
	if errors.Is(err, fs.ErrPermission) {
		return IsLegacy(is4)
	}
	return err == nil && slices.Contains(strings.Fields(string(data)), "nat")
}

// IsLegacy reports whether the node's iptables is the legacy variant.
func IsLegacy(is4 bool) bool {
	path, err := lookPath(name(is4) + "-restore")
	if err == nil {
		path, err = filepath.EvalSymlinks(path)
	}
	return err == nil && strings.Contains(filepath.Base(path), "legacy")
}

// legacyProgram returns the program for legacy xtables: iptables itself, unless that is the nft variant.
func legacyProgram(is4 bool) string {
	if legacy := name(is4) + "-legacy"; installed(legacy) {
		return legacy
	}
	return name(is4)
}

// RemoveLegacy removes the chains from the nat table of legacy xtables, if there is one, in both families.
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
					return errors.Join(errs...) // another attempt would wait equally long for the same lock
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
