// SPDX-License-Identifier: Apache-2.0

package kubernetes_test

import (
	"strings"
	"testing"
	"time"
)

// TestKilled: a cluster whose parent is killed leaves nothing. Meanwhile a second cluster runs with the same addresses.
func TestKilled(t *testing.T) {
	one := start(t, "4 6")
	two := start(t, "4 6")
	one.killed = true
	if err := one.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	for end := time.Now().Add(2 * time.Minute); len(one.left()) > 0; time.Sleep(200 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("still on the machine: %s", strings.Join(one.left(), "\n"))
		}
	}
	for _, n := range two.machines() {
		if got := two.run(t, "exec", n, "hostname"); got != n+"\n" {
			t.Errorf("%s of the other cluster reports the name %q", n, got)
		}
	}
	two.kubectl(t, "get", "--raw", "/readyz")
}
