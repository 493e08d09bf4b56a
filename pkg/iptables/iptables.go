// SPDX-License-Identifier: Apache-2.0

// Package iptables reads and changes the nat tables of iptables and ip6tables. To read and write rules, the package starts the iptables
// programs of the node. The package needs no iptables program to remove chains in nf_tables.
package iptables

import (
	"fmt"
	"strings"
	"time"

	"github.com/podlace/podlace/pkg/fault"
	"github.com/podlace/podlace/pkg/store"
)

// lockFile is the name of a lock file. Each Podlace process locks this file before it changes a nat table.
const lockFile = ".iptables"

// NAT is the nat table of one address family in the format of iptables-save. A NAT maps each chain to its rules. Each rule ends with a
// space.
type NAT map[string][]string

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

// HasChain reports whether the nat table contains a chain with the given name.
func (t NAT) HasChain(name string) bool {
	_, ok := t[name]
	return ok
}

// Rules returns the rules of a chain that contain all given strings. A rule has the form "-A CHAIN ... ".
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

// Deletions returns iptables-restore lines that delete all rules of the parent chain which jump to the given chain.
func (t NAT) Deletions(parent, chain string) []string {
	var lines []string
	for _, rule := range t.Rules(parent, "-j "+chain+" ") {
		lines = append(lines, "-D"+strings.TrimPrefix(rule, "-A"))
	}
	return lines
}

// Comment quotes a text for iptables-restore. Comment shortens a text that exceeds the kernel's limit XT_MAX_COMMENT_LEN (256 bytes with
// the terminating zero).
func Comment(text string) string {
	return `"` + strings.ReplaceAll(text[:min(len(text), 255)], `"`, `\"`) + `"`
}

// Edit is a change of the nat table of one address family. From Open to Close, an Edit holds the node's lock for the table. The result of
// NAT is valid until Apply changes the table. After a plugin was killed, its child processes may still hold the lock. Open also waits for
// these child processes.
type Edit struct {
	program string
	wait    []string // arguments with the time that iptables-restore waits for the xtables lock
	dir     *store.Dir
	lock    *store.Lock
	nat     NAT
}

// Open takes the lock and starts one process, which reads the nat table. If "wait" is false and another process holds a lock, Open and
// Apply return a busy error and do not wait.
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
	if e.lock, err = e.dir.Lock(most, lockFile, 0o600); err != nil {
		e.dir.Close()
		return nil, err
	}
	if e.nat, err = readTable(program, e.lock.File()); err != nil {
		e.Close()
		return nil, err
	}
	return e, nil
}

// NAT returns the content of the nat table at the time of Open.
func (e *Edit) NAT() NAT { return e.nat }

// Apply applies all lines, or none of them if one line is invalid. The lines have the format of iptables-restore. Apply starts one process,
// unless there are no lines. The line ":CHAIN - [0:0]" creates the chain. If the chain exists, the line ":CHAIN - [0:0]" deletes all rules
// of the chain.
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

// Close releases the node's lock.
func (e *Edit) Close() {
	e.lock.Unlock()
	e.dir.Close()
}
