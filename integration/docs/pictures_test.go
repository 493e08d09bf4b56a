// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"crypto/sha256"
	"encoding/xml"
	"fmt"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// Each diagram has the checksum of its source, which scripts/pictures.sh writes into it.
func TestDiagrams(t *testing.T) {
	sources, err := filepath.Glob(filepath.Join(treeRoot, "docs/*.dot"))
	if err != nil || len(sources) == 0 {
		t.Fatal(sources, err)
	}
	for _, source := range sources {
		name := "docs/" + strings.TrimSuffix(filepath.Base(source), ".dot")
		sum := sha256.Sum256([]byte(readFile(t, name+".dot") + readFile(t, "docs/dark.css")))
		if !strings.HasSuffix(readFile(t, name+".svg"), fmt.Sprintf("<!-- %x -->\n", sum[:8])) {
			t.Errorf("%s.svg is older than %s.dot or docs/dark.css: run 'make picture ARGS=diagrams'", name, name)
		}
	}
}

// The commands in stills of a terminal still print what the pictures show. The demo has a test of its own.
func TestStills(t *testing.T) {
	const redraw = "run 'make picture ARGS=stills'"
	doctor := sourcesIn(t, "pkg/cli/doctor")
	findings := regexp.MustCompile(`(?m)^(?:error \S+: |  consequence +|  command +)(.*?)(?: \[[a-z-]+\])?$`).FindAllStringSubmatch(stillText(t, "docs/doctor.svg"), -1)
	if len(findings) < 4 {
		t.Errorf("docs/doctor.svg shows no findings: %s", redraw)
	}
	for _, m := range findings {
		if !strings.Contains(doctor, `"`+m[1]+`"`) {
			t.Errorf("docs/doctor.svg: the source of doctor has no %q: %s", m[1], redraw)
		}
	}
	_, header, _ := strings.Cut(stillText(t, "docs/top.svg"), "\n")
	header, _, _ = strings.Cut(header, "\n")
	columns := strings.Fields(header)
	if len(columns) < 5 || !strings.Contains(readFile(t, "pkg/cli/top.go"), `"`+strings.Join(columns[4:], `", "`)+`"`) {
		t.Errorf("docs/top.svg: the source of top has no columns %q: %s", columns, redraw)
	}
}

func stillText(t *testing.T, path string) string {
	t.Helper()
	var still struct {
		Lines []struct {
			Text string `xml:",innerxml"`
		} `xml:"text"`
	}
	if err := xml.Unmarshal([]byte(readFile(t, path)), &still); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
	var text strings.Builder
	for _, line := range still.Lines {
		plain := regexp.MustCompile(`<[^>]*>`).ReplaceAllString(line.Text, "")
		text.WriteString(strings.NewReplacer("\u00a0", " ", "&lt;", "<", "&amp;", "&").Replace(plain) + "\n")
	}
	return text.String()
}

func sourcesIn(t *testing.T, folder string) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(treeRoot, folder, "*.go"))
	if err != nil || len(files) == 0 {
		t.Fatal(folder, err)
	}
	var text strings.Builder
	for _, file := range files {
		rel, _ := filepath.Rel(treeRoot, file)
		text.WriteString(readFile(t, rel))
	}
	return text.String()
}
