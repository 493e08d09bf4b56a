// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"os/exec"
	"strings"
	"testing"
)

func TestMakeClusterArguments(t *testing.T) {
	cmd := exec.Command("make", "-s", "cluster", "ARGS=-tset")
	cmd.Dir = treeRoot
	out, err := cmd.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "unknown argument -tset") {
		t.Errorf("%v: %s", err, out)
	}
	plan, err := exec.Command("make", "-n", "-C", treeRoot, "cluster").Output()
	check, build := strings.Index(string(plan), "make-cluster.sh check"), strings.Index(string(plan), "go build")
	if err != nil || check < 0 || build < check {
		t.Errorf("the machine is checked at %d and the build begins at %d, %v", check, build, err)
	}
}
