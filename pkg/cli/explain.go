// SPDX-License-Identifier: Apache-2.0

package cli

import (
	_ "embed"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/strict"
)

const explainHelp = `Explain a configuration key, an error code, a check of doctor, or a code in brackets
of validate and doctor. A key may have its plugin as a prefix. Without an argument the
command lists the keys of each program, the checks and the codes.`

const explainExample = `  podlace explain isGateway
  podlace explain host-local.ranges
  podlace explain 104
  podlace explain unknown-key`

// entry explains a configuration key, an error code, a code of a finding or a check of doctor.
type entry struct {
	subject string // a plugin, "plugin" for the keys of all plugins, "code" or "check"
	names   []string
	facts   [][2]string // heading and text
	source  string      // the document that has the row, or the command that prints the code
}

func newExplain() *cobra.Command {
	return &cobra.Command{
		Use:     "explain [PLUGIN] [KEY|CODE]",
		Short:   "Explain a configuration key, an error code, or a code of a finding",
		Long:    explainHelp,
		Example: explainExample,
		Args:    cobra.MaximumNArgs(2),
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]string, cobra.ShellCompDirective) {
			return entryNames(entries()), cobra.ShellCompDirectiveNoFileComp
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				listEntries(cmd.OutOrStdout())
				return nil
			}
			return explain(cmd.OutOrStdout(), strings.Join(args, "."))
		},
	}
}

// listEntries prints all names, grouped by program and kind.
func listEntries(w io.Writer) {
	groups := map[string][]string{}
	for _, e := range entries() {
		kind, program := e.origin()
		group := kind + "s of " + program
		listed := func(name string) bool { return slices.Contains(groups[group], name) } // a key of two tables is listed once
		groups[group] = append(groups[group], slices.DeleteFunc(slices.Clone(e.names), listed)...)
	}
	for _, group := range slices.Sorted(maps.Keys(groups)) {
		fmt.Fprintf(w, "%s:\n%s", group, wrapText(strings.Join(groups[group], ", "), "    ", 96))
	}
}

// origin returns what the names are, and the program that has the keys or reports the codes.
func (e entry) origin() (kind, program string) {
	kind, program = "key", e.subject
	if e.subject == "code" || e.subject == "check" {
		kind, program = e.subject, strings.TrimSuffix(strings.TrimPrefix(e.source, "plugins/"), "/README.md")
	}
	if strings.HasPrefix(e.source, "docs/dev/") {
		program = "all plugins"
	}
	return kind, program
}

func entryNames(all []entry) (names []string) {
	for _, e := range all {
		for _, name := range e.names {
			names = append(names, strings.TrimPrefix(strings.TrimPrefix(e.subject+"."+name, "code."), "check."))
		}
	}
	slices.Sort(names)
	return slices.Compact(names)
}

func explain(w io.Writer, name string) error {
	name = plugin.Kind(strings.TrimPrefix(name, plugin.PodType+".")) // the keys of a part are those of its plugin
	all := entries()
	found := slices.DeleteFunc(slices.Clone(all), func(e entry) bool { return !e.matchesName(name) })
	for _, e := range found {
		e.print(w)
	}
	if len(found) > 0 {
		return nil
	}
	names := entryNames(all)
	for _, e := range all {
		names = append(names, e.names...)
	}
	names = slices.DeleteFunc(names, func(name string) bool { return name[0] <= '9' }) // another number is no suggestion
	if near := strict.Nearest(name, names); near != "" {
		return fmt.Errorf("there is no key or code %q: did you mean %s?", name, near)
	}
	return fmt.Errorf("there is no key or code %q: 'podlace explain' lists all", name)
}

// matchesName reports whether the row explains a key or code. A key may have a plugin's name or "ipam" as prefix.
func (e entry) matchesName(name string) bool {
	return slices.ContainsFunc(e.names, func(n string) bool {
		short := strings.TrimPrefix(n, "ipam.")
		return slices.ContainsFunc([]string{n, short, e.subject + "." + n, e.subject + "." + short, plugin.Kind(e.subject) + "." + n},
			func(known string) bool { return strings.EqualFold(known, name) })
	})
}

func (e entry) print(w io.Writer) {
	kind, program := e.origin()
	fmt.Fprintf(w, "%s %s of %s\n", kind, strings.Join(e.names, ", "), program)
	for _, fact := range e.facts {
		fmt.Fprintf(w, "  %s:\n%s", strings.ToLower(fact[0]), wrapText(fact[1], "    ", 96))
	}
	fmt.Fprintf(w, "  from %s\n\n", e.source)
}

// wrapText splits a text into indented lines of at most width bytes. A longer word gets its own line.
func wrapText(text, indent string, width int) string {
	var lines strings.Builder
	line := indent
	for _, word := range strings.Fields(text) {
		if len(line)+1+len(word) > width && line != indent {
			lines.WriteString(line + "\n")
			line = indent
		}
		if line != indent {
			line += " "
		}
		line += word
	}
	return lines.String() + line + "\n"
}

// explainTable has a line for each key and each error code: subject, names, document, then heading and text of each further cell. A test of
// the documents writes it from their tables.
//
//go:embed explain.tsv
var explainTable string

// codeTable has the checks of doctor and the codes of findings in the same form, with a command in place of the document. It is kept by
// hand.
//
//go:embed codes.tsv
var codeTable string

func entries() (all []entry) {
	for line := range strings.Lines(explainTable + codeTable) {
		cells := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		e := entry{subject: cells[0], names: strings.Split(cells[1], ", "), source: cells[2]}
		for fact := range slices.Chunk(cells[3:], 2) {
			e.facts = append(e.facts, [2]string(fact))
		}
		all = append(all, e)
	}
	return all
}
