// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"time"

	"github.com/podlace/podlace/pkg/plugin"
)

// iptablesTimeout is how long a process may take, and iptablesWait (seconds) how much of that it waits for the xtables lock.
const (
	iptablesTimeout = 20 * time.Second
	iptablesWait    = "10"
)

// iptablesFolders are searched for the binaries, not PATH: a runtime's PATH may be empty or hostile.
var iptablesFolders = [...]string{"/usr/sbin", "/sbin", "/usr/local/sbin", "/usr/bin", "/bin"}

// NAT is the nat table of one family as iptables-save prints it.
type NAT struct{ lines []string }

// ReadNAT reads the nat table: one process.
func (n *NS) ReadNAT(is4 bool) (NAT, error) {
	out, err := iptables(is4, "-save", "", "-t", "nat")
	return NAT{strings.Split(out, "\n")}, err
}

// HasChain tells whether the table has a chain.
func (t NAT) HasChain(name string) bool {
	for _, line := range t.lines {
		if strings.HasPrefix(line, ":"+name+" ") {
			return true
		}
	}
	return false
}

// Rules returns the rules of a chain that hold all parts, in the form "-A CHAIN ...".
func (t NAT) Rules(chain string, parts ...string) []string {
	var found []string
next:
	for _, line := range t.lines {
		if !strings.HasPrefix(line, "-A "+chain+" ") {
			continue
		}
		for _, p := range parts {
			if !strings.Contains(line+" ", p) {
				continue next
			}
		}
		found = append(found, line)
	}
	return found
}

// ChangeNAT applies lines in the form of iptables-restore to the nat table, all or none: one process. ":CHAIN - [0:0]" makes a
// chain or empties it.
func (n *NS) ChangeNAT(is4 bool, lines ...string) error {
	if len(lines) == 0 {
		return nil
	}
	input := "*nat\n" + strings.Join(lines, "\n") + "\nCOMMIT\n"
	return change(fmt.Sprintf("%s-restore with %d lines", iptablesName(is4), len(lines)), func() error {
		_, err := iptables(is4, "-restore", input, "--noflush", "-w", iptablesWait)
		return err
	})
}

// RemoveChains removes chains and every rule elsewhere that jumps to them. What is missing is no error; when nothing is there,
// nothing is changed.
func (n *NS) RemoveChains(is4 bool, parents []string, chains ...string) error {
	nat, err := n.ReadNAT(is4)
	if err != nil {
		return err
	}
	var lines, last []string
	for _, chain := range chains {
		if !nat.HasChain(chain) {
			continue
		}
		for _, parent := range parents {
			for _, rule := range nat.Rules(parent, "-j "+chain+" ") {
				lines = append(lines, "-D"+strings.TrimPrefix(rule, "-A"))
			}
		}
		lines = append(lines, "-F "+chain)
		last = append(last, "-X "+chain)
	}
	return n.ChangeNAT(is4, append(lines, last...)...)
}

func iptablesName(is4 bool) string {
	if is4 {
		return "iptables"
	}
	return "ip6tables"
}

// HasIPTables tells whether the iptables tools of a family are installed.
func HasIPTables(is4 bool) bool {
	_, err := iptablesBinary(iptablesName(is4) + "-restore")
	return err == nil
}

func iptablesBinary(name string) (string, error) {
	for _, dir := range iptablesFolders {
		path := dir + "/" + name
		if info, err := os.Stat(path); err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0 {
			return path, nil
		}
	}
	return "", plugin.WithHint(plugin.Errorf(plugin.CodeKernelFeature, "%s is not installed", name),
		"install iptables, or use the nftables backend, which needs no program")
}

func iptables(is4 bool, tool, stdin string, args ...string) (string, error) {
	path, err := iptablesBinary(iptablesName(is4) + tool)
	if err != nil {
		return "", err
	}
	ctx, cancel := context.WithTimeout(context.Background(), iptablesTimeout)
	defer cancel()
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Env = []string{"PATH=/usr/sbin:/sbin:/usr/bin:/bin"}
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &stdout, &stderr
	err = cmd.Run()
	if err == nil {
		return stdout.String(), nil
	}
	text := strings.Join(strings.Fields(stderr.String()), " ")
	var exit *exec.ExitError
	// Exit status 4 is a resource problem (iptables(8)): the xtables lock was not to be had.
	if ctx.Err() != nil || errors.As(err, &exit) && exit.ExitCode() == 4 {
		return "", plugin.Errorf(plugin.CodeTryAgain, "%s%s: %w: %s", iptablesName(is4), tool, err, text)
	}
	return "", fmt.Errorf("%s%s: %w: %s", iptablesName(is4), tool, err, text)
}
