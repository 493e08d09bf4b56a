// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"fmt"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/harness"
)

// TestMarks (S-29): packets keep other programs' marks, such as bits 14 and 15 of kube-proxy and 20 to 31 of Calico. The iptables backend
// sets only markMasqBit. Podlace sets no other mark and no connection mark.
func TestMarks(t *testing.T) {
	harness.Program(t, "nft")
	harness.Shell(t, "nft flush ruleset") // chains of earlier pods masquerade all packets with their mark
	for _, x := range []struct {
		title, backend, keys string
		own                  uint32
	}{
		{"nftables", "nftables", "", 0},
		{"iptables", "iptables", "", 1 << 13},
		{"changed bit", "iptables", `"markMasqBit":12,`, 1 << 12},
	} {
		t.Run(x.title, func(t *testing.T) {
			harness.NeedBackend(t, x.backend)
			conflist := strings.Replace(string(harness.ChainOf(t, "1.1.0", x.backend)), `"type":"portmap"`, x.keys+`"type":"portmap"`, 1)
			c := newCrossing(t, conflist, harness.HostPort())
			for _, before := range []uint32{0, ^x.own} {
				c.runLife(t, func() {
					n := countMarks(t, before, x.own, func() { c.checkTraffic(t, true, false) })
					if n["seen"] == 0 || n["changed"]+n["connections"] > 0 || (n["own"] > 0) != (x.own != 0) {
						t.Errorf("the mark was 0x%x before; packets: %v", before, n)
					}
				})
			}
		})
	}
}

// countMarks sets a mark on all incoming and locally sent packets, and counts the marks of those that leave or reach the node while f runs.
func countMarks(t *testing.T, before, own uint32, f func()) map[string]int {
	t.Helper()
	harness.Shell(t, fmt.Sprintf(`nft 'table inet marks {
		counter seen {}; counter changed {}; counter own {}; counter connections {}
		chain come { type filter hook prerouting priority -400; meta mark set %[1]d; }
		chain made { type filter hook output priority -400; meta mark set %[1]d; }
		chain look {
			counter name seen
			meta mark & %[2]d != %[3]d counter name changed
			meta mark & %[4]d != 0 counter name own
			ct mark != 0 counter name connections
		}
		chain leave { type filter hook postrouting priority 400; jump look; }
		chain arrive { type filter hook input priority 400; jump look; }
	}'`, before, ^own, before&^own, own))
	defer harness.Shell(t, "nft delete table inet marks")
	f()
	counted := map[string]int{}
	table := harness.Shell(t, "nft list table inet marks")
	for _, m := range regexp.MustCompile(`counter (\w+) \{\s*packets (\d+)`).FindAllStringSubmatch(table, -1) {
		counted[m[1]], _ = strconv.Atoi(m[2])
	}
	return counted
}
