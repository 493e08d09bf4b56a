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

// TestCommands runs the code blocks of the language sh in the documents. The commands install files into an empty folder in place of /.
// TestCommands checks that each make target in these code blocks exists, but runs only the targets that install files. A command that needs
// a cluster or another machine must be in a code block of a language other than sh.
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

// makeTargets returns the names of all targets of the Makefile.
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

// runCommands runs a code block in one shell. The current folder is the top folder of the tree.
func runCommands(t *testing.T, text, folder string) {
	t.Helper()
	for _, dir := range []string{"/etc/cni/net.d", "/opt/cni/bin", "/usr/local/bin"} {
		if err := os.MkdirAll(filepath.Join(folder, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	// Commands may only name the following folders, because the test would change the machine's own files in other folders.
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

// runnableLine translates a command of a document into a command that the test can run.
func runnableLine(line, folder string) string {
	switch {
	case strings.HasPrefix(line, "make install"):
		bin, err := filepath.Abs(harness.BinDir())
		if err != nil {
			panic(err)
		}
		// The variable BIN contains the folder of binaries that are already built.
		return `make install VERSION="$(podlace version | sed -n 's/^podlace //p')" BIN=` + bin + " DESTDIR=" + folder + strings.TrimPrefix(line,
			"make install")
	case strings.HasPrefix(line, "make "):
		return ""
	case strings.HasPrefix(line, "podlace gc"), strings.HasPrefix(line, "podlace ls --network"):
		// With the flag --help, a command checks only the syntax of its flags. Other tests run the same commands without --help.
		return strings.TrimSpace(line) + " --help\n"
	case strings.HasPrefix(line, "podlace rollback"):
		return strings.TrimSpace(line) + " --conf-dir " + folder + "/etc/cni/net.d\n"
	}
	return regexp.MustCompile(`(^|\s)(/etc/|/opt/|/usr/local/)`).ReplaceAllString(line, "${1}"+folder+"${2}")
}
