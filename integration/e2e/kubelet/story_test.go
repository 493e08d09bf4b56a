// SPDX-License-Identifier: Apache-2.0

package kubelet_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/podlace/podlace/integration/harness/node"
)

// TestStory: with two pods and the shipped kubelet settings, 'podlace sriov explain' prints what docs/SRIOV.md shows.
func TestStory(t *testing.T) {
	node.Skip(t)
	l := prepareLab(t, "none", "classic")
	l.dropIns = t.TempDir()
	settings, err := os.ReadFile("../../../conf/kubelet-numa.conf")
	if err == nil {
		err = os.WriteFile(filepath.Join(l.dropIns, "50-numa.conf"), settings, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
	l.runKubelet()
	l.runDaemon()
	l.awaitReady(20 * time.Second)
	for _, pod := range []string{"web", "db"} {
		l.runPod(pod, guaranteedLimits(4, 2))
	}
	explained, err := l.runPodlace("explain", resource, "--count", "7")
	if err != nil {
		t.Error(err)
	}
	readme, err := os.ReadFile("../../../docs/SRIOV.md")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(readme), explained) {
		t.Errorf("docs/SRIOV.md does not show what podlace prints: replace its code block by\n%s", explained)
	}
}
