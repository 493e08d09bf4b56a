// SPDX-License-Identifier: Apache-2.0

package main

import (
	"crypto/sha256"
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// A mutant is one change of the source.
type mutant struct {
	id     int // from 1
	place  string
	change string
	order  string // hash: a sample takes the lowest
}

// A rewriter inserts the mutants of one file into its source. It never moves a line.
type rewriter struct {
	pkg, function, seed string
	fset                *token.FileSet
	src                 []byte
	before, after       map[int]string // inserted text by offset, before or after what ends there
	commas              map[int]bool   // offsets of a "+" that becomes the comma of a call
	found               *[]mutant
	invalid             map[int]bool   // mutants that do not compile
	seen                map[string]int // mutants with equal text in one function are numbered
}

// rewrite returns a file's source with all its mutants, and appends them to found. Invalid ones are only listed.
func rewrite(pkg, file, seed string, found *[]mutant, invalid map[int]bool) (string, error) {
	src, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	r := &rewriter{pkg: pkg, seed: seed, fset: token.NewFileSet(), src: src, before: map[int]string{}, after: map[int]string{},
		commas: map[int]bool{}, found: found, invalid: invalid, seen: map[string]int{}}
	tree, err := parser.ParseFile(r.fset, file, src, parser.SkipObjectResolution)
	if err != nil {
		return "", err
	}
	for _, decl := range tree.Decls {
		if f, ok := decl.(*ast.FuncDecl); ok && f.Body != nil {
			r.function = f.Name.Name
			if f.Recv != nil {
				r.function = r.text(f.Recv.List[0].Type) + "." + f.Name.Name
			}
			r.body(f.Type, f.Body)
		}
	}
	var out strings.Builder
	for i := range len(src) + 1 {
		out.WriteString(r.after[i] + r.before[i])
		switch {
		case i < len(src) && r.commas[i]:
			out.WriteByte(',')
		case i < len(src):
			out.WriteByte(src[i])
		}
	}
	return out.String(), nil
}

func (r *rewriter) offset(p token.Pos) int { return r.fset.Position(p).Offset }

func (r *rewriter) text(n ast.Node) string { return string(r.src[r.offset(n.Pos()):r.offset(n.End())]) }

// add records a mutant and wraps a node. "#" in prefix and suffix stands for its number. Outer nodes are wrapped before those in them.
func (r *rewriter) add(n ast.Node, prefix, suffix, change string, args ...any) {
	change = strings.Join(strings.Fields(fmt.Sprintf(change, args...)), " ")
	key := strings.Join([]string{r.seed, r.pkg, r.function, change}, "\n")
	r.seen[key]++
	position := r.fset.Position(n.Pos())
	m := mutant{
		id:     len(*r.found) + 1,
		place:  fmt.Sprintf("%s/%s:%d", r.pkg, filepath.Base(position.Filename), position.Line),
		change: change,
		order:  fmt.Sprintf("%x", sha256.Sum256(fmt.Appendf(nil, "%s\n%d", key, r.seen[key]))),
	}
	*r.found = append(*r.found, m)
	id := strconv.Itoa(m.id)
	if r.invalid[m.id] {
		return
	}
	start, end := r.offset(n.Pos()), r.offset(n.End())
	r.before[start] += strings.Replace(prefix, "__(#", "__("+id, 1)
	r.after[end] = strings.Replace(suffix, "__(#", "__("+id, 1) + r.after[end]
}

func (r *rewriter) always(e ast.Expr) {
	r.add(e, "(", " || mutant__(#))", "`%s` is always true", r.text(e))
}

func (r *rewriter) never(e ast.Expr) {
	r.add(e, "((", ") && !mutant__(#))", "`%s` is never true", r.text(e))
}

// body inserts the mutants of a function. A function literal in it is one of its own, with its own results.
func (r *rewriter) body(t *ast.FuncType, body *ast.BlockStmt) {
	ast.Inspect(body, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.FuncLit:
			r.body(n.Type, n.Body)
			return false
		case *ast.ArrayType:
			return false // a length is a constant
		case *ast.GenDecl:
			return n.Tok != token.CONST
		case *ast.ReturnStmt:
			r.results(t, n)
		case ast.Expr:
			r.expression(n)
		case ast.Stmt:
			r.statement(n)
		}
		return true
	})
}

