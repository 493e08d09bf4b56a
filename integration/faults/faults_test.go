// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// numbered writes N-09 as it is in real tests, where it would name this one as the test of that item.
func numbered(text string) string { return strings.ReplaceAll(text, "N-", "F-") }

const source = `package x
import "testing"
// TestReboot (N-27): leases stay. And more.
func TestReboot(t *testing.T) {}
func TestMany(t *testing.T) { t.Run("N-09 disk full", nil); t.Run("N-10 read-only", nil) }
func TestNone(t *testing.T) {}
`

func TestFind(t *testing.T) {
	root := t.TempDir()
	for path, content := range map[string]string{
		"a/x_test.go": source, "other/go.mod": "module other", "other/x_test.go": source, ".hidden/x_test.go": source, "a/x.go": source,
	} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(root, path)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(root, path), []byte(numbered(content)), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(root)
	tests, err := find(".", regexp.MustCompile("F-"))
	if err != nil || len(tests) != 2 || tests[0].name != "TestMany" || tests[1].name != "TestReboot" || tests[1].title() != "leases stay" || tests[1].dir != "./a" {
		t.Errorf("%+v, %v", tests, err)
	}
	if tests, err = find(".", regexp.MustCompile(numbered("N-10"))); err != nil || len(tests) != 1 {
		t.Errorf("%+v, %v", tests, err)
	}
}

const events = `{"Action":"run","Test":"TestMany"}
{"Action":"output","Test":"TestMany/N-09_disk_full","Output":"    figures: points=7 leaks=1 duplicates=2 next=3 failed=1\n"}
{"Action":"pass","Test":"TestMany/N-09_disk_full/inner","Elapsed":1}
{"Action":"fail","Test":"TestMany/N-09_disk_full","Elapsed":1.5}
{"Action":"output","Test":"TestMany/N-10_read-only","Output":"    x_test.go:1: SKIPPED: no strace\n"}
{"Action":"skip","Test":"TestMany/N-10_read-only","Elapsed":0}
{"Action":"fail","Test":"TestMany","Elapsed":2}
`

func TestRead(t *testing.T) {
	rows, text := test{name: "TestMany"}.read([]byte(numbered(events)))
	want := []row{{numbered("N-09"), "disk full", "FAILED", "7", "1", "2", "1 of 3 failed", 1.5}, {numbered("N-10"), "read-only", "skipped: no strace", "", "", "", "", 0}}
	if diff := cmp.Diff(want, rows, cmp.AllowUnexported(row{})); diff != "" || !strings.Contains(text, "figures") {
		t.Errorf("%s\n%s", diff, text)
	}
	rows, _ = test{name: "TestMany", inDoc: true, numbers: []string{numbered("N-27")}, doc: numbered("TestMany (N-27): all of it.")}.read([]byte(numbered(events)))
	if last := rows[len(rows)-1]; last.number != numbered("N-27") || last.title != "all of it" || last.points != "3" || last.outcome != "FAILED" {
		t.Errorf("%+v", last)
	}
	var table strings.Builder
	printTable(&table, rows)
	for _, want := range []string{numbered("N-09  disk full"), "1 of 3 failed", "skipped: no strace"} {
		if !strings.Contains(table.String(), want) {
			t.Errorf("%s\nlacks %q", table.String(), want)
		}
	}
}
