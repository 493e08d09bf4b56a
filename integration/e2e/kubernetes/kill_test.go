// SPDX-License-Identifier: Apache-2.0

package kubernetes_test

import (
	"strings"
	"testing"
	"time"
)

// TestKilled: nothing remains of a cluster whose parent process is killed. A second one with the same addresses keeps running.
func TestKilled(t *testing.T) {
	one := startCluster(t, "4 6")
	two := startCluster(t, "4 6")
	one.killed = true
	if err := one.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(2 * time.Minute); len(one.listRemains()) > 0; time.Sleep(200 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("still on the machine: %s", strings.Join(one.listRemains(), "\n"))
		}
	}
	for _, n := range two.machineNames() {
		if got := two.runScript(t, "exec", n, "hostname"); got != n+"\n" {
			t.Errorf("%s of the other cluster reports the name %q", n, got)
		}
	}
	two.kubectl(t, "get", "--raw", "/readyz")
}
