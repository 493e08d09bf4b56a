// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/harness"
)

// TestCommands runs the documents' code blocks of the language sh, with an empty folder in place of /. All make targets in them must exist,
// but only those that install files run. A command that needs a cluster or another machine must be in a block of another language.
func TestCommands(t *testing.T) {
	targets := makeTargets(t)
	for _, d := range documents(t) {
		if d.path == moving {
			continue // these commands need state to clean up: see TestWhatStays
		}
		for _, b := range d.blocksOf("sh") {
			t.Run(d.at(b), func(t *testing.T) {
				checkTargets(t, b.text, targets)
				runCommands(t, b.text, t.TempDir())
			})
		}
	}
}

func makeTargets(t testing.TB) []string {
	t.Helper()
	var targets []string
	for _, m := range regexp.MustCompile(`(?m)^([a-z-]+):`).FindAllStringSubmatch(readFile(t, "Makefile"), -1) {
		targets = append(targets, m[1])
	}
	return targets
}

func checkTargets(t *testing.T, text string, targets []string) {
	t.Helper()
	for line := range strings.Lines(text) {
		words := strings.Fields(regexp.MustCompile(`[A-Z_]+=('[^']*'|\S*)|#.*`).ReplaceAllString(strings.TrimPrefix(line, "sudo "), ""))
		if len(words) == 0 || words[0] != "make" {
			continue
		}
		for _, w := range words[1:] {
			if !slices.Contains(targets, w) {
				t.Errorf("%q: the Makefile has no target %s: correct the command, or add the target", strings.TrimSpace(line), w)
			}
		}
	}
}

// runCommands runs a code block in one shell, in the top folder of the tree.
func runCommands(t *testing.T, text, folder string) {
	t.Helper()
	for _, dir := range []string{"/etc/cni/net.d", "/opt/cni/bin", "/usr/local/bin"} {
		if err := os.MkdirAll(filepath.Join(folder, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	// Commands may name only these folders. In others, the test would change the machine's own files.
	for _, m := range regexp.MustCompile(`(?m)(?:^|[\s"'=>])/([a-z]+)`).FindAllStringSubmatch(text, -1) {
		if !slices.Contains([]string{"run", "var", "etc", "opt", "usr"}, m[1]) {
			t.Fatalf("the commands must not change /%s:\n%s", m[1], text)
		}
	}
	var script strings.Builder
	for line := range strings.Lines(text) {
		script.WriteString(runnableLine(strings.ReplaceAll(line, "sudo ", ""), folder))
	}
	if script.Len() == 0 {
		return
	}
	cmd := exec.Command("sh", "-eu", "-c", script.String())
	cmd.Dir = treeRoot
	cmd.Env = append(os.Environ(), "PATH="+harness.BinDir()+":"+os.Getenv("PATH"))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s\n%s", err, script.String(), out)
	}
}

// runnableLine translates a command of a document into one that the test can run.
func runnableLine(line, folder string) string {
	switch {
	case strings.HasPrefix(line, "make install"):
		bin, err := filepath.Abs(harness.BinDir())
		if err != nil {
			panic(err)
		}
		// BIN is the folder of binaries that are already built.
		return `make install VERSION="$(podlace version | sed -n 's/^podlace //p')" BIN=` + bin + " DESTDIR=" + folder + strings.TrimPrefix(line,
			"make install")
	case strings.HasPrefix(line, "make "), strings.HasPrefix(line, "systemctl "): // which would change the machine's own units
		return ""
	case strings.HasPrefix(line, "podlace gc"), strings.HasPrefix(line, "podlace ls --network"):
		// With --help, a command only checks its flags. Other tests run the same commands without it.
		return strings.TrimSpace(line) + " --help\n"
	case strings.HasPrefix(line, "podlace rollback"):
		return strings.TrimSpace(line) + " --conf-dir " + folder + "/etc/cni/net.d\n"
	}
	return inFolder(line, folder)
}

// inFolder puts a folder in place of / into the paths of a script.
func inFolder(script, folder string) string {
	return regexp.MustCompile(`(^|[\s=])(/etc/|/opt/|/usr/local/)`).ReplaceAllString(script, "${1}"+folder+"${2}")
}
