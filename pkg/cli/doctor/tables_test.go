// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"strings"
	"testing"
)

// TestLimitsOfTables passes limits and usage as arguments, because the kernel has these limits only in the node's own network namespace.
func TestLimitsOfTables(t *testing.T) {
	for _, c := range []struct {
		found []Finding
		want  string
	}{
		{fullConntrack(89, 100), ""},
		{fullConntrack(90, 100), "nf_conntrack_count = 90 of nf_conntrack_max = 100"},
		{fullConntrack(1, 0), ""},
		{fewNeighbours("ipv4", 1024, 512), ""},
		{fewNeighbours("ipv4", 1024, 513), "podlace-node knows 513 peers"},
	} {
		if len(c.found) == 0 != (c.want == "") || c.want != "" && !strings.Contains(c.found[0].Evidence, c.want) {
			t.Errorf("got %+v, want %q", c.found, c.want)
		}
	}
}
