// SPDX-License-Identifier: Apache-2.0

package kubelet_test

import (
	"os"
	"strings"
	"testing"
)

// TestStory: what README shows is what the commands print on this node, for the pods of which it tells.
func TestStory(t *testing.T) {
	l := newLab(t, "single-numa-node")
	for _, pod := range []string{"web", "db"} {
		l.runPod(pod, guaranteed(4, 2))
	}
	var shown []string
	for line := range strings.Lines(l.list()) {
		if strings.Contains(line, "DEVICE") || strings.Contains(line, "shop/") {
			shown = append(shown, line)
		}
	}
	explained, err := l.podlace("explain", resource, "--count", "7")
	if err != nil {
		t.Error(err)
	}
	readme, err := os.ReadFile("../../README.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, text := range []string{strings.Join(shown, ""), explained} {
		if !strings.Contains(string(readme), text) {
			t.Errorf("README.md does not show\n%s", text)
		}
	}
}
