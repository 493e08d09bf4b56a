// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"io/fs"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/harness"
)

const stateDocument = "docs/dev/STATE.md"

// The tables in docs/dev/STATE.md have a row for each file that exists while a pod with a hostPort and limits runs. Words in capitals stand
// for any name.
func TestStateFiles(t *testing.T) {
	d := parse(t, stateDocument)
	var rows []*regexp.Regexp
	for _, row := range d.rowsUnder("Files") {
		rows = append(rows, pathPatterns(row[0])...)
	}
	for _, row := range d.rowsUnder("Locks") {
		rows = append(rows, pathPatterns(row[1])...)
	}
	clearNode(t)
	n, pod := openShipped(t, harness.BinDir(), 8080), newPod(t, "web-3")
	n.removeState(t)
	t.Cleanup(func() { n.removeState(t) })
	n.mustAdd(t, containerID, pod)
	files := 0
	for _, folder := range harness.StateDirs() {
		_ = filepath.WalkDir(folder, func(path string, e fs.DirEntry, err error) error {
			if err != nil || e.IsDir() {
				return nil
			}
			files++
			if !slices.ContainsFunc(rows, func(row *regexp.Regexp) bool { return row.MatchString(path) }) {
				t.Errorf("%s has no row for %s: add it below \"## Files\" or \"## Locks\"", stateDocument, path)
			}
			return nil
		})
	}
	n.del(t, containerID, pod)
	if files < 10 {
		t.Errorf("the pod left %d files, want its records, notes, locks and leases", files)
	}
}

// pathPatterns returns an expression for each path of a table cell.
func pathPatterns(cell string) []*regexp.Regexp {
	var found []*regexp.Regexp
	for _, path := range backquoted(cell) {
		path = strings.Replace(path, "LEASES", "/var/lib/cni/networks/NETWORK", 1)
		if !strings.HasPrefix(path, "/") {
			path = "/run/podlace/" + path
		}
		pattern := strings.Replace(regexp.QuoteMeta(path), "/ADDRESS", "/[0-9a-f.:]+", 1)
		pattern = regexp.MustCompile(`[A-Z][A-Z_]*`).ReplaceAllString(pattern, `[^/]+`)
		found = append(found, regexp.MustCompile("^"+pattern+"$"))
	}
	return found
}
