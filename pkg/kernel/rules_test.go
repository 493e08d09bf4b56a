// SPDX-License-Identifier: Apache-2.0

package kernel

import (
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/podlace/podlace/pkg/nft"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// TestRules compares chains and rules, as the kernel tells them, with golden files; -update rewrites them. A change of the rules of
// hostPorts needs another schema number.
func TestRules(t *testing.T) {
	flush(t)
	h := host(t)
	mustDo(t, h.ProtectLoopback(), h.RestoreHostPorts(nil), h.SetMasquerade(subnets("10.1.0.0/24", "fd00:1::/64")))
	for _, table := range []string{nft.HostportTable, nft.LoopbackTable, nft.MasqueradeTable} {
		var lines []string
		for _, kind := range []string{"nft chain", "nft rule"} {
			lines = append(lines, inTable(t, kind, table)...)
		}
		path := filepath.Join("testdata", table+".golden")
		got := strings.Join(lines, "\n") + "\n"
		if *update {
			mustDo(t, os.WriteFile(path, []byte(got), 0o644))
		}
		want, err := os.ReadFile(path)
		if diff := cmp.Diff(string(want), got); diff != "" || err != nil {
			t.Errorf("%s: %v\n%s", table, err, diff)
		}
	}
}

// inTable lists the records of a kind in a table, without the hash of their order.
func inTable(t *testing.T, kind, table string) (lines []string) {
	t.Helper()
	for _, line := range records(t, kind+" inet "+table+" ") {
		if strings.HasPrefix(line, kind) {
			lines = append(lines, line)
		}
	}
	return lines
}
