// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/types"
)

type parsedPackage struct {
	t     testing.TB
	files []*ast.File
	types map[string]ast.Expr
}

func parseSource(t testing.TB, dir string) parsedPackage {
	t.Helper()
	s := parsedPackage{t: t, types: map[string]ast.Expr{}}
	paths, err := filepath.Glob(filepath.Join(treeRoot, dir, "*.go"))
	if err != nil {
		t.Fatal(err)
	}
	fset := token.NewFileSet()
	for _, path := range paths {
		if strings.HasSuffix(path, "_test.go") {
			continue
		}
		f, err := parser.ParseFile(fset, path, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		s.files = append(s.files, f)
	}
	s.each(func(n ast.Node) {
		if spec, ok := n.(*ast.TypeSpec); ok {
			s.types[spec.Name.Name] = spec.Type
		}
	})
	return s
}

func (s parsedPackage) each(f func(ast.Node)) {
	for _, file := range s.files {
		ast.Inspect(file, func(n ast.Node) bool {
			f(n)
			return true
		})
	}
}

type keyType int

const (
	leaf   keyType = iota + 1
	object         // the key itself need not be described
	opaque         // its keys, if any, are decoded by another package
)

// keyPaths returns the dotted path of every JSON key in the package's configuration, which is every variable whose address goes to Decode
// or DecodeWithin.
func (s parsedPackage) keyPaths() map[string]keyType {
	s.t.Helper()
	found := map[string]keyType{}
	decoders := 0
	s.each(func(n ast.Node) {
		f, ok := n.(*ast.FuncDecl)
		if !ok || f.Body == nil {
			return
		}
		for _, name := range decodedVariables(f.Body) {
			if of := declaredType(f.Body, name); of != nil {
				decoders++
				s.addKeys("", of, found)
			}
		}
	})
	if decoders == 0 {
		s.t.Fatal("nothing is decoded")
	}
	return found
}

// decodedVariables returns the variables whose addresses a function passes to the decoder in pkg/plugin.
func decodedVariables(body *ast.BlockStmt) []string {
	var names []string
	ast.Inspect(body, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok || len(call.Args) == 0 {
			return true
		}
		sel, ok := call.Fun.(*ast.SelectorExpr)
		if !ok || sel.Sel.Name != "Decode" && sel.Sel.Name != "DecodeWithin" {
			return true
		}
		if ref, ok := call.Args[len(call.Args)-1].(*ast.UnaryExpr); ok && ref.Op == token.AND {
			if id, ok := ref.X.(*ast.Ident); ok {
				names = append(names, id.Name)
			}
		}
		return true
	})
	return names
}

// declaredType returns the type of a variable that a function declares.
func declaredType(body *ast.BlockStmt, name string) (of ast.Expr) {
	ast.Inspect(body, func(n ast.Node) bool {
		if spec, ok := n.(*ast.ValueSpec); ok && spec.Type != nil && len(spec.Names) == 1 && spec.Names[0].Name == name {
			of = spec.Type
		}
		return true
	})
	return of
}

// addKeys adds the JSON keys of a type and its fields to found.
func (s parsedPackage) addKeys(path string, of ast.Expr, found map[string]keyType) {
	switch of := of.(type) {
	case *ast.StarExpr:
		s.addKeys(path, of.X, found)
	case *ast.ArrayType:
		s.addKeys(path, of.Elt, found)
	case *ast.StructType:
		if path != "" {
			found[path] = object
		}
		for _, field := range of.Fields.List {
			name := jsonName(field)
			if name == "-" {
				continue
			}
			if name == "" && len(field.Names) > 0 {
				s.t.Fatalf("%s: field %s has no JSON name", path, field.Names[0])
			}
			s.addKeys(join(path, name), field.Type, found)
		}
	case *ast.SelectorExpr:
		s.addForeignKeys(path, fmt.Sprint(of.X, ".", of.Sel), found)
	case *ast.MapType: // its keys are arbitrary
		found[path] = leaf
	case *ast.Ident:
		if own, ok := s.types[of.Name]; ok {
			s.addKeys(path, own, found)
			return
		}
		found[path] = leaf
	default:
		s.t.Fatalf("%s: this test does not know the type %T", path, of)
	}
}

func join(path, key string) string {
	if path == "" || key == "" {
		return path + key
	}
	return path + "." + key
}

// jsonName returns a field's JSON name, or "" if it is embedded.
func jsonName(field *ast.Field) string {
	if field.Tag == nil {
		return ""
	}
	text, _ := strconv.Unquote(field.Tag.Value)
	name, _, _ := strings.Cut(reflect.StructTag(text).Get("json"), ",")
	return name
}

// addForeignKeys adds the JSON keys of another module's type to found.
func (s parsedPackage) addForeignKeys(path, name string, found map[string]keyType) {
	switch name {
	case "json.Number":
		found[path] = leaf
	case "json.RawMessage":
		found[path] = opaque
	case "types.DNS":
		for _, key := range fieldsOf(reflect.TypeFor[types.DNS]()) {
			found[join(path, key)] = leaf
		}
	default:
		s.t.Fatalf("%s: this test does not know the type %s", path, name)
	}
}

func fieldsOf(of reflect.Type) []string {
	var names []string
	for f := range of.Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		names = append(names, name)
	}
	return names
}

// errorCodes returns the names of the codes that the package uses.
func (s parsedPackage) errorCodes() []string {
	found := map[string]bool{}
	s.each(func(n ast.Node) {
		if sel, ok := n.(*ast.SelectorExpr); ok && fmt.Sprint(sel.X) == "plugin" && strings.HasPrefix(sel.Sel.Name, "Code") &&
			sel.Sel.Name != "Code" {
			found[sel.Sel.Name] = true
		}
	})
	return slices.Sorted(maps.Keys(found))
}

// allCodes returns the error codes of pkg/plugin by name.
func allCodes(t testing.TB) map[string]string {
	t.Helper()
	codes := map[string]string{}
	parseSource(t, "pkg/plugin").each(func(n ast.Node) {
		spec, ok := n.(*ast.ValueSpec)
		if !ok || len(spec.Values) != 1 || !strings.HasPrefix(spec.Names[0].Name, "Code") {
			return
		}
		if lit, ok := spec.Values[0].(*ast.BasicLit); ok {
			codes[spec.Names[0].Name] = lit.Value
			return
		}
		t.Fatalf("the value of code %s is not a number", spec.Names[0])
	})
	return codes
}

func TestKeys(t *testing.T) {
	if got := parseSource(t, "pkg/portmap").keyPaths(); got["runtimeConfig.portMappings.hostIP"] != leaf || got["snat"] != leaf ||
		got["runtimeConfig"] != object {
		t.Errorf("got %v", got)
	}
	if got := parseSource(t, "pkg/loopback").keyPaths(); len(got) != 0 {
		t.Errorf("loopback has keys: %v", got)
	}
	if got := allCodes(t); got["CodeUnsupported"] != "2" || got["CodeStateDiffers"] != "100" {
		t.Errorf("got %v", got)
	}
}
