// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"cmp"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const conformance = "docs/CONFORMANCE.md"

// itemID matches the number of an item in the table of requirements, such as C-85. The letter means conformance (C), faults (F), security
// (S), load (L) or a complaint of users of other SR-IOV projects (V).
var itemID = regexp.MustCompile(`\b[CFSLV]-\d{2,3}\b`)

// itemRow matches a table row with three cells: the item number, the required behaviour, and the tests of the item.
var itemRow = regexp.MustCompile(`(?m)^\| ([CFSLV]-\d{2,3}) \| (.*?) \| (.*?) ?\|$`)

// TestConformance checks that each item in the table of docs/CONFORMANCE.md has a test, and that the table contains every item number of a
// test. With the flag -update, the test writes the column of tests again, and keeps the other columns.
func TestConformance(t *testing.T) {
	text, found := readFile(t, conformance), itemTests(t)
	if *update {
		text = withItems(text, found)
		if err := os.WriteFile(filepath.Join(treeRoot, conformance), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	listed := map[string]string{}
	for _, row := range itemRow.FindAllStringSubmatch(text, -1) {
		if _, twice := listed[row[1]]; twice || len(row[2]) < 10 {
			t.Errorf("%s: %s has two rows, or no rule: keep one row, and write what %s demands into its column Rule", conformance, row[1], row[1])
		}
		listed[row[1]] = row[3]
		if len(found[row[1]]) == 0 {
			t.Errorf("%s: no test names %s: begin the title of its test with \"%s \", or remove the row", conformance, row[1], row[1])
		}
	}
	for _, id := range slices.Sorted(maps.Keys(found)) {
		if want := strings.Join(found[id], "<br>"); listed[id] != want {
			t.Errorf("%s: the row of %s names the tests %q, not %q; run: %s", conformance, id, listed[id], want, updateCommand("TestConformance"))
		}
	}
	if len(listed) == 0 {
		t.Errorf("%s has no row \"| C-00 | RULE | TESTS |\": restore its table", conformance)
	}
}

// withItems returns the text of docs/CONFORMANCE.md with a new table, sorted by item number. The new table still contains the items without
// a test, so that TestConformance reports these items.
func withItems(text string, found map[string][]string) string {
	rules := map[string]string{}
	for id := range found {
		rules[id] = "?"
	}
	first := -1
	for _, row := range itemRow.FindAllStringSubmatchIndex(text, -1) {
		rules[text[row[2]:row[3]]] = text[row[4]:row[5]]
		if first < 0 {
			first = row[0]
		}
	}
	var table strings.Builder
	for _, id := range slices.SortedFunc(maps.Keys(rules), inItemOrder) {
		fmt.Fprintf(&table, "| %s | %s | %s |\n", id, rules[id], strings.Join(found[id], "<br>"))
	}
	return text[:first] + table.String()
}

// inItemOrder compares item numbers by letter, and then by number: C-85 precedes C-111.
func inItemOrder(a, b string) int {
	return cmp.Or(cmp.Compare(a[0], b[0]), cmp.Compare(len(a), len(b)), cmp.Compare(a, b))
}

// itemTests returns the names of all tests by item number. The item number is in a subtest's title, in a script's name, or in parentheses
// in a test function's comment. If a file has several subtests for one item, the list contains only the file and the number of these
// subtests.
func itemTests(t *testing.T) map[string][]string {
	t.Helper()
	found := map[string][]string{}
	err := filepath.WalkDir(treeRoot, func(path string, entry fs.DirEntry, err error) error {
		name := strings.TrimPrefix(path, treeRoot+"/")
		switch {
		case err != nil:
			return err
		case entry.IsDir() && (name == ".git" || name == "build"):
			return fs.SkipDir
		case strings.HasSuffix(name, ".txtar"):
			eachItem(strings.ReplaceAll(filepath.Base(name), "_", " "), name, func(id, title string) {
				found[id] = append(found[id], "`"+title+"`")
			})
		case strings.HasSuffix(name, "_test.go"):
			titles := map[string][]string{}
			err := goItems(path, func(id, title string) { titles[id] = append(titles[id], title) })
			for id, list := range titles {
				of := "`" + list[0] + "`"
				if len(list) > 1 {
					of = fmt.Sprintf("%d tests `%s …`", len(list), id)
				}
				found[id] = append(found[id], fmt.Sprintf("%s in `%s`", of, name))
			}
			return err
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// goItems calls the function f for each item number that occurs in a Go test file.
func goItems(path string, f func(id, title string)) error {
	file, err := parser.ParseFile(token.NewFileSet(), path, nil, parser.ParseComments)
	if err != nil {
		return err
	}
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncDecl:
			if strings.HasPrefix(n.Name.Name, "Test") {
				for _, group := range regexp.MustCompile(`\([CFSLV]-\d\d[^)]*\)`).FindAllString(n.Doc.Text(), -1) {
					eachItem(group, n.Name.Name, f)
				}
			}
		case *ast.CallExpr: // failure messages are not titles
			s, ok := n.Fun.(*ast.SelectorExpr)
			return !ok || !regexp.MustCompile(`^(Error|Fatal|Log|Skip)f?$`).MatchString(s.Sel.Name)
		case *ast.BasicLit:
			title, _ := strconv.Unquote(n.Value)
			if at := itemID.FindStringIndex(title); at != nil && at[0] == 0 {
				eachItem(title, strings.TrimSpace(title), f)
			}
		}
		return true
	})
	return nil
}

func eachItem(text, title string, f func(id, title string)) {
	for _, id := range itemID.FindAllString(text, -1) {
		f(id, title)
	}
}
