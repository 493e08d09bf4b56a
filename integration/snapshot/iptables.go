// SPDX-License-Identifier: Apache-2.0

package snapshot

import (
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
)

// collectIptables collects the legacy tables; those of iptables-nft are a part of nftables. It reads only tables that the kernel has
// loaded, because reading another would load it.
func (c *collector) collectIptables() error {
	for _, tool := range []struct{ names, save string }{
		{"ip_tables_names", "iptables-legacy-save"},
		{"ip6_tables_names", "ip6tables-legacy-save"},
	} {
		names, err := os.ReadFile("/proc/thread-self/net/" + tool.names)
		if err != nil {
			continue // the kernel has no legacy tables
		}
		for _, table := range strings.Fields(string(names)) {
			if err := c.collectLegacyTable(tool.save, table); err != nil {
				return err
			}
		}
	}
	return nil
}

func (c *collector) collectLegacyTable(save, table string) error {
	path, err := exec.LookPath(save)
	if err != nil {
		c.add(fmt.Sprintf("note: table %s is loaded but not compared, for want of %s", table, save))
		return nil
	}
	// The goroutine is locked to its thread, in whose network namespace the child starts.
	out, err := exec.Command(path, "-t", table).Output()
	if err != nil {
		return fmt.Errorf("%s -t %s: %w", save, table, err)
	}
	c.addList(strings.TrimSuffix(save, "-save")+" "+table, legacyRules(string(out)))
	return nil
}

// legacyRules removes comments, counters, and built-in chains that accept every packet, which have no effect and exist once the kernel has
// loaded a table.
func legacyRules(save string) []string {
	counters := regexp.MustCompile(` ?\[\d+:\d+\] ?`)
	var out []string
	for line := range strings.Lines(save) {
		line = strings.TrimSpace(counters.ReplaceAllString(line, ""))
		if strings.HasPrefix(line, ":") && !strings.HasSuffix(line, " ACCEPT") || strings.HasPrefix(line, "-") {
			out = append(out, line)
		}
	}
	return out
}
