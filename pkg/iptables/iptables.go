// SPDX-License-Identifier: Apache-2.0

// Package iptables reads and changes the nat tables of iptables and ip6tables. It uses the node's programs to read and write rules. It
// removes chains that iptables keeps in nf_tables without a program.
package iptables

import (
	"fmt"
	"strings"
	"time"

	"github.com/podlace/podlace/pkg/fault"
	"github.com/podlace/podlace/pkg/store"
)

// lockFile is the node's lock for changes of a nat table.
const lockFile = ".iptables"

// NAT is the nat table of one family in iptables-save format: the rules of each chain, each with a trailing space.
type NAT map[string][]string

// Read reads the nat table with one process.
func Read(is4 bool) (NAT, error) { return readTable(name(is4), nil) }

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

// Rules returns the rules of a chain that contain all parts, in the form "-A CHAIN ... ".
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

// Deletions returns the lines that delete parent's rules that jump to chain.
func (t NAT) Deletions(parent, chain string) []string {
	var lines []string
	for _, rule := range t.Rules(parent, "-j "+chain+" ") {
		lines = append(lines, "-D"+strings.TrimPrefix(rule, "-A"))
	}
	return lines
}

// Comment quotes a text for iptables-restore and truncates it to the kernel's limit (XT_MAX_COMMENT_LEN, 256 with the terminating zero).
func Comment(text string) string {
	return `"` + strings.ReplaceAll(text[:min(len(text), 255)], `"`, `\"`) + `"`
}

// Edit is the nat table of one family under the node's lock. NAT stays valid until Apply changes the table. Open also waits for the child
// processes of a killed plugin.
type Edit struct {
	program string
	wait    []string // arguments with the time that iptables-restore waits for the xtables lock
	dir     *store.Dir
	lock    *store.Lock
	nat     NAT
}

// Open locks and reads the nat table with one process. Without wait, Open and Apply return a busy error instead of waiting for a lock.
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
	if e.nat, err = readTable(program, e.lock.File()); err != nil {
		e.Close()
		return nil, err
	}
	return e, nil
}

// NAT returns the table as Open read it.
func (e *Edit) NAT() NAT { return e.nat }

// Apply applies all lines, in iptables-restore format, or none. It starts one process, or none without lines. ":CHAIN - [0:0]" creates or
// empties a chain.
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
