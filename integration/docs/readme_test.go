// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/cli/sandbox"
	"github.com/podlace/podlace/pkg/plugin"
)

// cniPlugins lists the folders of plugins/ with a CNI plugin. The READMEs of daemons and command lines have another structure.
func cniPlugins(t testing.TB) []string {
	t.Helper()
	entries, err := os.ReadDir(filepath.Join(treeRoot, "plugins"))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, e := range entries {
		if !slices.Contains([]string{"podlace", "sriov-device-plugin", "podlace-node", "podlace-podresources"}, e.Name()) {
			names = append(names, e.Name())
		}
	}
	return names
}

func packageOf(plugin string) string { return "pkg/" + strings.ReplaceAll(plugin, "-", "") }

const (
	keysHeading         = "Configuration"
	capabilitiesHeading = "Capabilities and CNI_ARGS"
	errorsHeading       = "Errors"
	exampleHeading      = "Example"
)

// READMEs of CNI plugins have the same headings in the same order. A page leaves out those without content.
func TestStructure(t *testing.T) {
	const differences = "Differences to the reference plugin"
	order := []string{exampleHeading, keysHeading, capabilitiesHeading, "Behaviour", errorsHeading, differences, "Limits"}
	// The pages of host-local and sriov have another order.
	former := []string{"Behaviour", keysHeading, capabilitiesHeading, "Result", errorsHeading, differences, exampleHeading}
	for _, plugin := range cniPlugins(t) {
		d := parse(t, "plugins/"+plugin+"/README.md")
		if d.headings[0] != plugin || !isSubsequence(d.headings[1:], order) && !slices.Equal(d.headings[1:], former) {
			t.Errorf("%s has the headings %q of the levels # and ##: want %q, then these in this order: %q", d.path, d.headings, plugin, order)
		}
		for _, heading := range []string{exampleHeading, keysHeading, errorsHeading} {
			if !slices.Contains(d.headings, heading) {
				t.Errorf("%s lacks the heading \"## %s\"", d.path, heading)
			}
		}
		if !slices.ContainsFunc(d.blocksOf("json"), func(b codeBlock) bool { return b.heading == exampleHeading && kindOf(t, b) == config }) {
			t.Errorf("%s has no configuration below \"## %s\": add one in a code block that begins with ```json", d.path, exampleHeading)
		}
	}
}

// isSubsequence reports whether all has the elements of part in their order.
func isSubsequence(part, all []string) bool {
	for _, s := range all {
		if len(part) > 0 && part[0] == s {
			part = part[1:]
		}
	}
	return len(part) == 0
}

// TestKeysAreDocumented checks that the README of each plugin lists exactly the keys that the source decodes.
func TestKeysAreDocumented(t *testing.T) {
	for _, plugin := range cniPlugins(t) {
		d := parse(t, "plugins/"+plugin+"/README.md")
		listed := map[string]bool{}
		for _, row := range d.rowsUnder(keysHeading) {
			if len(row) != 3 || slices.Contains(row, "") {
				t.Errorf("%s: a cell of the row %q is missing: write \"| `KEY` | DEFAULT | MEANING |\"", d.path, row)
			}
			for _, key := range backquoted(row[0]) {
				listed[key] = true
			}
		}
		keys := keysOf(t, plugin)
		for key, kind := range keys {
			if kind != object && !listed[key] {
				t.Errorf("%s lacks the key %s: add the row \"| `%s` | DEFAULT | MEANING |\" below \"## %s\"", d.path, key, key, keysHeading)
			}
		}
		for key := range listed {
			if parent := key[:max(0, strings.LastIndex(key, "."))]; keys[key] == 0 && keys[parent] != opaque {
				t.Errorf("%s: %s decodes no key %s: remove its row below \"## %s\"", d.path, packageOf(plugin), key, keysHeading)
			}
		}
	}
}

// keysOf returns the keys that a plugin decodes. Those of podlace-pod are its sections, because bridge decodes the rest.
func keysOf(t testing.TB, name string) map[string]keyType {
	if name == plugin.PodType {
		return map[string]keyType{"portmap": opaque, "bandwidth": opaque}
	}
	return parseSource(t, packageOf(name)).keyPaths()
}

// refusedValues contains one configuration for each key that a plugin refuses according to its README.
func refusedValues() map[string]string {
	return map[string]string{
		"portmap/conditionsV4":      `{"conditionsV4": ["ip", "daddr", "192.0.2.1"]}`,
		"portmap/conditionsV6":      `{"conditionsV6": ["ip6", "daddr", "2001:db8::1"]}`,
		"bandwidth/shapedSubnets":   `{"shapedSubnets": ["192.0.2.0/24"]}`,
		"bandwidth/unshapedSubnets": `{"unshapedSubnets": ["192.0.2.0/24"]}`,
	}
}

