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

// Screen readers have a title of each picture.
func TestPictureTitles(t *testing.T) {
	pictures, err := filepath.Glob(filepath.Join(treeRoot, "docs/*.svg"))
	if err != nil || len(pictures) == 0 {
		t.Fatal(pictures, err)
	}
	for _, picture := range pictures {
		name := "docs/" + filepath.Base(picture)
		if !regexp.MustCompile(`<title>[A-Z][^<]* [^<]*</title>`).MatchString(readFile(t, name)) {
			t.Errorf("%s has no title of several words: scripts/pictures.sh and integration/bench/picture.go write it", name)
		}
	}
}

// The numbers in the picture of limits, which no program draws, are those of the last measurement.
func TestLimitsPicture(t *testing.T) {
	page := readFile(t, "docs/dev/PERFORMANCE.md")
	numbers := regexp.MustCompile(`>((?:at least )?[0-9.]+) (?:Mbit|ms), (?:Podlace|reference)<`).FindAllStringSubmatch(readFile(t, "docs/limits.svg"), -1)
	if len(numbers) != 4 {
		t.Fatalf("docs/limits.svg has %d numbers", len(numbers))
	}
	for i, row := range []string{"first second at 20 Mbit/s, into the pod, Mbit", "round trip added by 8 flows at 20 Mbit/s, p95, ms"} {
		if want := "| " + row + " | " + numbers[2*i][1] + " | " + numbers[2*i+1][1] + " |"; !strings.Contains(page, want) {
			t.Errorf("docs/limits.svg has other numbers than docs/dev/PERFORMANCE.md, which has no %q: correct its texts and the widths of its bars", want)
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
		want := m[1]
		if before, _, lists := strings.Cut(want, "lacks "); lists {
			want = before + "lacks " // what is missing follows
		}
		if !strings.Contains(doctor, `"`+want+`"`) {
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
