// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"fmt"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/harness"
)

// tcOf is what tc(8) shows of a link, without counters and numbers that the kernel counts up.
func tcOf(t testing.TB, netns, link string) string {
	t.Helper()
	in := ""
	if netns != "" {
		in = "-n " + netns + " "
	}
	text := harness.Shell(t, fmt.Sprintf("tc %[1]sqdisc show dev %[2]s; tc %[1]sfilter show dev %[2]s ingress", in, link))
	if strings.Contains(text, "clsact") { // of an ingress qdisc tc shows the same again
		text += harness.Shell(t, fmt.Sprintf("tc %sfilter show dev %s egress", in, link))
	}
	var lines []string
	for line := range strings.Lines(text) {
		if !strings.Contains(line, "index ") {
			lines = append(lines, strings.TrimSpace(line))
		}
	}
	return strings.Join(lines, "\n")
}
