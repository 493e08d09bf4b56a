// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"strings"
	"testing"
)

// TestUnguarded checks that an expression is reported if it fails on a device without some attribute. An expression that tests for the
// attribute before reading it is accepted.
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
	} {
		got := strings.Join(unguarded(c.expression, c.sure), "; ")
		if c.says == "" && got != "" || !strings.Contains(got, c.says) {
			t.Errorf("%s: %q, want %q", c.expression, got, c.says)
		}
	}
}
