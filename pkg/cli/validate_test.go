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

// TestStrict: a warning fails CI only with --strict.
func TestStrict(t *testing.T) {
	dir := pcitest.WriteFiles(t, map[string]string{"a.conflist": `{"cniVersion": "1.0.0", "name": "a", "plugins": [{"type": "bridge", "brige": 1}]}`})
	for _, c := range []struct {
		args   []string
		status int
		want   string
	}{
		{[]string{"validate", dir}, 0, "errors: 0, warnings: 1"},
		{[]string{"validate", "--strict", dir}, exitDiffers, "errors: 1, warnings: 0"},
		{[]string{"validate", "--strict", "-o", "json", dir}, exitDiffers, `"error": true`},
	} {
		if status, stdout, stderr := run(c.args...); status != c.status || !strings.Contains(stdout, c.want) {
			t.Errorf("%q: status %d, %s%s", c.args, status, stdout, stderr)
		}
	}
}
