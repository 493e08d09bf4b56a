// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"

	"github.com/podlace/podlace/pkg/agent/nodeagent"
	"github.com/podlace/podlace/pkg/cli"
	"github.com/podlace/podlace/pkg/daemon/claimcheck"
)

// programs returns the command lines of podlace and podlace-node.
func programs() []*cobra.Command {
	return []*cobra.Command{cli.Command(), nodeagent.Command(io.Discard, io.Discard)}
}

// The tables of commands in the READMEs of podlace and podlace-node have a row for each command, in the order of --help.
func TestCommandTables(t *testing.T) {
	for _, root := range programs() {
		d := parse(t, "plugins/"+root.Name()+"/README.md")
		var listed, want []string
		for _, table := range d.tables {
			if table.head[0] == "Command" {
				for _, row := range table.rows {
					listed = append(listed, backquoted(row[0])[0])
				}
			}
		}
		eachCommand(root, func(c *cobra.Command) {
			if c.Runnable() && c.HasParent() && !c.HasSubCommands() {
				want = append(want, c.CommandPath())
			}
		})
		if diff := cmp.Diff(want, listed); diff != "" {
			t.Errorf("%s needs one row \"| `COMMAND` | EFFECT |\" for each command, in the order of --help\n(-commands +rows)\n%s", d.path, diff)
		}
	}
}

// Command lines of podlace and podlace-node in the documents have only commands, flags, checks, keys and codes that exist.
func TestFlags(t *testing.T) {
	for _, d := range documents(t) {
		lines := backquoted(strings.Join(d.prose, " "))
		for _, table := range d.tables {
			for _, row := range table.rows {
				lines = append(lines, backquoted(strings.Join(row, " "))...)
			}
		}
		for _, b := range d.blocks {
			lines = append(lines, strings.Split(b.text, "\n")...)
		}
		for _, line := range lines {
			for _, root := range programs() {
				checkCommandLine(t, d.path, root, line)
			}
		}
	}
}

// checkCommandLine checks the part of a line that calls a program, up to the next pipe.
func checkCommandLine(t *testing.T, path string, root *cobra.Command, line string) {
	t.Helper()
	call := regexp.MustCompile(`^(?:[$#] )?(?:sudo )?(?:\S*/)?` + root.Name() + ` ([a-z][^|;&>#]*)`).FindStringSubmatch(line)
	if call == nil {
		return
	}
	words := strings.Fields(call[1])
	cmd, _, err := root.Find(words)
	if err != nil || cmd == root {
		if words[0] != "completion" && words[0] != "help" {
			t.Errorf("%s: %q: %s has no such command: correct it", path, line, root.Name())
		}
		return
	}
	if cmd.DisableFlagParsing { // sriov-device-plugin parses the flags
		cmd, _, _ = claimcheck.Command().Find([]string{cmd.Name()})
	}
	explained := cmd.Name() == "doctor" || cmd.CommandPath() == "podlace explain"
	for _, word := range words[1:] {
		if explained && regexp.MustCompile(`^[a-z0-9]`).MatchString(word) && cli.Run([]string{"explain", word}, io.Discard, io.Discard) != 0 {
			t.Errorf("%s: %q: podlace knows no %s: correct it", path, line, word)
		}
		if name, ok := strings.CutPrefix(word, "--"); ok {
			name, _, _ = strings.Cut(name, "=")
			if name != "help" && cmd.Flag(name) == nil && cmd.InheritedFlags().Lookup(name) == nil {
				t.Errorf("%s: %q: '%s' has no flag --%s: correct it", path, line, cmd.CommandPath(), name)
			}
		}
	}
}

// Tests that the documents name exist, or some that begin with the name.
func TestNamedTests(t *testing.T) {
	var source strings.Builder
	err := filepath.WalkDir(treeRoot, func(path string, e fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case e.Name() == "build" || e.Name() == ".git":
			return fs.SkipDir
		case strings.HasSuffix(path, "_test.go"):
			text, err := os.ReadFile(path)
			source.Write(text)
			return err
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range documents(t) {
		for _, name := range regexp.MustCompile(`\bTest[A-Z]\w+`).FindAllString(readFile(t, d.path), -1) {
			if !strings.Contains(source.String(), "\nfunc "+name) {
				t.Errorf("%s: there is no %s: correct the name", d.path, name)
			}
		}
	}
}

// eachCommand calls a function for a command and its subcommands, except hidden ones and those that cobra adds.
func eachCommand(c *cobra.Command, f func(*cobra.Command)) {
	f(c)
	for _, sub := range c.Commands() {
		if sub.Name() != "completion" && sub.Name() != "help" && !sub.Hidden {
			eachCommand(sub, f)
		}
	}
}
