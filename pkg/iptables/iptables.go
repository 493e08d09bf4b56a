// SPDX-License-Identifier: Apache-2.0

// Package iptables reads and changes the nat tables of iptables and ip6tables. Rules are read and written by the node's programs; chains
// that iptables keeps in nf_tables are removed without one.
package iptables

import (
	"fmt"
	"strings"
	"time"

	"github.com/podlace/podlace/pkg/fault"
	"github.com/podlace/podlace/pkg/store"
)

// lockFile is the lock of the node for those who change a nat table.
const lockFile = ".iptables"

// NAT is the nat table of one family as iptables-save prints it: the rules of each chain, each with a space at its end.
type NAT map[string][]string

// Read reads the nat table: one process.
func Read(is4 bool) (NAT, error) { return read(name(is4), nil) }

func parse(out string) NAT {
	t := NAT{}
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

// HasChain reports whether the table has a chain.
func (t NAT) HasChain(name string) bool {
	_, ok := t[name]
	return ok
}

// Rules returns the rules of a chain that hold all parts, in the form "-A CHAIN ... ".
func (t NAT) Rules(chain string, parts ...string) []string {
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

// Deletions returns the lines that delete the rules of parent that jump to chain.
func (t NAT) Deletions(parent, chain string) []string {
	var lines []string
	for _, rule := range t.Rules(parent, "-j "+chain+" ") {
		lines = append(lines, "-D"+strings.TrimPrefix(rule, "-A"))
	}
	return lines
}

// Comment quotes a text for iptables-restore, cut to what the kernel holds (XT_MAX_COMMENT_LEN, 256 with the final zero).
func Comment(text string) string {
	return `"` + strings.ReplaceAll(text[:min(len(text), 255)], `"`, `\"`) + `"`
}

// Edit is the nat table of one family under a lock of the node: NAT holds until Apply changes the table. Open also waits for the programs
// of a plugin that was killed.
type Edit struct {
	program string
	wait    []string // arguments that say how long iptables-restore waits for the lock of xtables
	dir     *store.Dir
	lock    *store.Lock
	nat     NAT
}

// Open locks and reads the nat table: one process. Without wait, Open and Apply fail as busy where they would wait for a lock.
func Open(is4, wait bool) (*Edit, error) { return open(name(is4), wait) }

func open(program string, wait bool) (*Edit, error) {
	e, most := &Edit{program: program}, time.Duration(0)
	if wait {
		e.wait, most = []string{"-w", fmt.Sprint(xtablesWait)}, store.NodeLockTimeout
	}
	var err error
	if e.dir, err = store.Make(store.Root, 0o700); err != nil {
		return nil, err
	}
	if e.lock, err = e.dir.LockWithin(most, lockFile, 0o600); err != nil {
		e.dir.Close()
		return nil, err
	}
	if e.nat, err = read(program, e.lock.File()); err != nil {
		e.Close()
		return nil, err
	}
	return e, nil
}

// NAT returns the table as Open read it.
func (e *Edit) NAT() NAT { return e.nat }

// Apply applies lines in the form of iptables-restore, all or none: one process, none without lines. ":CHAIN - [0:0]" makes a chain or
// empties it.
func (e *Edit) Apply(lines []string) error {
	if len(lines) == 0 {
		return nil
	}
	input := "*nat\n" + strings.Join(lines, "\n") + "\nCOMMIT\n"
	return fault.Change(fmt.Sprintf("%s-restore with %d lines", e.program, len(lines)), func() error {
		_, err := run(e.program, "-restore", input, e.lock.File(), append([]string{"--noflush"}, e.wait...)...)
		return err
	})
}

// Close releases the lock.
func (e *Edit) Close() {
	e.lock.Unlock()
	e.dir.Close()
}
