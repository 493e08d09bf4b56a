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

// document is a Markdown file, split into the parts that the tests read.
type document struct {
	path     string   // relative to the top of the tree
	headings []string // headings of the first two levels
	blocks   []block
	tables   []table
	prose    []string // lines outside code blocks
}

// block is a code block with its language, the heading above it and its first line's number.
type block struct {
	lang, heading, text string
	line                int
}

// table holds the cells of a table without its header row.
type table struct {
	heading string
	head    []string
	rows    [][]string
}

func parse(t testing.TB, path string) document {
	t.Helper()
	return cut(path, read(t, path))
}

func cut(path, text string) document {
	d := document{path: path}
	heading, inside := "", false
	for n, line := range strings.Split(text, "\n") {
		lang, fence := strings.CutPrefix(line, "```")
		switch {
		case fence && !inside:
			inside = true
			d.blocks = append(d.blocks, block{lang: lang, heading: heading, line: n + 1})
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

// addRow adds a row. A table ends at the next heading or at another header row.
func (d *document) addRow(heading string, row []string) {
	last := len(d.tables) - 1
	switch {
	case strings.Trim(strings.Join(row, ""), "-: ") == "" && last >= 0:
		if rows := d.tables[last].rows; len(rows) > 0 { // the previous row was the header of a new table
			d.tables[last].rows = rows[:len(rows)-1]
			d.tables = append(d.tables, table{heading: heading, head: rows[len(rows)-1]})
		}
	case last < 0 || d.tables[last].heading != heading:
		d.tables = append(d.tables, table{heading: heading, head: row})
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

// under returns the rows of the tables below a heading.
func (d document) under(heading string) [][]string {
	var rows [][]string
	for _, t := range d.tables {
		if t.heading == heading {
			rows = append(rows, t.rows...)
		}
	}
	return rows
}

func (d document) of(lang string) []block {
	var found []block
	for _, b := range d.blocks {
		if b.lang == lang {
			found = append(found, b)
		}
	}
	return found
}

func (d document) at(b block) string { return fmt.Sprintf("%s:%d", d.path, b.line) }

// code returns the texts in backquotes in a cell.
func code(cell string) []string {
	var words []string
	for _, m := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(cell, -1) {
		words = append(words, m[1])
	}
	return words
}

// documents lists every Markdown file of the tree.
func documents(t testing.TB) []document {
	t.Helper()
	var all []document
	for _, pattern := range []string{"*.md", "docs/*.md", "conf/*.md", "integration/*.md", "plugins/*/*.md"} {
		paths, err := filepath.Glob(filepath.Join(root, pattern))
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range paths {
			rel, err := filepath.Rel(root, p)
			if err != nil {
				t.Fatal(err)
			}
			all = append(all, parse(t, rel))
		}
	}
	return all
}

func TestCut(t *testing.T) {
	d := cut("x.md", "# A\ntext\n| k | v |\n| --- | --- |\n| `a`, `b` | 1 \\| 2 |\n\n## B\n```json\n{\"a\": 1}\n```\n| one |\n| --- |\n| row |\n| two |\n| --- |\n")
	if got := fmt.Sprint(d.headings, d.blocks, d.tables); got != "[A B] [{json B {\"a\": 1}\n 8}] "+
		"[{A [k v] [[`a`, `b` 1 | 2]]} {B [one] [[row]]} {B [two] []}]" {
		t.Error(got)
	}
	if got := fmt.Sprint(code(d.under("A")[0][0])); got != "[a b]" {
		t.Error(got)
	}
}

// TestLinks checks every link to a file of the tree.
func TestLinks(t *testing.T) {
	link := regexp.MustCompile(`\]\(([^)#]+)(#[^)]*)?\)`)
	for _, d := range documents(t) {
		for _, m := range link.FindAllStringSubmatch(strings.Join(d.prose, "\n")+fmt.Sprint(d.tables), -1) {
			target := m[1]
			if strings.Contains(target, "://") || strings.HasPrefix(target, "mailto:") {
				continue
			}
			if _, err := os.Stat(filepath.Join(root, filepath.Dir(d.path), target)); err != nil {
				t.Errorf("%s: link to %s: %v", d.path, target, err)
			}
		}
	}
}
