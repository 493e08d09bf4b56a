// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/daemon/claimcheck"
	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/vfconfig"
)

const draDocument = "docs/DRA.md"

// TestDRAEvents checks that the tests in each row of the table "What happens when" in docs/DRA.md exist.
func TestDRAEvents(t *testing.T) {
	var tests strings.Builder
	for _, dir := range []string{"pkg/daemon/dra", "pkg/claim", "pkg/sriov", "pkg/vfconfig", "pkg/daemon/pool", "pkg/daemon/deviceplugin",
		"pkg/cli", "pkg/daemon/claimcheck",
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
		t.Errorf("%s: \"What happens when\" has %d rows, at least 30 are wanted: restore the missing rows", draDocument, len(rows))
	}
	for _, row := range rows {
		names := regexp.MustCompile("`(Test[A-Za-z0-9]+)`").FindAllStringSubmatch(row[len(row)-1], -1)
		if len(row) != 3 || len(names) == 0 {
			t.Errorf("%s: the row %q lacks a cell or a test: write \"| EVENT | RESULT | `TestName` |\"", draDocument, row)
		}
		for _, name := range names {
			if !strings.Contains(tests.String(), "\nfunc "+name[1]+"(t *testing.T)") {
				t.Errorf("%s: %q: no package of the table has %s: write the name of the test that shows this event", draDocument, row[0], name[1])
			}
		}
	}
}

// TestDRAConfiguration checks that the configuration in the quickstart of docs/DRA.md is valid and offers VFs by DRA.
func TestDRAConfiguration(t *testing.T) {
	d := parse(t, draDocument)
	for _, b := range d.blocksOf("json") {
		c, err := pool.Parse(pool.Source{File: draDocument, Prefix: "intel.com"}, []byte(b.text))
		if err != nil || len(c.Notes) > 0 || len(c.Resources) != 1 || c.Resources[0].API != pool.DRA {
			t.Errorf("%s: the configuration must be valid, with one resource and \"api\": \"dra\": correct the code block: %v, %+v", d.at(b), err, c)
		}
	}
}

// TestDRAQuickstart checks the output of two commands in the quickstart of docs/DRA.md. The first command prints the DeviceClass of the
// configuration, and the second command prints the settings of the claim.
func TestDRAQuickstart(t *testing.T) {
	d, dir := parse(t, draDocument), t.TempDir()
	config, manifest := filepath.Join(dir, "config.json"), "pod.yaml"
	t.Chdir(dir)
	yaml := d.blocksOf("yaml")
	for file, text := range map[string]string{config: d.blocksOf("json")[0].text, manifest: yaml[1].text} {
		if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	run := func(args ...string) string {
		var printed, said bytes.Buffer
		if status, _ := claimcheck.Run(append(args, "--config-file", config), nil, &printed, &said); status != 0 {
			t.Fatalf("%s: status %d: %s", args, status, &said)
		}
		return printed.String()
	}
	_, class, _ := strings.Cut(run("classes"), "\napiVersion")
	if diff := cmp.Diff(strings.Split(yaml[0].text, "\n"), strings.Split("apiVersion"+class, "\n")); diff != "" {
		t.Errorf("%s: 'sriov-device-plugin classes' prints another DeviceClass: copy the lines with + into the document\n(-document +program)\n%s",
			d.at(yaml[0]), diff)
	}
	shown := slices.IndexFunc(d.blocksOf("text"), func(b codeBlock) bool { return strings.Contains(b.text, "check-claim") })
	if shown < 0 {
		t.Fatalf("%s shows no output of check-claim: restore the code block ```text", draDocument)
	}
	_, output, _ := strings.Cut(d.blocksOf("text")[shown].text, "\n")
	if printed := run("check-claim", manifest); !strings.HasPrefix(output, printed) {
		t.Errorf("%s: check-claim prints other lines: copy the lines with + into the document\n(-document +program)\n%s",
			d.at(d.blocksOf("text")[shown]), cmp.Diff(strings.Split(output, "\n"), strings.Split(printed, "\n")))
	}
}

// TestDRASettings checks the tables of settings in docs/DRA.md and in the README of the device plugin. The tables must contain all settings
// of classes and claims, and their keys in the conflist.
func TestDRASettings(t *testing.T) {
	conflistKeys := map[string]bool{}
	for _, row := range parse(t, "plugins/sriov/README.md").rowsUnder(keysHeading) {
		for _, key := range backquoted(row[0]) {
			conflistKeys[key] = true
		}
	}
	for file, heading := range map[string]string{draDocument: "Settings of a VF", devicePlugin: "Resources by Dynamic Resource Allocation"} {
		var keys []string
		for _, table := range parse(t, file).tables {
			if table.heading != heading || len(table.head) < 3 || !strings.Contains(table.head[1], "conflist") {
				continue
			}
			for _, row := range table.rows {
				named := backquoted(row[0])
				if len(named) > 0 && slices.Contains(vfconfig.Keys(), named[0]) {
					keys = append(keys, named...)
				}
				for _, key := range backquoted(row[1]) {
					if !conflistKeys[key] {
						t.Errorf("%s: \"%s\": plugins/sriov/README.md has no key %s: correct the second cell of %s", file, heading, key, row[0])
					}
				}
				if len(backquoted(row[1])) == 0 && slices.ContainsFunc(named, func(key string) bool { return !conflistKeys[key] && key != "ips" }) &&
					slices.Contains(vfconfig.Keys(), named[0]) {
					t.Errorf("%s: \"%s\": write the conflist's key into the second cell of %s", file, heading, row[0])
				}
			}
		}
		slices.Sort(keys)
		if diff := cmp.Diff(slices.Sorted(slices.Values(vfconfig.Keys())), keys); diff != "" {
			t.Errorf("%s: the table below \"%s\" needs one row for each key of pkg/vfconfig: add or remove \"| `KEY` | `KEY OF THE CONFLIST` | MEANING |\"\n%s",
				file, heading, "(-vfconfig +document)\n"+diff)
		}
	}
}
