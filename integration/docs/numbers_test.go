// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"fmt"
	"go/ast"
	"go/constant"
	"go/token"
	"regexp"
	"strings"
	"testing"
	"time"
)

const numbers = "integration/docs/testdata/numbers.tsv"

// TestNumbers checks times, limits and defaults in the documents. A line of the list has a document, a part of a sentence with the value in
// braces, a package, and the constant with this value.
func TestNumbers(t *testing.T) {
	constants := map[string]map[string]constant.Value{}
	n := 0
	for line := range strings.Lines(readFile(t, numbers)) {
		n++
		cells := strings.Split(strings.TrimSuffix(line, "\n"), "\t")
		if len(cells) != 4 {
			t.Fatalf("%s:%d: write \"DOCUMENT\\tSENTENCE WITH {NUMBER}\\tPACKAGE\\tCONSTANT\"", numbers, n)
		}
		text := strings.Join(strings.Fields(readFile(t, cells[0])), " ")
		if !strings.Contains(text, strings.NewReplacer("{", "", "}", "").Replace(cells[1])) {
			t.Errorf("%s:%d: %s has no such sentence: copy it again, or remove the line", numbers, n, cells[0])
		}
		if constants[cells[2]] == nil {
			constants[cells[2]] = parseSource(t, cells[2]).constants()
		}
		have, ok := constants[cells[2]][cells[3]]
		told := regexp.MustCompile(`{(.*)}`).FindStringSubmatch(cells[1])[1]
		want, known := quantity(told)
		if ok && have.Kind() == constant.String {
			want, known = constant.MakeString(told), true
		}
		switch {
		case !ok || !known:
			t.Errorf("%s:%d: %s has no constant %s, or %q is no number", numbers, n, cells[2], cells[3], cells[1])
		case constant.Compare(have, token.NEQ, want):
			t.Errorf("%s: %q: %s of %s is %s, not %s: correct the document or the constant", cells[0], cells[1], cells[3], cells[2], have, want)
		}
	}
	if n < 25 {
		t.Errorf("%s has %d lines, want 25", numbers, n)
	}
}

// quantity returns a number of a document: a time in nanoseconds, a size in bytes, or a plain number.
func quantity(text string) (n constant.Value, ok bool) {
	var digits, unit string
	_, _ = fmt.Sscan(strings.ReplaceAll(strings.Replace(text, "one ", "1 ", 1), ",", ""), &digits, &unit)
	factor, ok := map[string]time.Duration{"": 1, "ms": time.Millisecond, "s": time.Second, "second": time.Second, "seconds": time.Second,
		"minute": time.Minute, "minutes": time.Minute, "MiB": 1 << 20}[unit]
	n = constant.MakeFromLiteral(digits, token.FLOAT, 0)
	if !ok || n.Kind() == constant.Unknown {
		return n, false
	}
	return constant.ToInt(constant.BinaryOp(n, token.MUL, constant.MakeInt64(int64(factor)))), true
}

// constants returns the package's constants that are texts, numbers, products or shifts of them, or times.
func (s parsedPackage) constants() map[string]constant.Value {
	found := map[string]constant.Value{}
	s.each(func(n ast.Node) {
		spec, ok := n.(*ast.ValueSpec)
		if !ok || len(spec.Names) != len(spec.Values) {
			return
		}
		for i, name := range spec.Names {
			if v := valueOf(spec.Values[i], found); v.Kind() != constant.Unknown {
				found[name.Name] = v
			}
		}
	})
	return found
}

// valueOf evaluates an expression, whose constants must stand before it.
func valueOf(e ast.Expr, known map[string]constant.Value) constant.Value {
	switch e := e.(type) {
	case *ast.BasicLit:
		return constant.MakeFromLiteral(e.Value, e.Kind, 0)
	case *ast.Ident:
		if v, ok := known[e.Name]; ok {
			return v
		}
	case *ast.SelectorExpr:
		if unit, ok := map[string]time.Duration{"Millisecond": time.Millisecond, "Second": time.Second, "Minute": time.Minute}[e.Sel.Name]; ok {
			return constant.MakeInt64(int64(unit))
		}
	case *ast.BinaryExpr:
		x, y := valueOf(e.X, known), valueOf(e.Y, known)
		if x.Kind() != constant.Int || y.Kind() != constant.Int {
			return constant.MakeUnknown()
		}
		if e.Op == token.MUL {
			return constant.BinaryOp(x, token.MUL, y)
		}
		if shift, ok := constant.Uint64Val(y); e.Op == token.SHL && ok {
			return constant.Shift(x, token.SHL, uint(shift))
		}
	}
	return constant.MakeUnknown()
}