func (r *rewriter) statement(s ast.Stmt) {
	switch s := s.(type) {
	case *ast.BlockStmt:
		r.leaveOut(s.List)
	case *ast.CommClause:
		r.leaveOut(s.Body)
	case *ast.CaseClause:
		r.leaveOut(s.Body)
	case *ast.IfStmt:
		r.always(s.Cond)
		r.never(s.Cond)
	case *ast.ForStmt:
		if s.Cond != nil {
			r.never(s.Cond)
		}
	case *ast.SwitchStmt:
		if s.Tag != nil {
			return
		}
		for _, clause := range s.Body.List {
			for _, condition := range clause.(*ast.CaseClause).List {
				r.always(condition)
				r.never(condition)
			}
		}
	}
}

// leaveOut inserts the mutants without one of the statements. Tests do not check logs and Close, and a function may need its panic to
// compile.
func (r *rewriter) leaveOut(list []ast.Stmt) {
	for _, s := range list {
		var call ast.Expr
		switch s := s.(type) {
		case *ast.ExprStmt:
			call = s.X
		case *ast.DeferStmt:
			call = s.Call
		case *ast.GoStmt, *ast.IncDecStmt:
		case *ast.AssignStmt:
			if s.Tok == token.DEFINE {
				continue
			}
			call = s.Rhs[0]
		default:
			continue
		}
		if c, ok := call.(*ast.CallExpr); ok {
			name := r.text(c.Fun)
			if name == "panic" || strings.HasSuffix(name, ".Close") || strings.Contains(strings.ToLower(name), "log.") {
				continue
			}
		}
		r.add(s, "if !mutant__(#) { ", " }", "`%s` is left out", shorten(r.text(s)))
	}
}

func (r *rewriter) expression(e ast.Expr) {
	switch e := e.(type) {
	case *ast.Ident:
		if e.Name == "true" || e.Name == "false" {
			r.add(e, "(", " != mutant__(#))", "`%s` is inverted", e.Name)
		}
	case *ast.BinaryExpr:
		r.binary(e)
	}
}

func (r *rewriter) binary(e *ast.BinaryExpr) {
	x, y := r.text(e.X), r.text(e.Y)
	switch e.Op {
	case token.LAND, token.LOR:
		for _, operand := range []ast.Expr{e.X, e.Y} {
			if b, ok := operand.(*ast.BinaryExpr); ok && b.Op == e.Op {
				continue
			}
			if e.Op == token.LAND {
				r.always(operand)
			} else {
				r.never(operand)
			}
		}
	case token.LSS, token.GTR:
		if pure(e) {
			r.add(e, "(", fmt.Sprintf(" || (%s) == (%s) && mutant__(#))", x, y), "`%s` is `%s %s= %s`", r.text(e), x, e.Op, y)
		}
	case token.LEQ, token.GEQ:
		if pure(e) {
			r.add(e, "(", fmt.Sprintf(" && ((%s) != (%s) || !mutant__(#)))", x, y), "`%s` is `%s %s %s`", r.text(e), x, e.Op.String()[:1], y)
		}
	case token.ADD:
		if !literal(e.X) || !literal(e.Y) {
			r.add(e, "mutantSum__(#, ", ")", "`%s` is `%s`", r.text(e), x)
			r.commas[r.offset(e.OpPos)] = !r.invalid[len(*r.found)]
		}
	}
}

// results inserts the mutants of a return: a result of type bool is fixed, and the last error is lost.
func (r *rewriter) results(t *ast.FuncType, s *ast.ReturnStmt) {
	if t.Results == nil || t.Results.NumFields() != len(s.Results) {
		return
	}
	var types []ast.Expr
	for _, field := range t.Results.List {
		types = append(types, slices.Repeat([]ast.Expr{field.Type}, max(1, len(field.Names)))...)
	}
	for i, e := range s.Results {
		name, _ := e.(*ast.Ident)
		switch known := name != nil && slices.Contains([]string{"true", "false", "nil"}, name.Name); {
		case known:
		case r.text(types[i]) == "bool":
			r.always(e)
			r.never(e)
		case r.text(types[i]) == "error":
			r.add(e, "mutantError__(#, ", ")", "`return %s` returns no error", r.text(e))
		}
	}
}

// pure reports whether a comparison may be computed twice: it calls only conversions and functions without side effects.
func pure(e ast.Expr) bool {
	harmless := true
	ast.Inspect(e, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.CallExpr:
			name, ok := n.Fun.(*ast.Ident)
			harmless = harmless && ok && slices.Contains([]string{"len", "cap", "min", "max", "int", "uint", "int64", "uint64", "uint32"}, name.Name)
		case *ast.UnaryExpr:
			harmless = harmless && n.Op != token.ARROW
		}
		return harmless
	})
	return harmless
}

func literal(e ast.Expr) bool {
	_, ok := e.(*ast.BasicLit)
	return ok
}

func shorten(s string) string {
	if line, _, more := strings.Cut(s, "\n"); more {
		return line + " …"
	}
	return s
}
