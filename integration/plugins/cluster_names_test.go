// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/pkg/cli/validate"
	"github.com/podlace/podlace/pkg/plugin"
)

// renamedPlugins returns a folder with the plugins under the names podlace-bridge, podlace-portmap and so on.
func renamedPlugins(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range harness.AllPlugins() {
		data, err := os.ReadFile(filepath.Join(harness.BinDir(), name))
		if err == nil {
			err = os.WriteFile(filepath.Join(dir, "podlace-"+name), data, 0o755)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// TestClusterNames: all verbs of a chain, and `podlace ls`, `doctor`, `gc` and `rollback`, work if the plugins are installed only as
// podlace-bridge and so on.
func TestClusterNames(t *testing.T) {
	c := newCollector(t)
	bin := renamedPlugins(t)
	conflist := regexp.MustCompile(`"type":\s*"`).ReplaceAll(harness.ChainOf(t, "1.1.0", "nftables"), []byte(`"type":"podlace-`))
	file := filepath.Join(c.conf, "10.conflist")
	if err := os.WriteFile(file, conflist, 0o644); err != nil {
		t.Fatal(err)
	}
	list, err := libcni.NetworkConfFromBytes(conflist)
	if err != nil || strings.Count(string(conflist), `"podlace-`) != 4 {
		t.Fatalf("%v: %s", err, conflist)
	}
	c.network = &harness.Network{List: list}
	c.network.CNI = libcni.NewCNIConfigWithCacheDir([]string{bin}, t.TempDir(), c.network.Exec())
	podlace := func(args ...string) string {
		t.Helper()
		out, err := exec.Command(filepath.Join(harness.BinDir(), "podlace"), args...).CombinedOutput()
		if err != nil {
			t.Errorf("podlace %s: %v", args, err)
		}
		return string(out)
	}

	pod := harness.NewPod(t, "named-web")
	rt := harness.Named(pod, harness.Capabilities())
	c.network.Must(t, "STATUS", nil)
	c.network.Must(t, "ADD", rt)
	c.network.Must(t, "CHECK", rt)
	c.network.Must(t, "GC", nil, types.GCAttachment{ContainerID: rt.ContainerID, IfName: "eth0"})
	c.network.Must(t, "CHECK", rt)
	c.losePod("named-lost")
	if out := podlace("ls", "--conf-dir", c.conf); !strings.Contains(out, "shop/named-web") || !strings.Contains(out, "named-lost") {
		t.Errorf("ls:\n%s", out)
	}
	mistyped := strings.Replace(string(conflist), `"hairpinMode"`, `"hairpinMod"`, 1)
	for data, want := range map[string]string{string(conflist): "", mistyped: "hairpinMod"} {
		found := validate.Config([]byte(data), validate.Node{})
		named := slices.ContainsFunc(found, func(f plugin.Finding) bool { return strings.Contains(f.Key, "hairpinMod") })
		if named != (want != "") || want == "" && len(found) > 0 {
			t.Errorf("validate: %v, want %q", found, want)
		}
	}
	if out := podlace("gc", "--yes", "--conf-dir", c.conf, "--bin-dir", bin); strings.Contains(out, "left alone") {
		t.Errorf("gc:\n%s", out)
	}
	if out := podlace("ls", "--conf-dir", c.conf); !strings.Contains(out, "shop/named-web") || strings.Contains(out, "named-lost") {
		t.Errorf("ls after gc:\n%s", out)
	}
	if out := podlace("rollback", "--conf-dir", c.conf); !strings.Contains(out, "pod shop/named-web") || strings.Contains(out, "FAILED") ||
		!strings.Contains(out, "the reference is not installed as podlace-bridge: put bridge in its place in "+file) {
		t.Errorf("rollback:\n%s", out)
	}
	c.network.Must(t, "DEL", rt)
	if _, list := c.list(); len(list) != 0 {
		t.Errorf("%d attachments are left", len(list))
	}
}

// TestHolderUnderClusterName: with plugins under their other names only, `podlace gc` removes a lost pod's state although the conflist has
// only one of the plugins that created it.
func TestHolderUnderClusterName(t *testing.T) {
	c := newCollector(t)
	bin := renamedPlugins(t)
	c.losePod("holder-lost")
	conf := `{"cniVersion":"1.1.0","name":"chain","plugins":[{"type":"podlace-bridge","bridge":"chain0"}]}`
	if err := os.WriteFile(filepath.Join(c.conf, "10.conflist"), []byte(conf), 0o644); err != nil {
		t.Fatal(err)
	}
	gc := exec.Command(filepath.Join(harness.BinDir(), "podlace"), "gc", "--yes", "--all", "--conf-dir", c.conf, "--bin-dir", bin)
	out, err := gc.CombinedOutput()
	if err != nil || strings.Contains(string(out), "left alone") {
		t.Errorf("%v\n%s", err, out)
	}
	if _, list := c.list(); len(list) != 0 {
		t.Errorf("%d attachments are left", len(list))
	}
}
