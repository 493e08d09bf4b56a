// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

type markdownDocument struct {
	path     string   // relative to the top of the tree
	headings []string // headings of the first two levels
	blocks   []codeBlock
	tables   []markdownTable
	prose    []string // lines outside code blocks
}

// codeBlock is a code block with its language, the heading above it, and its first line's number.
type codeBlock struct {
	lang, heading, text string
	line                int
}

// markdownTable has a table's cells and the heading above it.
type markdownTable struct {
	heading string
	head    []string
	rows    [][]string
}

func parse(t testing.TB, path string) markdownDocument {
	t.Helper()
	return cutDocument(path, readFile(t, path))
}

func cutDocument(path, text string) markdownDocument {
	d := markdownDocument{path: path}
	heading, inside := "", false
	for n, line := range strings.Split(text, "\n") {
		lang, fence := strings.CutPrefix(line, "```")
		switch {
		case fence && !inside:
			inside = true
			d.blocks = append(d.blocks, codeBlock{lang: lang, heading: heading, line: n + 1})
		case fence:
			inside = false
		case inside:
			d.blocks[len(d.blocks)-1].text += line + "\n"
		case strings.HasPrefix(line, "#"):
			heading = strings.TrimSpace(strings.TrimLeft(line, "#"))
			if !strings.HasPrefix(line, "###") {
				d.headings = append(d.headings, heading)
			}
		case strings.HasPrefix(line, "|"):
			d.addRow(heading, cells(line))
		default:
			d.prose = append(d.prose, line)
		}
	}
	return d
}

// addRow adds a row to the last table. A heading or a header row in the document starts a new table.
func (d *markdownDocument) addRow(heading string, row []string) {
	last := len(d.tables) - 1
	switch {
	case strings.Trim(strings.Join(row, ""), "-: ") == "" && last >= 0:
		if rows := d.tables[last].rows; len(rows) > 0 { // the previous row was the header of a new table
			d.tables[last].rows = rows[:len(rows)-1]
			d.tables = append(d.tables, markdownTable{heading: heading, head: rows[len(rows)-1]})
		}
	case last < 0 || d.tables[last].heading != heading:
		d.tables = append(d.tables, markdownTable{heading: heading, head: row})
	default:
		d.tables[last].rows = append(d.tables[last].rows, row)
	}
}

func cells(line string) []string {
	const bar = "\x00"
	line = strings.ReplaceAll(strings.Trim(strings.TrimSpace(line), "|"), `\|`, bar)
	parts := strings.Split(line, "|")
	for i, p := range parts {
		parts[i] = strings.TrimSpace(strings.ReplaceAll(p, bar, "|"))
	}
	return parts
}

// rowsUnder returns the rows of all tables below a heading.
func (d markdownDocument) rowsUnder(heading string) [][]string {
	var rows [][]string
	for _, t := range d.tables {
		if t.heading == heading {
			rows = append(rows, t.rows...)
		}
	}
	return rows
}

func (d markdownDocument) blocksOf(lang string) []codeBlock {
	var found []codeBlock
	for _, b := range d.blocks {
		if b.lang == lang {
			found = append(found, b)
		}
	}
	return found
}

func (d markdownDocument) at(b codeBlock) string { return fmt.Sprintf("%s:%d", d.path, b.line) }

// The function backquoted() returns all texts in backquotes from a table cell.
func backquoted(cell string) []string {
	var words []string
	for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(cell, -1) {
		words = append(words, m[1])
	}
	return words
}

func documents(t testing.TB) []markdownDocument {
	t.Helper()
	var all []markdownDocument
	for _, pattern := range []string{"*.md", "docs/*.md", "docs/dev/*.md", "conf/*.md", "integration/*.md", "plugins/*/*.md"} {
		paths, err := filepath.Glob(filepath.Join(treeRoot, pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range paths {
			rel, err := filepath.Rel(treeRoot, p)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, parse(t, rel))
		}
	}
	return all
}

func TestCut(t *testing.T) {
	d := cutDocument("x.md", "# A\ntext\n| k | v |\n| --- | --- |\n| `a`, `b` | 1 \\| 2 |\n\n## B\n```json\n{\"a\": 1}\n```\n| one |\n| --- |\n| row |\n| two |\n| --- |\n")
	if got := fmt.Sprint(d.headings, d.blocks, d.tables); got != "[A B] [{json B {\"a\": 1}\n 8}] "+
		"[{A [k v] [[`a`, `b` 1 | 2]]} {B [one] [[row]]} {B [two] []}]" {
		t.Error(got)
	}
	if got := fmt.Sprint(backquoted(d.rowsUnder("A")[0][0])); got != "[a b]" {
		t.Error(got)
	}
}

func TestLinks(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)#]+)(#[^)]*)?\)`)
	for _, d := range documents(t) {
		for _, m := range link.FindAllStringSubmatch(strings.Join(d.prose, "\n")+fmt.Sprint(d.tables), -1) {
			target := m[1]
			if strings.Contains(target, "://") || strings.HasPrefix(target, "mailto:") {
				continue
			}
			if _, err := os.Stat(filepath.Join(treeRoot, filepath.Dir(d.path), target)); err != nil {
				t.Errorf("%s: the link to %s leads to no file: correct or remove it", d.path, target)
			}
		}
	}
}