// TestRefusals checks that each plugin returns an error for every key that its README describes as refused.
func TestRefusals(t *testing.T) {
	pod := newPod(t, podName)
	told := map[string]bool{}
	for _, plugin := range cniPlugins(t) {
		d := parse(t, "plugins/"+plugin+"/README.md")
		for _, row := range d.rowsUnder(keysHeading) {
			if strings.Contains(row[2], "code 2") {
				for _, key := range backquoted(row[0]) {
					told[plugin+"/"+key] = true
				}
			}
		}
	}
	for key, value := range refusedValues() {
		plugin, name, _ := strings.Cut(key, "/")
		if !told[key] {
			t.Errorf("plugins/%s/README.md does not say that %s is refused: write \"code 2\" into its row, or remove %q from refusedValues in %s",
				plugin, name, key, "integration/docs/readme_test.go")
		}
		delete(told, key)
		f := mustRefuse(t, completeConfig(t, value, plugin), pod)
		if f.Code != 2 || !strings.Contains(f.Msg, name) {
			t.Errorf("%s: ADD fails with code %d, %q: let the plugin refuse the key by name with code 2, or remove \"code 2\" from its row in %s",
				key, f.Code, f.Msg, "plugins/"+plugin+"/README.md")
		}
	}
	for key := range told {
		t.Errorf("the README says that %s is refused with code 2: add %q and a value to refusedValues in integration/docs/readme_test.go", key, key)
	}
}

// completeConfig adds the required keys to a configuration with a single key.
func completeConfig(t testing.TB, key, plugin string) string {
	t.Helper()
	conf := map[string]any{"cniVersion": "1.1.0", "name": "pods", "type": plugin,
		"prevResult": map[string]any{"cniVersion": "1.1.0", "ips": []any{map[string]any{"address": "10.58.0.2/16"}}}}
	if err := json.Unmarshal([]byte(key), &conf); err != nil {
		t.Fatal(err)
	}
	return string(encode(t, conf))
}

// TestErrorCodes checks the table of errors in the README of each plugin. The table must contain every error code that the plugin uses.
func TestErrorCodes(t *testing.T) {
	codes := allCodes(t)
	for _, plugin := range cniPlugins(t) {
		d := parse(t, "plugins/"+plugin+"/README.md")
		listed := map[string]bool{}
		for _, row := range d.rowsUnder(errorsHeading) {
			listed[row[0]] = true
		}
		for _, name := range parseSource(t, packageOf(plugin)).errorCodes() {
			if !listed[codes[name]] {
				t.Errorf("%s lacks the code %s (%s), which %s returns: add the row \"| %s | WHEN |\" below \"## %s\"", d.path, codes[name], name,
					packageOf(plugin), codes[name], errorsHeading)
			}
		}
	}
}

// blockKind is the kind of content in a JSON block.
type blockKind string

const (
	config       blockKind = "configuration"
	result       blockKind = "result"
	failure      blockKind = "error"
	capabilities blockKind = "capabilities"
	node         blockKind = "CIDRs of the node"
	pools        blockKind = "pools of VFs"
)

func kindOf(t testing.TB, b codeBlock) blockKind {
	t.Helper()
	var object map[string]any
	if err := json.Unmarshal([]byte(b.text), &object); err != nil {
		t.Fatalf("JSON in line %d: %v", b.line, err)
	}
	has := func(keys ...string) bool {
		return slices.ContainsFunc(keys, func(k string) bool { return object[k] != nil })
	}
	switch {
	case has("plugins", "type"):
		return config
	case has("code"):
		return failure
	case has("interfaces") || has("cniVersion") && has("ips"):
		return result
	case has("podCIDRs"):
		return node
	case has("resourceList"):
		return pools // TestPools
	case has("portMappings", "bandwidth", "ips", "ipRanges", "mac"):
		return capabilities
	}
	t.Fatalf("line %d: no test recognises this JSON: correct its keys, or open the code block with ```text", b.line)
	return ""
}

// TestExamples runs every configuration in the documents. An error shown after a configuration must be exactly its own; a shown result must
// be that of one configuration of the document. Shown capability arguments go to every configuration that declares them.
func TestExamples(t *testing.T) {
	for _, d := range documents(t) {
		t.Run(d.path, func(t *testing.T) { runExamples(t, d) })
	}
}

func runExamples(t *testing.T, d markdownDocument) {
	blocks := d.blocksOf("json")
	caps := map[string]any{}
	for _, b := range blocks {
		switch kindOf(t, b) {
		case capabilities:
			if err := json.Unmarshal([]byte(b.text), &caps); err != nil {
				t.Fatal(err)
			}
		case node:
			writeNodeFile(t, b.text)
		}
	}
	var results []any
	for i, b := range blocks {
		if kindOf(t, b) != config {
			continue
		}
		t.Run(fmt.Sprint("line ", b.line), func(t *testing.T) {
			if i+1 < len(blocks) && kindOf(t, blocks[i+1]) == failure {
				compareError(t, b, blocks[i+1])
				return
			}
			results = append(results, replaceMACs(t, runVerbs(t, b.text, caps)))
		})
	}
	for _, b := range blocks {
		want := kindOf(t, b)
		if want == result && !slices.ContainsFunc(results, func(r any) bool { return cmp.Equal(r, replaceMACs(t, []byte(b.text))) }) {
			t.Errorf("%s: no configuration of the document has this result: replace it by one of these:\n%s", d.at(b), pretty(results))
		}
	}
}

