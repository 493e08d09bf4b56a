// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestExplainTable compares 'podlace explain' with the tables of keys and error codes in the documents.
func TestExplainTable(t *testing.T) {
	const table = "pkg/cli/explain.tsv"
	pages, err := filepath.Glob(filepath.Join(treeRoot, "plugins/*/README.md"))
	if err != nil || len(pages) == 0 {
		t.Fatal(pages, err)
	}
	var want strings.Builder
	explainRows(&want, parse(t, architecture), "plugin") // the general meaning of a code comes first
	for _, page := range pages {
		plugin := filepath.Base(filepath.Dir(page))
		explainRows(&want, parse(t, "plugins/"+plugin+"/README.md"), plugin)
	}
	explainRows(&want, parse(t, draDocument), "sriov-device-plugin")
	if *update {
		if err := os.WriteFile(filepath.Join(treeRoot, table), []byte(want.String()), 0o644); err != nil {
			t.Fatal(err)
		}
	} else if diff := cmp.Diff(strings.Split(want.String(), "\n"), strings.Split(readFile(t, table), "\n")); diff != "" {
		t.Errorf("%s differs from the documents; run: %s\n(-documents +%s)\n%s", table, updateCommand("TestExplainTable"), table, diff)
	}
}

// explainRows writes a line for each row of the tables whose first column is Key or Code.
func explainRows(to *strings.Builder, d markdownDocument, plugin string) {
	link := regexp.MustCompile(`\[([^\]]+)\]\([^)]+\)`)
	for _, table := range d.tables {
		subject := strings.ToLower(table.head[0])
		if strings.HasPrefix(subject, "key") {
			subject = plugin
		} else if subject != "code" {
			continue
		}
		for _, row := range table.rows {
			names := strings.Join(backquoted(row[0]), ", ")
			if names == "" {
				names = row[0]
			}
			line := []string{subject, names, d.path}
			for i, cell := range row[1:] {
				line = append(line, table.head[i+1], strings.ReplaceAll(link.ReplaceAllString(cell, "$1"), "`", ""))
			}
			to.WriteString(strings.Join(line, "\t") + "\n")
		}
	}
}
