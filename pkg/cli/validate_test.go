// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/pcitest"
)

// TestUnreadable: a file that cannot be read hides no fault of the others, and decides the exit status.
func TestUnreadable(t *testing.T) {
	dir := pcitest.WriteFiles(t, map[string]string{"a.yaml": "kind: Pod\n", "b.yaml": "kind: Pod\n"})
	if err := os.Symlink("none", filepath.Join(dir, "a0.yaml")); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"validate", dir}, {"validate", dir + "/none", dir + "/a.yaml", dir + "/b.yaml"}} {
		status, stdout, stderr := run(args...)
		if faults := strings.Count(stdout, "spec is missing"); status != exitFailed || !strings.Contains(stderr, "no such file") || faults != 2 {
			t.Errorf("%q: status %d, %s\n%s", args, status, stdout, stderr)
		}
	}
	empty := filepath.Join(dir, "net.d")
	if err := os.Mkdir(empty, 0o700); err != nil {
		t.Fatal(err)
	}
	if status, stdout, stderr := run("validate", empty); status != exitFailed || !strings.Contains(stderr, empty+": the folder has no file") {
		t.Errorf("empty folder: status %d, %s\n%s", status, stdout, stderr)
	}
}