// writeNodeFile writes the node's CIDRs for host-local until the end of the test.
func writeNodeFile(t *testing.T, text string) {
	t.Helper()
	const path = "/run/podlace/node.json"
	if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, []byte(text), 0o600)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(path) })
}

// replaceMACs replaces each MAC address, because some are random.
func replaceMACs(t testing.TB, text []byte) (v any) {
	t.Helper()
	mac := regexp.MustCompile(`"mac": ?"([0-9a-f]{2}:){5}[0-9a-f]{2}"`)
	text = mac.ReplaceAllFunc(text, func(m []byte) []byte {
		if strings.Contains(string(m), "00:00:00:00:00:00") {
			return m
		}
		return []byte(`"mac": "MAC"`)
	})
	if err := json.Unmarshal(text, &v); err != nil {
		t.Fatal(err)
	}
	return v
}

func pretty(v any) string {
	text, _ := json.MarshalIndent(v, "", "    ")
	return string(text)
}

// failureDocument is the error object of the CNI specification.
type failureDocument struct {
	CNIVersion string `json:"cniVersion"`
	Code       int    `json:"code"`
	Msg        string `json:"msg"`
	Details    string `json:"details"`
}

// mustRefuse returns the error of one plugin's ADD, which must fail.
func mustRefuse(t testing.TB, config string, pod *sandbox.Pod) (f failureDocument) {
	t.Helper()
	stdout, ok := runPlugin(t, "ADD", config, pod)
	if ok {
		t.Fatalf("ADD of %s: success", config)
	}
	if err := json.Unmarshal(stdout, &f); err != nil {
		t.Fatalf("%v in %s", err, stdout)
	}
	return f
}

func compareError(t *testing.T, conf, shown codeBlock) {
	t.Helper()
	var want failureDocument
	if err := json.Unmarshal([]byte(shown.text), &want); err != nil {
		t.Fatal(err)
	}
	pod := newPod(t, podName)
	kerneltest.Clean(t, pod)
	if got := mustRefuse(t, conf.text, pod); got != want {
		t.Errorf("line %d: the plugin returns another error: replace the code block by\n%s", shown.line, pretty(got))
	}
}

// TestTracedExamples runs the first configuration of each page as its first 'podlace trace' does. The lines of the page must occur in the
// output in this order, with other times and names of links.
func TestTracedExamples(t *testing.T) {
	traced := 0
	for _, plugin := range cniPlugins(t) {
		d := parse(t, "plugins/"+plugin+"/README.md")
		i := slices.IndexFunc(d.blocks, func(b codeBlock) bool { return strings.HasPrefix(b.text, traceCommand) })
		if i < 0 {
			continue
		}
		traced++
		t.Run(plugin, func(t *testing.T) { compareTrace(t, d.blocksOf("json")[0], d.blocks[i]) })
	}
	if traced == 0 {
		t.Fatal("no page shows the output of podlace trace")
	}
}

const traceCommand = "$ podlace trace pods.conflist"

func compareTrace(t *testing.T, conf, shown codeBlock) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "pods.conflist")
	if err := os.WriteFile(file, []byte(conf.text), 0o600); err != nil {
		t.Fatal(err)
	}
	command, lines, _ := strings.Cut(strings.TrimPrefix(shown.text, traceCommand), "\n")
	args := append([]string{"trace", file, "--plugins", harness.BinDir()}, strings.Fields(command)...)
	out, err := exec.Command(filepath.Join(harness.BinDir(), "podlace"), args...).CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if !isSubsequence(withoutVarying(lines), withoutVarying(string(out))) {
		t.Errorf("line %d: podlace trace prints other lines: copy those that the page shows from\n%s", shown.line, out)
	}
}

// withoutVarying removes the times of a trace, and the digits in names of links.
func withoutVarying(trace string) []string {
	varying := regexp.MustCompile(`^ +\d+\.\d+|\d+\.\d+ ms|(veth|bwp)[0-9a-f]+`)
	var lines []string
	for line := range strings.Lines(trace) {
		lines = append(lines, strings.Join(strings.Fields(varying.ReplaceAllString(line, "$1")), " "))
	}
	return lines
}

// Each number in README.md's comparison is also in docs/dev/PERFORMANCE.md.
func TestFigures(t *testing.T) {
	report := readFile(t, "docs/dev/PERFORMANCE.md")
	rows := parse(t, "README.md").rowsUnder("Podlace and the reference plugins compared")
	if len(rows) == 0 {
		t.Fatal("no table")
	}
	for _, row := range rows {
		for _, cell := range row[1:] {
			for _, figure := range regexp.MustCompile(`\d+\.\d`).FindAllString(cell, -1) {
				if !strings.Contains(report, " "+figure+" ") {
					t.Errorf("README.md: %q: docs/dev/PERFORMANCE.md has no %s: copy the figure of its newest run into README.md", row[0], figure)
				}
			}
		}
	}
}
