// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"os"
	"os/exec"
	"path/filepath"
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

// `make manifest` runs in another folder, where the path of the configuration still means the same file.
func TestMakeManifestPath(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "go"), []byte("#!/bin/sh\nprintf '<%s>' \"$@\"\n"), 0o700); err != nil {
		t.Fatal(err)
	}
	root, err := filepath.Abs(treeRoot)
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]string{"": "", "/a b/~/config.json": "/a b/~/config.json", "config.json": root + "/config.json",
		"a /b.json": root + "/a /b.json", "~/a b.json": "/home/x/a b.json"} {
		cmd := exec.Command("make", "-s", "manifest", "IMAGE=x", "COMPONENTS=sriov k3s", "SRIOV_CONFIG="+path)
		cmd.Dir, cmd.Env = root, append(os.Environ(), "PATH="+dir+":"+os.Getenv("PATH"), "HOME=/home/x", "MAKEFLAGS=", "MAKELEVEL=")
		out, err := cmd.CombinedOutput()
		if err != nil || !strings.HasSuffix(string(out), "<-component><sriov><-component><k3s><-sriov-config><"+want+">") {
			t.Errorf("%s: %v, %s, want %s", path, err, out, want)
		}
	}
}
