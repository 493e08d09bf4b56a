// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/podlace/podlace/pkg/cli/reconcile"
	"github.com/podlace/podlace/pkg/plugin"
)

// Output formats that most commands support.
const (
	outputTable = "table"
	outputJSON  = "json"
)

// choice is the value of a flag that accepts some words only.
type choice struct {
	value *string
	words []string
}

// String returns the chosen word.
func (c choice) String() string { return *c.value }

// Type returns the type in the help text.
func (choice) Type() string { return "string" }

// Set chooses a word.
func (c choice) Set(word string) error {
	if !slices.Contains(c.words, word) {
		return errors.New("want " + anyOf(c.words))
	}
	*c.value = word
	return nil
}

// addChoice adds a flag that accepts the given words. The help text lists them, and the shell completes them.
func addChoice(cmd *cobra.Command, value *string, name, short, usage string, words ...string) {
	cmd.Flags().VarP(choice{value, words}, name, short, usage+": "+anyOf(words))
	_ = cmd.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(words, cobra.ShellCompDirectiveNoFileComp)) // the flag exists
}

// addOutput adds the flag for the output format. The first format is the default; without formats these are table and json.
func addOutput(cmd *cobra.Command, output *string, formats ...string) {
	if len(formats) == 0 {
		formats = []string{outputTable, outputJSON}
	}
	*output = formats[0]
	addChoice(cmd, output, "output", "o", "output format", formats...)
}

func anyOf(words []string) string {
	last := len(words) - 1
	return strings.Join(words[:last], ", ") + " or " + words[last]
}

func printJSON(w io.Writer, v any) error {
	document, err := json.MarshalIndent(v, "", "  ")
	if err == nil {
		_, err = w.Write(append(plugin.PlainJSON(document), '\n'))
	}
	return err
}

// printAs prints a value as JSON, or calls print for another format.
func printAs(format string, w io.Writer, v any, print func()) error {
	if format == outputJSON {
		return printJSON(w, v)
	}
	print()
	return nil
}

// printTable prints rows in aligned columns. The first row is the heading. Run reports an error of the output.
func printTable(w io.Writer, rows [][]string) {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, cells := range rows {
		fmt.Fprintln(t, strings.Join(cells, "\t"))
	}
	_ = t.Flush()
}

// printLine prints a message on one line, without control characters of a pod's name or a plugin's message.
func printLine(stderr io.Writer, text string) {
	fmt.Fprintln(stderr, "podlace:", plugin.Plain(strings.ReplaceAll(text, "\n", "; "), reconcile.MaxMessage))
}

// plain makes a name safe for a terminal, and shortens it.
func plain(name string) string { return plugin.Plain(name, reconcile.MaxName) }

// plainText makes a text safe for a terminal. Unlike plain, it keeps the whole text and all printable characters outside ASCII.
func plainText(s string) string { return strings.Map(plugin.PlainRune, s) }

func dash(s string) string { return cmp.Or(s, "-") }

// isTerminal reports whether a file is a terminal. Other character devices, such as /dev/null, are no terminals.
func isTerminal(f *os.File) bool {
	target, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
	return err == nil && (strings.HasPrefix(target, "/dev/pts/") || strings.HasPrefix(target, "/dev/tty"))
}
