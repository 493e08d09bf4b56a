// SPDX-License-Identifier: Apache-2.0

package chain

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/conf"
)

func TestCheckPlugins(t *testing.T) {
	shipped, err := conf.Conflist(conf.Default)
	if err != nil {
		t.Fatal(err)
	}
	list, err := libcni.NetworkConfFromBytes(shipped)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"bandwidth", "bridge", "host-local", "portmap"}, PluginsOf(list)); diff != "" {
		t.Error(diff)
	}
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "bridge"), nil, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "portmap"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := CheckPlugins(dir, []string{"bridge"}); err != nil {
		t.Error(err)
	}
	err = CheckPlugins(dir, []string{"bridge", "portmap", "bandwidth"})
	if err == nil || !strings.HasSuffix(err.Error(), "no executable portmap, bandwidth") {
		t.Errorf("got %v", err)
	}
}
