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

// Chains are chains of the nat table by the chain that leads to them.
//
// Chains of iptables over nf_tables are chains of nf_tables, so no program is started for them. Only where the older xtables hold a nat
// table, it is asked by program.
type Chains map[string][]string

// RemoveChain removes a chain and every rule of parent that jumps to it, in both families; it is a no-op if the chain is missing. The
// node's iptables may have been the other one when the chain was made, or when rules of all pods were written again: the chain is removed
// both from nf_tables and from the older xtables.
func RemoveChain(parent, chain string) error {
	chains := Chains{parent: {chain}}
	err := nft.Remove("nft delete chain "+chain, nft.Removal{Chains: chains.Jumps()})
	return errors.Join(err, chains.RemoveLegacy())
}

// Jumps returns the chains as nf_tables has them, in both families.
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

// Place returns where nf_tables has a chain of iptables.
func Place(is4 bool, chain string) nft.Place {
	if is4 {
		return nft.Place{Family: unix.NFPROTO_IPV4, Table: "nat", Chain: chain}
	}
	return nft.Place{Family: unix.NFPROTO_IPV6, Table: "nat", Chain: chain}
}

// LacksChain reports whether the nat table certainly lacks a chain. It starts no program. It does not see the rules of iptables-legacy, and
// so finds nothing missing where those are in use.
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

// legacyTables returns the file in which the older xtables name the tables that are in use. It is the thread's: the process's first thread
// may be one that has entered a pod.
func legacyTables(is4 bool) string {
	if is4 {
		return "/proc/thread-self/net/ip_tables_names"
	}
	return "/proc/thread-self/net/ip6_tables_names"
}

// LegacyUsed reports whether a nat table outside of nf_tables is in use. In the namespaces of an ordinary user the kernel does not tell:
// then there may be one where the node's iptables is that for the older xtables.
func LegacyUsed(is4 bool) bool {
	data, err := os.ReadFile(legacyTables(is4))
	if errors.Is(err, fs.ErrPermission) {
		return IsLegacy(is4)
	}
	return err == nil && slices.Contains(strings.Fields(string(data)), "nat")
}

// IsLegacy reports whether the node's iptables is that of the older xtables.
func IsLegacy(is4 bool) bool {
	path, err := lookPath(name(is4) + "-restore")
	if err == nil {
		path, err = filepath.EvalSymlinks(path)
	}
	return err == nil && strings.Contains(filepath.Base(path), "legacy")
}

// legacyProgram returns the program for the older xtables: iptables itself, where it is not that for nf_tables.
func legacyProgram(is4 bool) string {
	if legacy := name(is4) + "-legacy"; installed(legacy) {
		return legacy
	}
	return name(is4)
}

// RemoveLegacy removes the chains from the older xtables where those have a nat table, in both families.
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
					return errors.Join(errs...) // the next would wait for the same lock as long once more
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
