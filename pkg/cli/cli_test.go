// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/integration/pcitest"
)

func TestMain(m *testing.M) {
	if os.Getenv(inSandbox) != "" {
		kerneltest.Main(m)
	}
	os.Exit(m.Run())
}

func run(args ...string) (status int, stdout, stderr string) {
	var out, errs bytes.Buffer
	status = Run(args, &out, &errs)
	return status, out.String(), errs.String()
}

func TestVersion(t *testing.T) {
	status, stdout, _ := run("version")
	if status != 0 || !strings.Contains(stdout, runtime.Version()) || !strings.Contains(stdout, "kernel  "+kernelRelease()) {
		t.Errorf("status %d:\n%s", status, stdout)
	}
	status, stdout, _ = run("version", "-o", "json")
	var got build
	if err := json.Unmarshal([]byte(stdout), &got); err != nil || status != 0 {
		t.Fatalf("status %d, %v:\n%s", status, err, stdout)
	}
	if got != thisBuild() || got.Commit == "" || got.Version == "" {
		t.Errorf("got %+v", got)
	}
}

func TestRefusedCommands(t *testing.T) {
	dir := pcitest.WriteFiles(t, map[string]string{"bad.conflist": `{"name": "a", "plugins": []}`})
	bad := filepath.Join(dir, "bad.conflist")
	canary, noFolder := bad+": ", "there is no folder "+bad+" with plugins: name one with --plugins\n"
	if os.Geteuid() != 0 {
		canary, noFolder = "run it as root", "run it as root"
	}
	for name, test := range map[string]struct {
		args []string
		want string
	}{
		"unknown command":   {[]string{"dance"}, "podlace: unknown command \"dance\" for \"podlace\": 'podlace --help' lists all\n"},
		"mistyped command":  {[]string{"lss"}, "podlace: unknown command \"lss\" for \"podlace\": did you mean 'ls'?\n"},
		"two near commands": {[]string{"l"}, "did you mean 'limits' or 'ls'?\n"},
		"below sriov":       {[]string{"sriov", "rest"}, "podlace: unknown command \"rest\" for \"podlace sriov\": did you mean 'reset'?\n"},
		"unknown output":    {[]string{"version", "-o", "xml"}, `--output" flag: want table`},
		"no plugins":        {[]string{"trace", "--plugins", dir}, "no executable bandwidth, bridge, host-local, portmap"},
		"no such conflist":  {[]string{"trace", filepath.Join(dir, "none.conflist")}, "no such file"},
		"trace, no plugin":  {[]string{"trace", bad}, bad + ": "},
		"canary, no plugin": {[]string{"canary", "--conflist", bad, "--plugins", dir}, canary},
		"canary, no folder": {[]string{"canary", "--plugins", bad}, noFolder},
		"output of gc":      {[]string{"gc", "-o", "xml"}, `--output" flag: want table`},
		"output of ls":      {[]string{"ls", "-o", "xml"}, `--output" flag: want table`},
		"surplus argument":  {[]string{"ls", "shop/web"}, "podlace: podlace ls takes no argument: \"shop/web\"\n"},
		"missing argument":  {[]string{"sriov", "reset"}, "podlace: usage: podlace sriov reset DEVICE [flags]\n"},
		"help of nothing":   {[]string{"help", "sriov", "rest"}, "for \"podlace sriov\": did you mean 'reset'?\n"},
		"completion of it":  {[]string{"completion", "tcsh"}, "unknown command \"tcsh\" for \"podlace completion\""},
		"no number":         {[]string{"trace", "--hostport", "x"}, "for \"--hostport\" flag: want a number\n"},
		"no boolean":        {[]string{"rollback", "--yes=maybe"}, "for \"--yes\" flag: want true or false\n"},
		"no PCI address":    {[]string{"sriov", "reset", "nope"}, "podlace: PCI address \"nope\": want"},
		"unset variable":    {[]string{"gc", "--network", "", "--yes"}, "podlace: --network \"\": want a value\n"},
		"unset address":     {[]string{"ls", "--ip="}, "podlace: --ip \"\": want a value\n"},
	} {
		status, stdout, stderr := run(test.args...)
		if status != exitFailed || stdout != "" || !strings.Contains(stderr, test.want) {
			t.Errorf("%s: status %d, stderr %q", name, status, stderr)
		}
	}
}

// TestLostOutput: a command whose output cannot be written fails and says why.
func TestLostOutput(t *testing.T) {
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer full.Close()
	for _, args := range [][]string{{"--help"}, {"help", "gc"}, {"completion", "bash"}, {"explain", "mtu"}, {"version"}, {"schema"}} {
		var stderr bytes.Buffer
		if status := Run(args, full, &stderr); status != exitFailed || strings.Count(stderr.String(), "no space left on device") != 1 {
			t.Errorf("%s: status %d, %q", args, status, stderr.String())
		}
	}
}

// TestNeedsRoot: if a file is readable only for root, a command fails instead of printing an empty list.
func TestNeedsRoot(t *testing.T) {
	if os.Geteuid() == 0 {
		t.Skip("SKIPPED: it needs an ordinary user")
	}
	for _, name := range rootCommands() {
		if status, stdout, stderr := run(name); status != exitFailed || stdout != "" || !strings.Contains(stderr, "run it as root") {
			t.Errorf("%s: status %d, %q, %q", name, status, stdout, stderr)
		}
	}
}

// pluginsDir returns a folder with the given files and all plugins of the shipped conflist.
func pluginsDir(t *testing.T, files ...string) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range append(files, "bridge", "host-local", "loopback", "portmap", "bandwidth") {
		if err := os.WriteFile(filepath.Join(dir, name), nil, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

// TestFindsInstalledPlugins: podlace trace without --plugins uses the first folder with all plugins. If there is none, the error has each
// folder with a missing plugin.
func TestFindsInstalledPlugins(t *testing.T) {
	full, tools := pluginsDir(t), t.TempDir()
	for name, dirs := range map[string][]string{"beside podlace": {full, tools}, "installed": {tools, full}} {
		if got, err := pluginFolder(dirs, []string{"bridge", "loopback"}); got != full || err != nil {
			t.Errorf("%s: %s, %v", name, got, err)
		}
	}
	_, err := pluginFolder([]string{tools, full}, []string{"dance"})
	if err == nil || err.Error() != "plugin folder "+tools+": no executable dance\nplugin folder "+full+": no executable dance" {
		t.Errorf("nowhere: %v", err)
	}
}
