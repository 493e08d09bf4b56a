// SPDX-License-Identifier: Apache-2.0

// Package iptables reads and changes the nat and mangle tables of iptables and ip6tables. It starts the node's iptables programs for this,
// but removes chains in nf_tables without them.
package iptables

import (
	"fmt"
	"strings"
	"time"

	"github.com/podlace/podlace/pkg/fault"
	"github.com/podlace/podlace/pkg/store"
)

// lockFile is the file that each Podlace process locks before it changes a table.
const lockFile = ".iptables"

// Table is the nat or mangle table of one address family: the rules of each chain in the format of iptables-save, each ending with a space.
type Table map[string][]string

func parse(out string) Table {
	t := Table{}
	for line := range strings.Lines(out) {
		line = strings.TrimSuffix(line, "\n") + " "
		if chain, ok := strings.CutPrefix(line, ":"); ok {
			chain, _, _ = strings.Cut(chain, " ")
			t[chain] = nil
		} else if rule, ok := strings.CutPrefix(line, "-A "); ok {
			chain, _, _ := strings.Cut(rule, " ")
			t[chain] = append(t[chain], line)
		}
	}
	return t
}

// HasChain reports whether the table has the chain.
func (t Table) HasChain(name string) bool {
	_, ok := t[name]
	return ok
}

// Rules returns the rules of a chain that contain all parts. A rule has the form "-A CHAIN ... ".
func (t Table) Rules(chain string, parts ...string) []string {
	var found []string
next:
	for _, rule := range t[chain] {
		for _, p := range parts {
			if !strings.Contains(rule, p) {
				continue next
			}
		}
		found = append(found, rule)
	}
	return found
}

// Deletions returns iptables-restore lines that delete the parent's rules which jump to chain.
func (t Table) Deletions(parent, chain string) []string {
	var lines []string
	for _, rule := range t.Rules(parent, "-j "+chain+" ") {
		lines = append(lines, "-D"+strings.TrimPrefix(rule, "-A"))
	}
	return lines
}

// Comment quotes text for iptables-restore, and shortens it to the kernel's limit XT_MAX_COMMENT_LEN (256 bytes with the terminating zero).
func Comment(text string) string {
	return `"` + strings.ReplaceAll(text[:min(len(text), 255)], `"`, `\"`) + `"`
}

// Edit is a change of the nat table of one address family, and of the mangle table. It holds the node's lock for both from Open to Close.
// Open also waits for the child processes of a killed plugin, which may still hold the lock.
type Edit struct {
	program string
	table   string
	wait    []string // arguments with the time that iptables-restore waits for the xtables lock
	dir     *store.Dir
	lock    *store.Lock
	read    Table
}

// Open takes the lock and reads the nat table with one process. Unless wait is set, Open and Apply return a busy error if another process
// holds a lock.
func Open(is4, wait bool) (*Edit, error) { return open(name(is4), "nat", wait) }

func open(program, table string, wait bool) (*Edit, error) {
	e, most := &Edit{program: program, table: table}, time.Duration(0)
	if wait {
		e.wait, most = []string{"-w", fmt.Sprint(xtablesWait)}, store.NodeLockTimeout
	}
	var err error
	if e.dir, err = store.Make(store.Root, 0o700); err != nil {
		return nil, err
	}
	if e.lock, err = e.dir.Lock(most, lockFile, 0o600); err != nil {
		e.dir.Close()
		return nil, err
	}
	if e.read, err = readTable(program, table, e.lock.File()); err != nil {
		e.Close()
		return nil, err
	}
	return e, nil
}

// NAT returns the nat table as Open read it.
func (e *Edit) NAT() Table { return e.read }

// Mangle reads the mangle table with one process.
func (e *Edit) Mangle() (Table, error) { return readTable(e.program, "mangle", e.lock.File()) }

// Apply applies all lines of a table, or none if one is invalid, with one process. They have the format of iptables-restore, where
// ":CHAIN - [0:0]" creates an empty chain, or deletes all rules of an existing one.
func (e *Edit) Apply(lines []string, mangle ...string) error {
	if len(lines)+len(mangle) == 0 {
		return nil
	}
	input := "*" + e.table + "\n" + strings.Join(append(lines, "COMMIT\n"), "\n")
	if len(mangle) > 0 {
		input += "*mangle\n" + strings.Join(append(mangle, "COMMIT\n"), "\n")
	}
	return fault.Change(fmt.Sprintf("%s-restore with %d lines", e.program, len(lines)+len(mangle)), func() error {
		_, err := run(e.program, "-restore", input, e.lock.File(), append([]string{"--noflush"}, e.wait...)...)
		return err
	})
}

// Close releases the lock.
func (e *Edit) Close() {
	e.lock.Unlock()
	e.dir.Close()
}
