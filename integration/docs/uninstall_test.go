// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/integration/kerneltest"
)

// treeContent returns the mode and content of everything in the installation's target folder.
func (c installTree) treeContent(t *testing.T) map[string]string {
	t.Helper()
	found := map[string]string{}
	err := filepath.WalkDir(c.into, func(path string, e fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := e.Info()
		if err != nil {
			return err
		}
		text := info.Mode().String()
		switch data, link := "", ""; {
		case info.Mode().IsRegular():
			data = fmt.Sprintf("%x", sha256.Sum256([]byte(mustRead(t, path))))
			text += " " + data
		case info.Mode()&fs.ModeSymlink != 0:
			link, err = os.Readlink(path)
			text += " " + link
		}
		found[strings.TrimPrefix(path, c.into)] = text
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return found
}

func mustRead(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// addForeignFiles creates another project's plugins: bridge as a file, and portmap as a symbolic link.
func (c installTree) addForeignFiles(t *testing.T) {
	t.Helper()
	dir := filepath.Join(c.into, "opt/cni/bin")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"bridge", "tuning"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("reference "+name), 0o751); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("tuning", filepath.Join(dir, "portmap")); err != nil {
		t.Fatal(err)
	}
}

func (c installTree) mustMake(t *testing.T, args ...string) string {
	t.Helper()
	out, err := c.make(args...)
	if err != nil {
		t.Fatalf("make %v: %v\n%s", args, err, out)
	}
	return strings.ReplaceAll(out, c.into, "INTO")
}

// make uninstall restores what existed before the first installation, of which there were one or two.
func TestUninstallLeavesNothing(t *testing.T) {
	for name, prepare := range map[string]func(*testing.T, installTree){
		"an empty node":   func(*testing.T, installTree) {},
		"foreign plugins": func(t *testing.T, c installTree) { c.addForeignFiles(t) },
	} {
		t.Run(name, func(t *testing.T) {
			c := newCheckout(t)
			prepare(t, c)
			before := c.treeContent(t)
			c.mustInstall(t)
			c.mustInstall(t)
			c.mustMake(t, "uninstall")
			if diff := cmp.Diff(before, c.treeContent(t)); diff != "" {
				t.Errorf("before the installation and after the removal (-before +after):\n%s", diff)
			}
		})
	}
}

// With DRYRUN=1, make install and make uninstall print what they would do with each file, and change none.
func TestPlanChangesNothing(t *testing.T) {
	c := newCheckout(t)
	c.addForeignFiles(t)
	before := c.treeContent(t)
	out := c.mustMake(t, "install", "DRYRUN=1")
	if diff := cmp.Diff(before, c.treeContent(t)); diff != "" {
		t.Errorf("the plan of an installation changed files:\n%s", diff)
	}
	for _, want := range []string{
		"plan: INTO/opt/cni/bin/bridge: replaces a file of another project, kept as INTO/opt/cni/bin/bridge.before-podlace\n",
		"plan: INTO/opt/cni/bin/sriov: new\n", "plan: INTO/usr/local/bin/podlace: new\n"} {
		if !strings.Contains(out, want) {
			t.Errorf("the plan lacks %q:\n%s", want, out)
		}
	}
	if real := c.mustMake(t, "install"); !strings.HasPrefix(real, out) {
		t.Errorf("make install does not begin with its plan:\n%s", real)
	}
	before = c.treeContent(t)
	out = c.mustMake(t, "uninstall", "DRYRUN=1")
	if diff := cmp.Diff(before, c.treeContent(t)); diff != "" {
		t.Errorf("the plan of a removal changed files:\n%s", diff)
	}
	if want := "plan: restore INTO/opt/cni/bin/bridge from INTO/opt/cni/bin/bridge.before-podlace\n"; !strings.Contains(out, want) || strings.Contains(out, "removed") {
		t.Errorf("the plan lacks %q, or says that it removed something:\n%s", want, out)
	}
	if again := c.mustMake(t, "install"); strings.Contains(again, "installed INTO") {
		t.Errorf("make install says that it installed unchanged files:\n%s", again)
	}
}

// make uninstall keeps a file that changed after the installation, and the copy of another project's plugin that it replaced. The receipt
// then lists only the changed file.
func TestUninstallLeavesChangedFiles(t *testing.T) {
	c := newCheckout(t)
	c.addForeignFiles(t)
	c.mustInstall(t)
	changed := filepath.Join(c.into, "opt/cni/bin/bridge")
	if err := os.WriteFile(changed, []byte("a third project"), 0o755); err != nil {
		t.Fatal(err)
	}
	out, err := c.make("uninstall")
	if err == nil || !strings.Contains(out, "left "+changed+": it changed since the installation\n") {
		t.Errorf("%v\n%s", err, out)
	}
	want := []string{"/opt/cni/bin/bridge", "/opt/cni/bin/bridge.before-podlace", "/opt/cni/bin/portmap", "/opt/cni/bin/tuning", receiptPath}
	if diff := cmp.Diff(want, c.installedFiles(t)); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
	if got := mustRead(t, changed); got != "a third project" {
		t.Errorf("bridge: %q", got)
	}
	lines := slices.DeleteFunc(strings.Split(mustRead(t, c.into+receiptPath), "\n"), func(l string) bool { return l == "" || l[0] == '#' })
	if len(lines) != 1 || !strings.HasSuffix(lines[0], "  /opt/cni/bin/bridge") {
		t.Errorf("the receipt names %q", lines)
	}
}

// make uninstall warns before its first change if the node has records of attachments.
func TestUninstallWarnsOfPods(t *testing.T) {
	const warning = "uninstall.sh: warning: attachments of Podlace on this node: "
	c := newCheckout(t)
	c.mustInstall(t)
	for _, other := range []string{".vfs/bridge-x", "net/.lock", "net/portmap-d8d64386d0c169a6"} {
		c.record(t, other)
	}
	if out := c.mustMake(t, "uninstall", "DRYRUN=1"); strings.Contains(out, warning) {
		t.Errorf("without attachments:\n%s", out)
	}
	c.record(t, "net/bridge-d8d64386d0c169a6")
	c.record(t, "net/bridge-c9662934705251cc")
	if out := c.mustMake(t, "uninstall"); !strings.HasPrefix(out, warning+"2. ") {
		t.Errorf("with two attachments:\n%s", out)
	}
}

// make uninstall removes nothing while a conflist or libcni's cache names podlace-pod.
func TestUninstallKeepsPodlacePod(t *testing.T) {
	c := newCheckout(t)
	c.mustInstall(t)
	const conflist = `{"cniVersion": "1.0.0", "name": "pods", "plugins": [{"type": "podlace-pod"}]}`
	cached := string(encode(t, map[string]any{"kind": "cniCacheV1", "config": []byte(conflist)}))
	before := c.installedFiles(t)
	for path, text := range map[string]string{"etc/cni/net.d/10-pods.conflist": conflist, "var/lib/cni/results/pods-a-eth0": cached,
		"var/lib/rancher/k3s/agent/etc/cni/net.d/10-pods.conflist": conflist} {
		file := filepath.Join(c.into, path)
		kerneltest.Must(t, errors.Join(os.MkdirAll(filepath.Dir(file), 0o755), os.WriteFile(file, []byte(text), 0o600)))
		out, err := c.make("uninstall")
		if err == nil || !strings.Contains(out, "podlace-pod is named in "+file+", so nothing is removed") {
			t.Errorf("%s: %v\n%s", path, err, out)
		}
		kerneltest.Must(t, os.Remove(file))
		if diff := cmp.Diff(before, c.installedFiles(t)); diff != "" {
			t.Errorf("%s: files (-want +got):\n%s", path, diff)
		}
	}
	c.mustMake(t, "uninstall")
}

// record writes a file into the node's records.
func (c installTree) record(t *testing.T, name string) {
	t.Helper()
	path := filepath.Join(c.into, "run/podlace", name)
	err := os.MkdirAll(filepath.Dir(path), 0o755)
	if err == nil {
		err = os.WriteFile(path, nil, 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// sha256sum accepts the receipt as a list of checksums and reports a changed file.
func TestReceiptVerifies(t *testing.T) {
	c := newCheckout(t)
	c.mustInstall(t)
	text := strings.ReplaceAll(mustRead(t, c.into+receiptPath), "  /", "  "+c.into+"/")
	verify := func() (string, error) {
		cmd := exec.Command("sha256sum", "--check", "--strict", "--quiet")
		cmd.Stdin = strings.NewReader(text)
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	if out, err := verify(); err != nil || out != "" {
		t.Errorf("%v\n%s", err, out)
	}
	if err := os.WriteFile(c.into+"/usr/local/bin/podlace", []byte("other"), 0o755); err != nil {
		t.Fatal(err)
	}
	if out, err := verify(); err == nil || !strings.Contains(out, "/usr/local/bin/podlace: FAILED") {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestUninstallNeedsAReceipt(t *testing.T) {
	c := newCheckout(t)
	c.addForeignFiles(t)
	out, err := c.make("uninstall")
	if err == nil || !strings.HasPrefix(out, "uninstall.sh: "+c.into+receiptPath+" is missing: ") {
		t.Errorf("%v\n%s", err, out)
	}
}
