// SPDX-License-Identifier: Apache-2.0

package reconcile

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestStoppedContainers: the folders of containers/storage stay until a container is removed. A container of which only that is left does not run.
func TestStoppedContainers(t *testing.T) {
	bin := t.TempDir()
	t.Setenv("PATH", bin)
	t.Cleanup(func() { os.RemoveAll("/run/containers") })
	ended := exec.Command("/bin/true")
	if err := ended.Run(); err != nil {
		t.Fatal(err)
	}
	for id, pid := range map[string]int{"ready": 0, "stopped": 0, "lost": 0, "podman": os.Getpid(), "podman-stopped": ended.Process.Pid, "stopping": os.Getpid()} {
		dir := filepath.Join("/run/containers/storage/overlay-containers", id, "userdata")
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if pid != 0 {
			write(t, filepath.Join(dir, "pidfile"), fmt.Sprint(pid))
		}
	}
	for name, c := range map[string]struct {
		crictl string
		want   map[string]bool
	}{
		"crictl answers": {`echo '{"items":[{"id":"ready","state":"SANDBOX_READY"},{"id":"stopped","state":"SANDBOX_NOTREADY"},{"id":"stopping","state":"SANDBOX_NOTREADY"}]}'`,
			map[string]bool{"ready": true, "podman": true}},
		"crictl fails": {"exit 1", map[string]bool{"ready": true, "stopped": true, "lost": true, "podman": true, "stopping": true}},
	} {
		script(t, filepath.Join(bin, "crictl"), c.crictl)
		if diff := cmp.Diff(c.want, AskRuntimes().Running); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}
