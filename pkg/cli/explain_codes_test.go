// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/podlace/podlace/pkg/cli/doctor"
)

// declaredCodes returns the codes of findings in the source: constants of type FindingCode, and string literals that become a field Code.
func declaredCodes(t *testing.T) map[string]bool {
	t.Helper()
	codes := map[string]bool{}
	files, err := filepath.Glob("../*/*.go")
	nested, nestedErr := filepath.Glob("../*/*/*.go")
	files = append(files, nested...)
	if err := errors.Join(err, nestedErr); err != nil || len(files) < 100 {
		t.Fatal(files, err)
	}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") {
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, parser.SkipObjectResolution)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(parsed, func(n ast.Node) bool {
			switch n := n.(type) {
			case *ast.ValueSpec:
				if isFindingCode(n.Type) {
					for _, value := range n.Values {
						codes[literal(value)] = true
					}
				}
			case *ast.AssignStmt:
				for i, to := range n.Lhs {
					if s, ok := to.(*ast.SelectorExpr); ok && s.Sel.Name == "Code" && i < len(n.Rhs) {
						codes[literal(n.Rhs[i])] = true
					}
				}
			case *ast.CompositeLit:
				code := fieldCode(n)
				if nameOfType(n.Type) == "plugin.Finding" && code == nil {
					t.Errorf("%s: a finding has no code", file)
				}
				codes[literal(code)] = true
			}
			return true
		})
	}
	delete(codes, "") // of expressions that are no literals
	return codes
}

// literal returns the value of a string literal, or "" for another expression.
func literal(e ast.Expr) string {
	if lit, ok := e.(*ast.BasicLit); ok && lit.Kind == token.STRING {
		text, _ := strconv.Unquote(lit.Value)
		return text
	}
	return ""
}

func isFindingCode(e ast.Expr) bool {
	return slices.Contains([]string{"FindingCode", "plugin.FindingCode"}, nameOfType(e))
}

func nameOfType(e ast.Expr) string {
	switch e := e.(type) {
	case *ast.Ident:
		return e.Name
	case *ast.SelectorExpr:
		return nameOfType(e.X) + "." + e.Sel.Name
	}
	return ""
}

func fieldCode(lit *ast.CompositeLit) (code ast.Expr) {
	for _, element := range lit.Elts {
		if pair, ok := element.(*ast.KeyValueExpr); ok && nameOfType(pair.Key) == "Code" {
			code = pair.Value
		}
	}
	return code
}

// TestCodesExplained: 'podlace explain' explains exactly the codes of findings and the checks of doctor.
func TestCodesExplained(t *testing.T) {
	codes := declaredCodes(t)
	if len(codes) < 50 {
		t.Fatalf("only %d codes were found", len(codes))
	}
	for _, check := range doctor.Names() {
		codes[check] = true
	}
	explained := map[string]bool{}
	for _, e := range entries() {
		if e.subject == "code" || e.subject == "check" {
			for _, name := range e.names {
				explained[name] = true
			}
		}
	}
	for _, code := range slices.Sorted(maps.Keys(codes)) {
		if !explained[code] {
			t.Errorf("no table explains %q: add it to pkg/cli/codes.tsv", code)
		}
		if status, stdout, stderr := run("explain", code); status != exitOK || !strings.Contains(stdout, code) {
			t.Errorf("podlace explain %s: status %d, %q, %q", code, status, stdout, stderr)
		}
	}
	for name := range explained {
		if _, err := strconv.Atoi(name); err != nil && !codes[name] {
			t.Errorf("pkg/cli/codes.tsv explains %q, which no finding and no check has: remove it", name)
		}
	}
}
