// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"bytes"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/harness"
)

// sudoPath is the PATH that sudo sets, without the folder of Go.
const sudoPath = "PATH=/usr/sbin:/usr/bin:/sbin:/bin"

// receiptPath is the list of installed files that make install writes.
const receiptPath = "/usr/local/share/podlace/receipt"

// installTree is a source tree with built binaries, and the folder in place of / into which it is installed.
type installTree struct{ dir, into string }

func newCheckout(t *testing.T) installTree {
	t.Helper()
	c := installTree{dir: t.TempDir(), into: t.TempDir()}
	for _, dir := range []string{"conf", "pkg", "plugins", "bin"} {
		if err := os.Mkdir(filepath.Join(c.dir, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, path := range []string{"Makefile", "go.mod", "go.sum", "scripts/install.sh", "scripts/uninstall.sh", "scripts/receipt.sh",
		"scripts/install-check.sh", "scripts/source-hash.sh"} {
		c.write(t, path, readFile(t, path))
	}
	c.write(t, "pkg/source.go", "package pkg\n")
	c.write(t, "conf/conf.go", "package conf\n")
	c.write(t, "conf/10-podlace.conflist", "{}")
	for _, name := range append(slices.Clone(makeVariable(t, "CNI_PLUGINS")), makeVariable(t, "TOOLS")...) {
		program := name
		if name == "podlace-node" || name == "sriov-device-plugin" {
			program = "loopback" // no test starts these two, and copies of 75 MB would take most of the time
		}
		data, err := os.ReadFile(filepath.Join(harness.BinDir(), program))
		if err != nil {
			t.Fatal(err)
		}
		c.write(t, "bin/"+name, string(data))
	}
	cmd := exec.Command("scripts/source-hash.sh")
	cmd.Dir = c.dir
	hash, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	c.write(t, "bin/.source", string(hash))
	return c
}

// makeVariable returns the words of a Makefile variable.
func makeVariable(t testing.TB, variable string) []string {
	t.Helper()
	m := regexp.MustCompile(`(?m)^` + variable + ` *:= *(.*)$`).FindStringSubmatch(readFile(t, "Makefile"))
	if m == nil {
		t.Fatalf("the Makefile has no %s", variable)
	}
	return strings.Fields(m[1])
}

func (c installTree) write(t *testing.T, path, text string) {
	t.Helper()
	path = filepath.Join(c.dir, path)
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
		t.Fatal(err)
	}
}

// runInstall runs make install with the PATH of sudo.
func (c installTree) runInstall() (string, error) { return c.make("install") }

func (c installTree) make(args ...string) (string, error) {
	cmd := exec.Command("make", append(args, "DESTDIR="+c.into)...)
	cmd.Dir, cmd.Env = c.dir, []string{sudoPath}
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func (c installTree) mustInstall(t *testing.T) string {
	t.Helper()
	out, err := c.runInstall()
	if err != nil {
		t.Fatalf("make install: %v\n%s", err, out)
	}
	return out
}

func (c installTree) installedFiles(t *testing.T) (files []string) {
	t.Helper()
	err := filepath.WalkDir(c.into, func(path string, e fs.DirEntry, err error) error {
		if err == nil && !e.IsDir() {
			files = append(files, strings.TrimPrefix(path, c.into))
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

// allInstalled returns the sorted list of files that an installation must contain, with `extra` ones.
func allInstalled(t *testing.T, extra ...string) []string {
	t.Helper()
	for _, name := range makeVariable(t, "CNI_PLUGINS") {
		extra = append(extra, "/opt/cni/bin/"+name)
	}
	for _, name := range makeVariable(t, "TOOLS") {
		extra = append(extra, "/usr/local/bin/"+name)
	}
	extra = append(extra, receiptPath)
	slices.Sort(extra)
	return extra
}

// make install copies the built files even if root's PATH has no Go, and also a second time.
func TestInstallCopiesTheBuild(t *testing.T) {
	c := newCheckout(t)
	for range 2 {
		// A copy of the tree changes all modification times, and administrators may edit conf/. Neither makes the build stale.
		if err := os.Chtimes(filepath.Join(c.dir, "pkg/source.go"), time.Time{}, time.Now().Add(time.Hour)); err != nil {
			t.Fatal(err)
		}
		c.write(t, "conf/10-podlace.conflist", "{ }")
		c.mustInstall(t)
		if diff := cmp.Diff(allInstalled(t), c.installedFiles(t)); diff != "" {
			t.Errorf("make install installs other files than CNI_PLUGINS and TOOLS of the Makefile name (-want +installed):\n%s", diff)
		}
	}
	for _, path := range slices.DeleteFunc(c.installedFiles(t), func(path string) bool { return path == receiptPath }) {
		got, err := os.ReadFile(filepath.Join(c.into, path))
		want, err2 := os.ReadFile(filepath.Join(c.dir, "bin", filepath.Base(path)))
		info, err3 := os.Stat(filepath.Join(c.into, path))
		if err != nil || err2 != nil || err3 != nil || !bytes.Equal(got, want) || info.Mode().Perm() != 0o755 {
			t.Errorf("%s is not bin/%s: %v, %v, %v", path, filepath.Base(path), err, err2, err3)
		}
	}
}

// make install fails with a message of one line, before any change, if binaries are stale or missing or a folder is read-only.
func TestInstallRefuses(t *testing.T) {
	again := ": run 'make build' as a user who has Go in PATH, then install again\n"
	stale := "install: the binaries in bin were built from other sources" + again
	for name, test := range map[string]struct {
		spoil func(*testing.T, *installTree)
		want  string
	}{
		"nothing built":   {func(t *testing.T, c *installTree) { os.RemoveAll(c.dir + "/bin") }, "install: bin/bridge is missing" + again},
		"one missing":     {func(t *testing.T, c *installTree) { os.Remove(c.dir + "/bin/podlace") }, "install: bin/podlace is missing" + again},
		"source changed":  {func(t *testing.T, c *installTree) { c.write(t, "pkg/source.go", "package other\n") }, stale},
		"source added":    {func(t *testing.T, c *installTree) { c.write(t, "plugins/new/main.go", "package main\n") }, stale},
		"build cut short": {func(t *testing.T, c *installTree) { os.Remove(c.dir + "/bin/.source") }, stale},
		"read-only tools": {func(t *testing.T, c *installTree) { readOnly(t, c.into+"/usr") },
			"install: user " + userName(t) + " cannot write to INTO/usr: run 'sudo make install', or choose other folders with DESTDIR, CNI_BIN_DIR and PREFIX\n"},
		"a file in place of a folder": {func(t *testing.T, c *installTree) {
			if err := os.WriteFile(c.into+"/opt", nil, 0o644); err != nil {
				t.Fatal(err)
			}
		}, "install: INTO/opt is not a folder\n"},
	} {
		t.Run(name, func(t *testing.T) {
			c := newCheckout(t)
			if test.spoil != nil {
				test.spoil(t, &c)
			}
			before := c.installedFiles(t)
			out, err := c.runInstall()
			out = strings.ReplaceAll(out, c.into, "INTO")
			if err == nil || !strings.HasPrefix(out, test.want+"make: ") {
				t.Errorf("%v, output:\n%swant:\n%s", err, out, test.want)
			}
			if diff := cmp.Diff(before, c.installedFiles(t)); diff != "" {
				t.Errorf("a refused installation changed files:\n%s", diff)
			}
		})
	}
}

func userName(t *testing.T) string {
	t.Helper()
	out, err := exec.Command("id", "-un").Output()
	if err != nil {
		t.Fatal(err)
	}
	return strings.TrimSpace(string(out))
}

// readOnly mounts a folder so that even root cannot write to it.
func readOnly(t *testing.T, dir string) {
	t.Helper()
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("none", dir, "tmpfs", unix.MS_RDONLY, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(dir, 0) })
}

func TestBuildNamesTheMissingGo(t *testing.T) {
	c := newCheckout(t)
	cmd := exec.Command("make", "build")
	cmd.Dir, cmd.Env = c.dir, []string{sudoPath}
	if _, err := exec.Command("env", "-i", sudoPath, "sh", "-c", "command -v go").Output(); err == nil {
		t.Skip("SKIPPED: Go is in " + sudoPath)
	}
	out, err := cmd.CombinedOutput()
	if err == nil || !strings.HasPrefix(string(out), "build: no go in PATH (/usr/sbin:/usr/bin:/sbin:/bin)") {
		t.Errorf("%v\n%s", err, out)
	}
}

// The installer saves another project's plugin before it replaces it, and a later installation keeps that copy. The commands of the README
// restore the plugin.
func TestInstallKeepsForeignFiles(t *testing.T) {
	c := newCheckout(t)
	dir := filepath.Join(c.into, "opt/cni/bin")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	foreign := func(name, text string) {
		t.Helper()
		os.Remove(filepath.Join(dir, name))
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o751); err != nil {
			t.Fatal(err)
		}
	}
	foreign("bridge", "first")
	foreign("tuning", "not of Podlace")
	foreign("cni", "all in one")
	if err := os.Symlink("cni", filepath.Join(dir, "portmap")); err != nil {
		t.Fatal(err)
	}
	c.mustInstall(t)
	c.mustInstall(t) // the installer keeps no copy of Podlace's own files
	foreign("bridge", "second")
	c.mustInstall(t)
	foreign("bridge", "first") // a copy already exists
	c.mustInstall(t)

	kept := allInstalled(t, "/opt/cni/bin/bridge.before-podlace", "/opt/cni/bin/bridge.before-podlace-2",
		"/opt/cni/bin/portmap.before-podlace",
		"/opt/cni/bin/cni", "/opt/cni/bin/tuning")
	if diff := cmp.Diff(kept, c.installedFiles(t)); diff != "" {
		t.Errorf("files (-want +got):\n%s", diff)
	}
	for name, want := range map[string]string{"bridge.before-podlace": "first", "bridge.before-podlace-2": "second",
		"tuning": "not of Podlace", "cni": "all in one"} {
		info, err := os.Stat(filepath.Join(dir, name))
		if got, err2 := os.ReadFile(filepath.Join(dir, name)); err != nil || err2 != nil || string(got) != want || info.Mode().Perm() != 0o751 {
			t.Errorf("%s: %.20q, %v, %v, %v", name, got, info, err, err2)
		}
	}
	if to, err := os.Readlink(filepath.Join(dir, "portmap.before-podlace")); err != nil || to != "cni" {
		t.Errorf("the copy of a link is %q, %v", to, err)
	}
	foreign("bandwidth", "of a package that was updated later")
	c.removeAsDocumented(t)
	want := []string{"/opt/cni/bin/bandwidth", "/opt/cni/bin/bridge", "/opt/cni/bin/bridge.before-podlace", "/opt/cni/bin/cni",
		"/opt/cni/bin/portmap",
		"/opt/cni/bin/tuning"}
	if diff := cmp.Diff(want, c.installedFiles(t)); diff != "" {
		t.Errorf("files after the removal (-want +got):\n%s", diff)
	}
	if got, err := os.ReadFile(filepath.Join(dir, "bridge")); string(got) != "second" {
		t.Errorf("bridge: %.20q, %v", got, err)
	}
}

// removeAsDocumented runs the documented commands for removal, with a folder in place of /.
func (c installTree) removeAsDocumented(t *testing.T) {
	t.Helper()
	var text strings.Builder
	for _, b := range parse(t, moving).blocksOf("sh") {
		if b.heading == "Going back to the reference plugins" && !strings.Contains(b.text, "podlace rollback") {
			text.WriteString(b.text)
		}
	}
	script := inFolder(strings.ReplaceAll(text.String(), "sudo ", ""), c.into)
	cmd := exec.Command("sh", "-eu", "-c", script)
	cmd.Env = []string{sudoPath}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s\n%s", err, script, out)
	}
}

// TestReadmeCountsTheBinaries checks the numbers of programs for the runtime and of tools in README.md.
func TestReadmeCountsTheBinaries(t *testing.T) {
	words := []string{"zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"}
	plugins, tools := len(makeVariable(t, "CNI_PLUGINS")), len(makeVariable(t, "TOOLS"))
	for _, want := range []string{words[plugins] + " programs into\n`/opt/cni/bin`", words[tools] + " tools into `/usr/local/bin`"} {
		if text := strings.ReplaceAll(readFile(t, "README.md"), "\n", " "); !strings.Contains(text, strings.ReplaceAll(want, "\n", " ")) {
			t.Errorf("README.md lacks %q, because CNI_PLUGINS and TOOLS of the Makefile have %d and %d names: write it below \"## Install on a node\"",
				want, plugins, tools)
		}
	}
	for _, name := range makeVariable(t, "TOOLS") {
		if !strings.Contains(readFile(t, "README.md"), "`"+name+"`") {
			t.Errorf("README.md does not name %s, a tool of the Makefile: write `%s` below \"## Install on a node\"", name, name)
		}
	}
}
