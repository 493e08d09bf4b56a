// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"bytes"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/cli"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/vfconfig"
)

const draDocument = "docs/DRA.md"

// draEvents lists what may happen to a pod with a claim: event, result, and the tests that show it, separated by tabs.
const draEvents = "integration/docs/testdata/dra-events.tsv"

func TestDRAEvents(t *testing.T) {
	rows, without := checkEvents(t, draEvents, testSource(t, "pkg/daemon/dra", "pkg/claim", "pkg/sriov", "pkg/vfconfig", "pkg/daemon/pool",
		"pkg/daemon/deviceplugin", "pkg/cli", "pkg/daemon/claimcheck", "integration/dra-sim", "integration/e2e/dra"))
	if rows < 30 || without > 0 {
		t.Errorf("%s has %d lines, %d without a test, at least 30 with tests are wanted: restore the missing ones", draEvents, rows, without)
	}
}

// TestExplainedVFs compares docs/SRIOV.md and the page of the device plugin with the output of 'podlace sriov explain', on a machine with
// the PFs ens0f0 and ens1f0 and in a virtual machine. TestQuickstarts of scripts/image runs the other commands of the quickstarts.
func TestExplainedVFs(t *testing.T) {
	host, guest := pcitest.Generate(t, pcitest.Machine{Nodes: 2, PFs: 1, VFs: 4}), pcitest.Generate(t, pcitest.Machine{PFs: 1, VFs: 2})
	for _, vf := range []string{"0000:11:02.0", "0000:11:02.1"} {
		pcitest.Passthrough(t, guest, vf)
	}
	node, err := kernel.Host()
	kerneltest.Must(t, err)
	defer node.Close()
	_, err = node.AddVeth(kernel.Veth{Host: "ens0f0v1", Pod: "peer", MTU: 1500})
	kerneltest.Must(t, err)
	defer func() { kerneltest.Must(t, node.DelLink("ens0f0v1")) }()
	link, _, err := node.Link("ens0f0v1")
	kerneltest.Must(t, err, node.AddAddress(link, netip.MustParsePrefix("192.0.2.10/24"), false))
	for path, machines := range map[string][]string{"docs/SRIOV.md": {host, guest, madeAsShown(t, "docs/SRIOV.md")}, devicePlugin: {host}} {
		d := parse(t, path)
		var stdout, stderr bytes.Buffer
		for i, sysfs := range machines {
			config := filepath.Join(t.TempDir(), "config.json")
			kerneltest.Must(t, os.WriteFile(config, []byte(d.blocksOf("json")[i%2].text), 0o600))
			if status := cli.Run([]string{"sriov", "explain", "--config-file", config, "--sysfs", sysfs}, &stdout, &stderr); status != 0 {
				t.Fatalf("%s: status %d, %s", path, status, &stderr)
			}
		}
		shown := regexp.MustCompile(`(?m)^0000:.*offered: .*\n`).FindAllString(readFile(t, path), -1)
		if len(shown) < 2*len(machines) {
			t.Errorf("%s shows no output of 'podlace sriov explain'", path)
		}
		for _, line := range shown {
			if !strings.Contains(stdout.String(), line) {
				t.Errorf("%s: 'podlace sriov explain' does not print %q: copy a line of\n%s", path, line, &stdout)
			}
		}
	}
}

// madeAsShown runs a page's commands that make a folder in the form of sysfs, and returns the folder.
func madeAsShown(t *testing.T, path string) string {
	t.Helper()
	blocks := parse(t, path).blocksOf("text")
	i := slices.IndexFunc(blocks, func(b codeBlock) bool { return strings.HasPrefix(b.text, "d=sys/") })
	if i < 0 {
		t.Fatalf("%s makes no folder sys", path)
	}
	commands, _, _ := strings.Cut(blocks[i].text, "$ ")
	run := exec.Command("sh", "-eu", "-c", commands)
	run.Dir = t.TempDir()
	if out, err := run.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	return filepath.Join(run.Dir, "sys")
}

// The table of settings in docs/DRA.md has all settings of classes and claims, with their keys in the conflist.
func TestDRASettings(t *testing.T) {
	const heading = "Settings of a VF"
	conflistKeys := map[string]bool{}
	for _, row := range parse(t, "plugins/sriov/README.md").rowsUnder(keysHeading) {
		for _, key := range backquoted(row[0]) {
			conflistKeys[key] = true
		}
	}
	var keys []string
	for _, row := range parse(t, draDocument).rowsUnder(heading) {
		named := backquoted(row[0])
		if len(row) != 3 || len(named) == 0 || !slices.Contains(vfconfig.Keys(), named[0]) {
			continue
		}
		keys = append(keys, named...)
		inConflist := backquoted(row[1])
		for _, key := range inConflist {
			if !conflistKeys[key] {
				t.Errorf("%s: %q: plugins/sriov/README.md has no key %s: correct the second cell of %s", draDocument, heading, key, row[0])
			}
		}
		if len(inConflist) != len(named) && named[0] != "ips" {
			t.Errorf("%s: %q: write the keys of the conflist into the second cell of %s", draDocument, heading, row[0])
		}
	}
	slices.Sort(keys)
	if diff := cmp.Diff(slices.Sorted(slices.Values(vfconfig.Keys())), keys); diff != "" {
		t.Errorf("%s: the table below %q needs one row for each key of pkg/vfconfig: add or remove \"| `KEY` | `KEY OF THE CONFLIST` | MEANING |\"\n%s",
			draDocument, heading, "(-vfconfig +document)\n"+diff)
	}
}
