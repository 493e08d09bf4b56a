// SPDX-License-Identifier: Apache-2.0

// Package markdown writes Markdown tables for the reports of bench and sim.
package markdown

import (
	"fmt"
	"slices"
	"strings"
)

// Table is a Markdown table with a title.
type Table struct{ strings.Builder }

// NewTable returns a table with its title and header.
func NewTable(title string, columns ...string) *Table {
	t := &Table{}
	fmt.Fprintf(t, "## %s\n\n", title)
	t.Row(columns...)
	t.Row(slices.Repeat([]string{"---"}, len(columns))...)
	return t
}

// Row appends a row.
func (t *Table) Row(cells ...string) { fmt.Fprintf(t, "| %s |\n", strings.Join(cells, " | ")) }
