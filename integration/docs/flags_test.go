// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"fmt"
	"io"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/podlace/podlace/pkg/agent/nodeagent"
	"github.com/podlace/podlace/pkg/cli"
	"github.com/podlace/podlace/pkg/daemon/claimcheck"
)

// documentedFlag is a flag in a table of a README.
type documentedFlag struct {
	value string // the cell Default
	from  string // the command that the row refers to for the default and the meaning, if the cell is empty
}

// TestFlags checks that the tables of flags in the READMEs of podlace and podlace-node contain exactly the flags of each command, with
// their default values. TestDocumentedFlags of pkg/daemon/deviceplugin checks sriov-device-plugin.
func TestFlags(t *testing.T) {
	t.Setenv("NODE_NAME", "$NODE_NAME") // a default value of podlace-node
	for _, root := range []*cobra.Command{cli.Command(), nodeagent.Command(io.Discard, io.Discard)} {
		path := "plugins/" + root.Name() + "/README.md"
		d, known := parse(t, path), map[string]bool{}
		eachCommand(root, func(c *cobra.Command) {
			known[headingOf(c)] = true
			checkFlags(t, d, c)
		})
		for _, table := range d.tables {
			if table.head[0] == "Flag" && !known[table.heading] {
				t.Errorf("%s: the table of flags below %q belongs to no command: move it below the heading of a command, or remove it", path, table.heading)
			}
		}
	}
}

// headingOf returns the heading above the flags of a command.
func headingOf(c *cobra.Command) string {
	switch {
	case c.Root().Name() == "podlace":
		return c.CommandPath()
	case c.HasParent():
		return "Flags of " + c.Name()
	}
	return "Flags of every command"
}

// eachCommand calls a function for a command and all its subcommands, except hidden ones and those that cobra adds.
func eachCommand(c *cobra.Command, f func(*cobra.Command)) {
	f(c)
	for _, sub := range c.Commands() {
		if sub.Name() != "completion" && sub.Name() != "help" && !sub.Hidden {
			eachCommand(sub, f)
		}
	}
}

// checkFlags compares the flags of a command with the tables below its heading.
func checkFlags(t *testing.T, d markdownDocument, c *cobra.Command) {
	t.Helper()
	heading := headingOf(c)
	listed := d.flagsUnder(heading)
	if c.DisableFlagParsing { // sriov-device-plugin parses the flags
		c, _, _ = claimcheck.Command().Find([]string{c.Name()})
	}
	c.NonInheritedFlags().VisitAll(func(f *pflag.Flag) {
		row, ok := listed[f.Name]
		if delete(listed, f.Name); f.Name == "help" || f.Name == "version" {
			return
		}
		if row.from != "" {
			row, ok = d.flagsUnder(row.from)[f.Name]
		}
		switch want := shownDefault(f); {
		case !ok:
			t.Errorf("%s lacks a flag of '%s': add the row \"| `--%s` | %s | MEANING |\" below \"## %s\"", d.path, c.CommandPath(), f.Name, want, heading)
		case !strings.EqualFold(want, row.value) && (want != "none" || row.value == "" || strings.HasPrefix(row.value, "`")):
			t.Errorf("%s: the default of --%s is %s, not %s: correct its row below \"## %s\"", d.path, f.Name, want, row.value, heading)
		}
	})
	for name := range listed {
		t.Errorf("%s: '%s' has no flag --%s: remove its row below \"## %s\"", d.path, c.CommandPath(), name, heading)
	}
}

// shownDefault returns the default value of a flag as the tables show it. For "none", a table may describe in words what happens.
func shownDefault(f *pflag.Flag) string {
	switch f.DefValue {
	case "", "0", "[]":
		return "none"
	case "false":
		return "off"
	case "the host name":
		return f.DefValue
	}
	return fmt.Sprintf("`%s`", f.DefValue)
}

// flagsUnder returns the flags in the tables below a heading. Tables of flags have the head Flag.
func (d markdownDocument) flagsUnder(heading string) map[string]documentedFlag {
	found := map[string]documentedFlag{}
	for _, table := range d.tables {
		if table.heading != heading || table.head[0] != "Flag" {
			continue
		}
		for _, row := range table.rows {
			flag := documentedFlag{value: row[1]}
			if commands := backquoted(row[2]); row[1] == "" && len(commands) > 0 {
				flag.from = commands[0]
			}
			for _, name := range backquoted(row[0]) {
				if long, ok := strings.CutPrefix(name, "--"); ok {
					found[long] = flag
				}
			}
		}
	}
	return found
}
