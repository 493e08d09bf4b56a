// SPDX-License-Identifier: Apache-2.0

package main

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// number is that of a fault.
var number = regexp.MustCompile(`F-\d\d`)

// test is a test function that carries numbers.
type test struct {
	dir, name string
	numbers   []string // in order of their appearance, first in the comment
	inDoc     bool     // the comment has one, so the function is an item by itself
	doc       string
}

// find returns the tests of the module below root that carry a number which the filter matches, lowest number first.
func find(root string, filter *regexp.Regexp) ([]test, error) {
	var tests []test
	err := filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entry.IsDir() && path != root {
			if _, err := os.Stat(filepath.Join(path, "go.mod")); err == nil || strings.HasPrefix(entry.Name(), ".") {
				return filepath.SkipDir // another module
			}
		}
		if !strings.HasSuffix(path, "_test.go") {
			return nil
		}
		found, err := inFile(path)
		tests = append(tests, found...)
		return err
	})
	tests = slices.DeleteFunc(tests, func(t test) bool { return !slices.ContainsFunc(t.numbers, filter.MatchString) })
	slices.SortStableFunc(tests, func(a, b test) int { return strings.Compare(slices.Min(a.numbers), slices.Min(b.numbers)) })
	return tests, err
}

func inFile(path string) ([]test, error) {
	source, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	file, err := parser.ParseFile(token.NewFileSet(), path, source, parser.ParseComments)
	if err != nil {
		return nil, err
	}
	var tests []test
	for _, decl := range file.Decls {
		f, ok := decl.(*ast.FuncDecl)
		if !ok || f.Recv != nil || !strings.HasPrefix(f.Name.Name, "Test") || f.Name.Name == "TestMain" {
			continue
		}
		t := test{dir: "./" + filepath.Dir(path), name: f.Name.Name, doc: strings.Join(strings.Fields(f.Doc.Text()), " ")}
		body := string(source[f.Pos()-file.FileStart : f.End()-file.FileStart])
		t.inDoc = number.MatchString(t.doc)
		t.numbers = number.FindAllString(t.doc+body, -1)
		if len(t.numbers) > 0 {
			tests = append(tests, t)
		}
	}
	return tests, nil
}

// title is the first sentence of the comment, without name and number.
func (t test) title() string {
	_, text, _ := strings.Cut(t.doc, ": ")
	text, _, _ = strings.Cut(text, ". ")
	return strings.TrimSuffix(text, ".")
}
