// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"time"

	mdl "github.com/mdlayher/netlink"

	"github.com/podlace/podlace/pkg/child"
	"github.com/podlace/podlace/pkg/fault"
	"github.com/podlace/podlace/pkg/nft"
	"github.com/podlace/podlace/pkg/store"
)

// iptablesTimeout is how long a process may take, and iptablesWait (seconds) how much of that it waits for the xtables lock.
const (
	iptablesTimeout = 20 * time.Second
	iptablesWait    = "10"
	iptablesLock    = ".iptables"
)

// iptablesFolders are searched for the binaries, not PATH: a runtime's PATH may be empty or hostile.
var iptablesFolders = [...]string{"/usr/sbin", "/sbin", "/usr/local/sbin", "/usr/bin", "/bin"}

// NAT is the nat table of one family as iptables-save prints it: the rules of each chain, each with a space at its end.
type NAT map[string][]string

// ReadNAT reads the nat table: one process.
func (n *Node) ReadNAT(is4 bool) (NAT, error) { return readNAT(iptablesName(is4), nil) }

func readNAT(program string, hold *os.File) (NAT, error) {
	out, err := iptables(program, "-save", "", hold, "-t", "nat")
	return parseNAT(out), err
}

func parseNAT(out string) NAT {
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

// HasChain tells whether the table has a chain.
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

// EditNAT reads the nat table, and applies what edit returns: lines in the form of iptables-restore, all or none. ":CHAIN - [0:0]"
// makes a chain or empties it. Two processes, one when there is nothing to change, under a lock of the node: what was read still holds when
// it is changed, and a process that outlived its killed plugin is waited for.
func (n *Node) EditNAT(is4 bool, edit func(NAT) ([]string, error)) error {
	if n.tries {
		return editNAT(iptablesName(is4), edit, 0)
	}
	return editNAT(iptablesName(is4), edit, store.NodeLockTimeout, "-w", iptablesWait)
}

// TryLocks lets EditNAT fail as busy where it would wait for a lock.
func (n *Node) TryLocks() { n.tries = true }

// editNAT waits for the node's lock as long as most; the arguments wait say how long iptables-restore waits for the lock of xtables.
func editNAT(program string, edit func(NAT) ([]string, error), most time.Duration, wait ...string) error {
	dir, err := store.Make(store.Root, 0o700)
	if err != nil {
		return err
	}
	defer dir.Close()
	lock, err := dir.LockWithin(most, iptablesLock, 0o600)
	if err != nil {
		return err
	}
	defer lock.Unlock()
	nat, err := readNAT(program, lock.File())
	if err != nil {
		return err
	}
	lines, err := edit(nat)
	if err != nil || len(lines) == 0 {
		return err
	}
	input := "*nat\n" + strings.Join(lines, "\n") + "\nCOMMIT\n"
	return fault.Change(fmt.Sprintf("%s-restore with %d lines", program, len(lines)), func() error {
		_, err := iptables(program, "-restore", input, lock.File(), append([]string{"--noflush"}, wait...)...)
		return err
	})
}

// RemoveChain removes a chain and every rule of parent that jumps to it, in both families. What is missing is no error. The node's iptables
// may have been the other one when the chain was made, or when rules of all pods were written again: what there is in nf_tables and in the
// older xtables goes, whichever it is now. In nf_tables that needs no program.
func (n *Node) RemoveChain(parent, chain string) error {
	chains := natChains{parent: {chain}}
	return errors.Join(nft.Remove("nft delete chain "+chain, func(t *nft.Handle) ([]mdl.Message, error) { return listChains(t, chains) }), delLegacy(chains))
}

func removeChain(program, parent, chain string) error {
	if _, err := iptablesBinary(program + "-restore"); err != nil {
		slog.Warn("iptables is not installed, so its rules cannot be removed", "program", program, "chain", chain)
		return nil
	}
	return editNAT(program, func(nat NAT) ([]string, error) {
		if !nat.HasChain(chain) {
			return nil, nil
		}
		return append(nat.Deletions(parent, chain), "-F "+chain, "-X "+chain), nil
	}, store.NodeLockTimeout, "-w", iptablesWait)
}

// Comment quotes a text for iptables-restore, cut to what the kernel holds (XT_MAX_COMMENT_LEN, 256 with the final zero).
func Comment(text string) string {
	return `"` + strings.ReplaceAll(text[:min(len(text), 255)], `"`, `\"`) + `"`
}

// Deletions returns the lines that delete the rules of parent that jump to chain.
func (t NAT) Deletions(parent, chain string) []string {
	var lines []string
	for _, rule := range t.Rules(parent, "-j "+chain+" ") {
		lines = append(lines, "-D"+strings.TrimPrefix(rule, "-A"))
	}
	return lines
}

func iptablesName(is4 bool) string {
	if is4 {
		return "iptables"
	}
	return "ip6tables"
}

// LacksNATChain reports whether the nat table of iptables certainly lacks a chain. It starts no program. It does not see the rules of
// iptables-legacy, and so finds nothing missing where those are in use.
func (n *Node) LacksNATChain(is4 bool, chain string) bool {
	family := "ip"
	if !is4 {
		family = "ip6"
	}
	if hasLegacyNAT(is4) {
		return false
	}
	has, err := n.HasChain(Chain{family, "nat", chain})
	return err == nil && !has
}

// HasIPTables tells whether the iptables tools of a family are installed.
func HasIPTables(is4 bool) bool {
	_, err := iptablesBinary(iptablesName(is4) + "-restore")
	return err == nil
}

// busy is the exit status for a resource problem (iptables(8)): the xtables lock was not to be had.
const busy = 4

// Refused tells whether it was the program of iptables that failed, for what it was given.
func Refused(err error) bool {
	var exit *exec.ExitError
	return errors.As(err, &exit) && exit.ExitCode() != busy
}

func iptablesBinary(name string) (string, error) {
	for _, dir := range iptablesFolders {
		path := dir + "/" + name
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return path, nil
		}
	}
	return "", &MissingProgram{name}
}

func iptables(program, tool, stdin string, hold *os.File, args ...string) (string, error) {
	path, err := iptablesBinary(program + tool)
	if err != nil {
		return "", err
	}
	var stdout, stderr child.Buffer
	cmd := exec.Command(path, args...)
	cmd.Env = []string{"PATH=/usr/sbin:/sbin:/usr/bin:/bin"}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &stdout, &stderr
	err = child.Run(cmd, iptablesTimeout, hold)
	if err == nil {
		return stdout.String(), nil
	}
	var exit *exec.ExitError
	late := errors.Is(err, child.ErrTimeout) || errors.As(err, &exit) && exit.ExitCode() == busy
	err = fmt.Errorf("%s%s: %w: %s", program, tool, err, strings.Join(strings.Fields(stderr.String()), " "))
	if late {
		return "", busyError{err}
	}
	return "", err
}
