// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/podlace/podlace/pkg/pool"
)

const draDocument = "docs/DRA.md"

// TestDRAEvents checks that the tests in each row of the table "What happens when" exist.
func TestDRAEvents(t *testing.T) {
	var tests strings.Builder
	for _, dir := range []string{"pkg/dra", "pkg/claim", "pkg/sriov", "pkg/vfconfig", "pkg/pool", "pkg/deviceplugin", "pkg/cli",
		"integration/dra-sim", "integration/e2e/dra"} {
		paths, err := filepath.Glob(filepath.Join(treeRoot, dir, "*_test.go"))
		if err != nil || len(paths) == 0 {
			t.Fatal(dir, err)
		}
		for _, path := range paths {
			source, err := os.ReadFile(path)
			if err != nil {
				t.Fatal(err)
			}
			tests.Write(source)
		}
	}
	rows := parse(t, draDocument).rowsUnder("What happens when")
	if len(rows) < 30 {
		t.Errorf("%d rows", len(rows))
	}
	for _, row := range rows {
		names := regexp.MustCompile("`(Test[A-Za-z0-9]+)`").FindAllStringSubmatch(row[len(row)-1], -1)
		if len(row) != 3 || len(names) == 0 {
			t.Errorf("%q: want event, result and tests", row)
		}
		for _, name := range names {
			if !strings.Contains(tests.String(), "\nfunc "+name[1]+"(t *testing.T)") {
				t.Errorf("%s: there is no %s", row[0], name[1])
			}
		}
	}
}

// TestDRAConfiguration checks that the configuration in the quickstart is valid and offers VFs by DRA.
func TestDRAConfiguration(t *testing.T) {
	for _, b := range parse(t, draDocument).blocksOf("json") {
		c, err := pool.Parse(pool.Source{File: draDocument, Prefix: "intel.com"}, []byte(b.text))
		if err != nil || len(c.Notes) > 0 || len(c.Resources) != 1 || c.Resources[0].API != pool.DRA {
			t.Errorf("%v, %+v", err, c)
		}
	}
}
