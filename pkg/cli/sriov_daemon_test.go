// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"os"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/pcitest"
)

// TestOfDaemon: arguments, output and exit status of sriov-device-plugin's command are passed on, and its absence is reported.
func TestOfDaemon(t *testing.T) {
	dir := pcitest.WriteFiles(t, map[string]string{"sriov-device-plugin": "#!/bin/sh\necho \"$@\"\necho wrong >&2\nexit 1\n"})
	if err := os.Chmod(dir+"/sriov-device-plugin", 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("PATH", dir+":/bin:/usr/bin")
	status, stdout, stderr := run("sriov", "check-claim", "a.yaml", "--slices", "b")
	if status != exitDiffers || stdout != "check-claim a.yaml --slices b\n" || stderr != "wrong\n" {
		t.Errorf("status %d, %q, %q", status, stdout, stderr)
	}
	if _, err := os.Stat("/usr/local/bin/sriov-device-plugin"); err == nil {
		t.Skip("SKIPPED: this machine has sriov-device-plugin in /usr/local/bin")
	}
	t.Setenv("PATH", t.TempDir())
	status, _, stderr = run("sriov", "classes")
	if status != exitFailed || !strings.Contains(stderr, "sriov-device-plugin, which does this, is neither in PATH nor in /usr/local/bin nor beside") {
		t.Errorf("status %d, %q", status, stderr)
	}
}
