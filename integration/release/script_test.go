// SPDX-License-Identifier: Apache-2.0

package release

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// scriptFunction runs a function of scripts/release.sh and returns its output.
func scriptFunction(t *testing.T, name string, environment ...string) string {
	t.Helper()
	cmd := exec.Command("bash", "-euo", "pipefail", "-c", `eval "$(sed -n "/^$0() {/,/^}/p" ../../scripts/release.sh)"; $0`, name)
	cmd.Env = append(os.Environ(), environment...)
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v: %s", name, err, out)
	}
	return strings.TrimSuffix(string(out), "\n")
}

// dpkg and rpm order a version with a suffix before the one without only if the suffix begins with a tilde.
func TestPackageVersion(t *testing.T) {
	for version, want := range map[string]string{"v1.2.3": "1.2.3", "v1.2.3-rc.1": "1.2.3~rc.1",
		"v1.2.3-beta.2-4-gabc1234": "1.2.3~beta.2.4.gabc1234",
		"v1.2.3-4-gabc1234":        "1.2.3.4.gabc1234", "abc1234-dirty": "0~abc1234.dirty"} {
		if got := scriptFunction(t, "package_version", "VERSION="+version); got != want {
			t.Errorf("%s: %s, want %s", version, got, want)
		}
	}
}

// The archive's installer installs nothing if an argument is unknown.
func TestInstallerArguments(t *testing.T) {
	dir, into := t.TempDir(), t.TempDir()
	text := scriptFunction(t, "write_installer", "CNI_PLUGINS=bridge", "TOOLS=podlace") + "\n"
	stub := "#!/bin/sh\n[ -n \"$DESTDIR\" ] && echo \"$0\" >>\"$DESTDIR/ran\"\n"
	for name, text := range map[string]string{"install.sh": text, "scripts/install.sh": stub, "scripts/uninstall.sh": stub} {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Setenv("DESTDIR", into)
	for _, argument := range []string{"--help", "--dry-run", "unistall"} {
		out, err := exec.Command(dir+"/install.sh", argument).CombinedOutput()
		if _, ran := os.Stat(into + "/ran"); err == nil || ran == nil || !strings.Contains(string(out), argument) {
			t.Errorf("%s: %v, installed: %v: %s", argument, err, ran == nil, out)
		}
		os.Remove(into + "/ran")
	}
	run(t, "/", dir+"/install.sh")
	run(t, "/", dir+"/install.sh", "uninstall")
	if ran, err := os.ReadFile(into + "/ran"); err != nil || strings.ReplaceAll(string(ran), dir+"/", "") != "scripts/install.sh\nscripts/uninstall.sh\n" {
		t.Errorf("%v: %s", err, ran)
	}
}
