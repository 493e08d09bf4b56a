// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestUnguarded checks that an expression is reported if it fails on a device without some attribute, or if it reads an attribute that no
// VF has. An expression that tests for the attribute before reading it is accepted.
func TestUnguarded(t *testing.T) {
	const own, standard = `device.attributes["sriov.podlace.io"]`, `device.attributes["resource.kubernetes.io"]`
	for _, c := range []struct {
		expression, says string
		sure             bool
	}{
		{`device.driver == "sriov.podlace.io" && ` + own + `.resource == "example.com/fast"`, "", false},
		{own + `.resource == "example.com/fast"`, "begin with device.driver", false},
		{own + `.resource == "example.com/fast"`, "", true},
		{own + `["resource"] == "a" && device.driver == "sriov.podlace.io"`, "it reads sriov.podlace.io/resource, which devices of other", false},
		{own + `.numa == 1`, "", true},
		{standard + `.numaNode == 1`, "it reads resource.kubernetes.io/numaNode", true},
		{standard + `["numaNode"] == 1`, "it reads resource.kubernetes.io/numaNode", true},
		{`device.attributes['dra.net'].numaNode == 1`, "it reads dra.net/numaNode", true},
		{`"numaNode" in ` + standard + ` && ` + standard + `.numaNode == 1`, "", true},
		{`"numaNode" in device.attributes["dra.net"] && ` + standard + `.numaNode == 1`, "it reads resource.kubernetes.io/numaNode", true},
		{standard + `.numaNode == 1 && "numaNode" in ` + standard, "it reads resource.kubernetes.io/numaNode", true},
		{`has(` + standard + `.numaNode) && ` + standard + `.numaNode == 1`, "", true},
		{standard + `.?numaNode.orValue(-1) == 1`, "", true},
		{`cel.bind(k, ` + standard + `, k.numaNode == 1)`, "it reads resource.kubernetes.io/numaNode", true},
		{`cel.bind(k, ` + own + `, k.vf < 4 && k.numa == 0)`, "", true},
		{own + `.numaNode == 1`, "it reads sriov.podlace.io/numaNode: no VF has this attribute; attributes of sriov.podlace.io: card, ", true},
		{own + `.numaa == 1`, "did you mean sriov.podlace.io/numa?", false},
		{own + `.x == 1`, "attributes of sriov.podlace.io: card, driver, kind, linkType, numa, pf, pfAddress, product, rdma, resource, vendor, vf", true},
		{own + `.?numaa.orValue(1) == 1`, "", true},
		{`"numaa" in ` + own + ` && ` + own + `.numaa == 1`, "", true},
		{standard + `.numanode == 1`, "did you mean resource.kubernetes.io/numaNode?", true},
		{`device.attributes["dra.net"].numaNod == 1`, "no VF has this attribute; did you mean dra.net/numaNode?", true},
		{standard + `.cpuSocketID == 1`, "", true},
		{`device.attributes["sriov.podlace.com"].pf == "a"`, "no driver has this name; did you mean sriov.podlace.io?", true},
		{`device.attributes["gpu.example.com"].model == "a"`, "compare device.driver first", false},
		{`device.driver == "cpu.example.com" && ` + standard + `.numaNode == 1`, "", false},
		{`device.driver == "cpu.example.com" && ` + standard + `.numaNode == 1 || device.driver == "sriov.podlace.io" && ` + standard + `.numaNode == 1`,
			"it reads resource.kubernetes.io/numaNode", false},
		{own + `.exists(k, k == "pf")`, "", true},
		{own + `.pf == 3`, "it compares sriov.podlace.io/pf with 3, but the type of the attribute is string", true},
		{own + `.vf < "4"`, `compares sriov.podlace.io/vf with "4", but the type of the attribute is int`, true},
		{own + `.rdma == "true" || ` + own + `.vf == 1`, "the type of the attribute is bool", true},
		{own + `.vf == "abc".size()`, "", true},
		{own + `.pf != 3 && ` + own + `.rdma == true && ` + own + `.vf >= -1`, "", true},
		{own + `.pf == "a" && (`, "the bracket ( is not closed", true},
		{own + `.pf == "a" )`, "the bracket ) has no counterpart", true},
		{`(` + own + `.pf == "a"]`, "the bracket ] has no counterpart", true},
		{own + `.pf == "a`, `the quote " is not closed`, true},
		{own + `.pf == "a" &&`, "it ends with &&", true},
		{" // only a comment", "it is empty", true},
		{own + `.pf == "(" && ` + own + `.pf.matches(r'\') && ` + own + `.pf != '\'[' // )` + "\n" + ` && ` + own + `.pf != """a"(b"""`, "", true},
	} {
		got := strings.Join(celProblems(c.expression, c.sure), "; ")
		if c.says == "" && got != "" || !strings.Contains(got, c.says) {
			t.Errorf("%s: %q, want %q", c.expression, got, c.says)
		}
	}
}

// TestAttributesMatchDocument checks that check-claim knows the attributes in the table of docs/DRA.md, and their types.
func TestAttributesMatchDocument(t *testing.T) {
	data, err := os.ReadFile("../../docs/DRA.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(data), "\n## Attributes of a VF\n")
	section, _, _ = strings.Cut(section, "\n## ")
	listed := map[string]string{}
	for _, row := range regexp.MustCompile("(?m)^\\| (`.*`) \\| (string|int|bool) \\|").FindAllStringSubmatch(section, -1) {
		names := regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(row[1], -1)
		domain, _, _ := strings.Cut(names[0][1], "/")
		for _, name := range names {
			listed[domain+"/"+strings.TrimPrefix(name[1], domain+"/")] = row[2]
		}
	}
	known := map[string]string{}
	for a, of := range publishedAttributes() {
		known[a.String()] = of
	}
	if diff := cmp.Diff(listed, known); diff != "" {
		t.Errorf("docs/DRA.md and check-claim know other attributes: below \"## Attributes of a VF\" remove the rows of the lines with -, and add "+
			"\"| `ATTRIBUTE` | TYPE | MEANING |\" for each line with +\n%s", diff)
	}
}
