// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/containernetworking/cni/pkg/invoke"
	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/conf"
	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/pkg/nft"
)

const (
	architecture     = "docs/dev/ARCHITECTURE.md"
	nftablesDocument = "docs/dev/NFTABLES.md"
	decisions        = "docs/dev/DECISIONS.md"
)

// TestListings compares the named listings in the documents with the output of the programs. A named listing is a code block of the
// language "text" with a name, which must occur in exactly one document.
func TestListings(t *testing.T) {
	got := verbChanges(t)
	shown := regexp.MustCompile(`nftables v\d+(\.\d+)*`).FindString(readFile(t, nftablesDocument))
	if *update || hasNFT(t, shown) {
		got[nft.HostportTable] = hostportTable(t)
	}
	for name, text := range got {
		in, blocks := namedListings(t, name)
		switch {
		case len(blocks) != 1:
			t.Errorf("the documents have %d listings called %s, want 1: open one code block with \"```text %s\" and run: %s", len(blocks), name,
				name, updateCommand("TestListings"))
		case *update:
			rewrite(t, in, blocks[0], text)
		case normalisedListing(name, blocks[0].text) != normalisedListing(name, text):
			t.Errorf("%s: the programs print something else than the listing %s; run: %s\n(-document +program)\n%s", in.at(blocks[0]), name,
				updateCommand("TestListings"), cmp.Diff(blocks[0].text, text))
		}
	}
}

// namedListings returns all listings with the given name, and the last document that contains one of these listings.
func namedListings(t *testing.T, name string) (in markdownDocument, blocks []codeBlock) {
	t.Helper()
	for _, d := range documents(t) {
		if found := d.blocksOf("text " + name); len(found) > 0 {
			in, blocks = d, append(blocks, found...)
		}
	}
	return in, blocks
}

// normalisedListing normalises white space. For nftables tables and for lists of deleted leases, normalisedListing also sorts the lines,
// because their order varies.
func normalisedListing(name, text string) string {
	var lines []string
	for line := range strings.Lines(text) {
		if words := strings.Join(strings.Fields(line), " "); words != "" {
			lines = append(lines, words)
		}
	}
	if strings.HasPrefix(name, "podlace_") || name == "del" {
		slices.Sort(lines)
	}
	return strings.Join(lines, "\n")
}

// hasNFT reports whether the installed nft has the version that printed the document's listing. Other versions of nft print the same rule
// in another form.
func hasNFT(t *testing.T, version string) bool {
	t.Helper()
	out, err := exec.Command("nft", "--version").Output()
	if err == nil && version != "" && strings.Contains(string(out), strings.TrimPrefix(version, "nftables ")+" ") {
		return true
	}
	if err != nil && os.Getenv("KERNELTEST") == "require" {
		t.Error("nft is not installed")
	}
	fmt.Printf("SKIP the nftables listings of %s: want %q, have %q\n", nftablesDocument, version, out)
	return false
}

func rewrite(t *testing.T, d markdownDocument, b codeBlock, text string) {
	t.Helper()
	lines := strings.SplitAfter(readFile(t, d.path), "\n")
	end := b.line + strings.Count(b.text, "\n")
	lines = slices.Concat(lines[:b.line], []string{text}, lines[end:])
	if err := os.WriteFile(filepath.Join(treeRoot, d.path), []byte(strings.Join(lines, "")), 0o644); err != nil {
		t.Fatal(err)
	}
}

// The type changeTracer starts plugins with an environment variable. The variable causes each plugin to record its changes.
type changeTracer struct {
	*invoke.DefaultExec
	dir   string
	calls []string // names of the plugins, in order of their calls
}

// ExecPlugin implements the interface Exec of libcni.
func (x *changeTracer) ExecPlugin(ctx context.Context, path string, stdin []byte, environ []string) ([]byte, error) {
	x.calls = append(x.calls, filepath.Base(path))
	return x.DefaultExec.ExecPlugin(ctx, path, stdin, append(environ, "PODLACE_FAULT_TRACE="+x.file(len(x.calls)-1)))
}

func (x *changeTracer) file(call int) string { return filepath.Join(x.dir, fmt.Sprint(call)) }

// takeChanges returns the changes that plugins recorded since the last call of takeChanges.
func (x *changeTracer) takeChanges(t *testing.T) string {
	t.Helper()
	var out strings.Builder
	for i, plugin := range x.calls {
		fmt.Fprintln(&out, plugin)
		data, err := os.ReadFile(x.file(i))
		if errors.Is(err, fs.ErrNotExist) {
			data = []byte("- nothing\n")
		} else if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(data)) {
			if _, change, _ := strings.Cut(line, " "); !strings.Contains(change, "fq_codel") { // depends on the kernel
				out.WriteString("  " + change)
			}
		}
		_ = os.Remove(x.file(i)) // the plugin changed nothing
	}
	x.calls = nil
	return out.String()
}

// openShipped opens the default configuration 10-podlace.conflist.
func openShipped(t *testing.T, bin string, hostPort int) testNetwork {
	t.Helper()
	data, err := conf.Conflist(conf.Default)
	if err != nil {
		t.Fatal(err)
	}
	caps := wantedCapabilities()
	caps["portMappings"] = []map[string]any{{"hostPort": hostPort, "containerPort": 80, "protocol": "tcp"}}
	return openNetwork(t, string(data), bin, caps)
}

// verbChanges returns the changes of ADD and DEL of a node's second pod.
func verbChanges(t *testing.T) map[string]string {
	t.Helper()
	clearNode(t)
	bin := harness.FaultDir()
	x := &changeTracer{DefaultExec: &invoke.DefaultExec{RawExec: &invoke.RawExec{Stderr: os.Stderr}}, dir: t.TempDir()}
	first, second := openShipped(t, bin, 8080).withExec(bin, x), openShipped(t, bin, 8081).withExec(bin, x)
	first.removeState(t)
	t.Cleanup(func() { first.removeState(t) })
	pod, next := newPod(t, podName), newPod(t, "web-1")
	got := map[string]string{}
	first.mustAdd(t, containerID, pod)
	x.takeChanges(t)
	second.mustAdd(t, "other", next)
	got["add-next"] = x.takeChanges(t)
	second.del(t, "other", next)
	got["del"] = x.takeChanges(t)
	first.del(t, containerID, pod)
	return got
}

// clearNode removes the state that all pods share, so that the next ADD creates this state again.
func clearNode(t *testing.T) {
	t.Helper()
	for _, table := range []string{"podlace_masquerade", "podlace_hostport"} {
		_ = exec.Command("nft", "delete", "table", "inet", table).Run() // the table may not exist
	}
	if err := os.RemoveAll("/run/podlace"); err != nil {
		t.Fatal(err)
	}
	for _, file := range []string{"ipv4/ip_forward", "ipv6/conf/all/forwarding"} {
		if err := os.WriteFile(filepath.Join("/proc/sys/net", file), []byte("0"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
}

// hostportTable returns the table podlace_hostport of a node with one pod.
func hostportTable(t *testing.T) string {
	t.Helper()
	clearNode(t)
	n, pod := openShipped(t, harness.BinDir(), 8080), newPod(t, "web-2")
	n.removeState(t)
	n.mustAdd(t, containerID, pod)
	out, err := exec.Command("nft", "list", "table", "inet", nft.HostportTable).CombinedOutput()
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	n.del(t, containerID, pod)
	n.removeState(t)
	return ipv4Part(strings.ReplaceAll(string(out), "\t", "    "))
}

// ipv4Part returns a table without the sets, chains and rules of IPv6 and of port ranges, which look like the others, and without the types
// of sets and empty sets.
func ipv4Part(table string) string {
	table = strings.TrimSuffix(table, "}\n")
	dropped := regexp.MustCompile(`(?m)^( {8}type [^;\n]*| {8}flags .*|.*\bip(v6|6)\b.*|.*ranges[46].*)\n`)
	var kept []string
	for _, block := range strings.Split(table, "\n\n") {
		opening := regexp.MustCompile(`(set|map|chain) (\S+) \{\n`).FindStringSubmatch(block)
		empty := opening != nil && opening[1] != "chain" && !strings.Contains(block, "elements")
		if opening != nil && (empty || regexp.MustCompile(`6(-[0-9a-f]+)?$`).MatchString(opening[2])) {
			continue
		}
		kept = append(kept, strings.TrimRight(dropped.ReplaceAllString(block, ""), "\n"))
	}
	return strings.Join(kept, "\n\n") + "\n}\n"
}

// TestTables checks that docs/dev/NFTABLES.md has a row for each of Podlace's tables, and for no other.
func TestTables(t *testing.T) {
	var listed, want []string
	for _, row := range parse(t, nftablesDocument).rowsUnder("nftables tables and limits") {
		listed = append(listed, backquoted(row[0])...)
	}
	for _, table := range nft.Tables() {
		want = append(want, table.String())
	}
	slices.Sort(listed)
	slices.Sort(want)
	if diff := cmp.Diff(want, listed); diff != "" {
		t.Errorf("%s: correct the first table (-pkg/nft +document)\n%s", nftablesDocument, diff)
	}
}

// TestCodesAreListed checks that the table of error codes in docs/dev/ARCHITECTURE.md contains exactly the codes of the source.
func TestCodesAreListed(t *testing.T) {
	listed := map[string]bool{}
	for _, row := range parse(t, architecture).rowsUnder("Error codes") {
		listed[row[0]] = true
	}
	for name, value := range allCodes(t) {
		if !listed[value] {
			t.Errorf("%s lacks code %s (%s): add the row \"| %s | MEANING |\" below \"## Error codes\"", architecture, value, name, value)
		}
		delete(listed, value)
	}
	for value := range listed {
		t.Errorf("%s: pkg/plugin has no code %s: remove its row below \"## Error codes\"", architecture, value)
	}
}

// TestPicture checks that the picture of the packages contains every package. In the picture, each package must be above the packages that
// it imports.
func TestPicture(t *testing.T) {
	level := map[string]int{}
	for _, b := range parse(t, architecture).blocksOf("text packages") {
		for n, line := range strings.Split(b.text, "\n") {
			for _, name := range regexp.MustCompile(`(plugins|pkg|conf)(/[a-z0-9*-]+)*`).FindAllString(line, -1) {
				level[name] = n
			}
		}
	}
	for name, imported := range importsOf(t) {
		at, ok := level[pictureName(name)]
		if !ok {
			t.Errorf("%s: the picture of the packages lacks %s: write %s into the code block \"```text packages\", above the packages that it imports",
				architecture, name, pictureName(name))
			continue
		}
		for _, i := range imported {
			if below, ok := level[pictureName(i)]; ok && below <= at {
				t.Errorf("%s imports %s, which the picture shows no lower: remove the import, or move %s up in \"```text packages\" of %s", name, i,
					pictureName(name), architecture)
			}
		}
	}
}

// pictureName returns the name of a package in the picture. In the picture, the name plugins stands for all folders below plugins/.
func pictureName(name string) string {
	if strings.HasPrefix(name, "plugins/") && name != "plugins/podlace" {
		return "plugins/*"
	}
	return name
}

// importsOf returns the imports of each package of the module, without tests and without integration/.
func importsOf(t *testing.T) map[string][]string {
	t.Helper()
	cmd := exec.Command("go", "list", "-json=ImportPath,Imports", "./pkg/...", "./plugins/...", "./conf")
	cmd.Dir = treeRoot
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	const module = "github.com/podlace/podlace/"
	found := map[string][]string{}
	for d := json.NewDecoder(strings.NewReader(string(out))); d.More(); {
		var p struct {
			ImportPath string
			Imports    []string
		}
		if err := d.Decode(&p); err != nil {
			t.Fatal(err)
		}
		var own []string
		for _, i := range p.Imports {
			if name, ok := strings.CutPrefix(i, module); ok {
				own = append(own, name)
			}
		}
		found[strings.TrimPrefix(p.ImportPath, module)] = own
	}
	return found
}

// TestWhere checks that each package and each file in the table "Where do I change X" of docs/dev/ARCHITECTURE.md exists.
func TestWhere(t *testing.T) {
	rows := parse(t, architecture).rowsUnder("Where do I change X")
	if len(rows) == 0 {
		t.Fatalf("%s: no table", architecture)
	}
	for _, row := range rows {
		if len(row) != 3 || len(backquoted(row[1])) == 0 || len(backquoted(row[2])) == 0 {
			t.Fatalf("%s: the row %q lacks a cell: write \"| TASK | `FILE` | `TEST FILE` |\" below \"## Where do I change X\"", architecture, row)
		}
		for _, path := range append(backquoted(row[1]), backquoted(row[2])...) {
			if _, err := os.Stat(filepath.Join(treeRoot, path)); err != nil && strings.Contains(path, "/") {
				t.Errorf("%s: %s does not exist: correct the path in the row %q of \"## Where do I change X\"", architecture, path, row[0])
			}
		}
	}
}

// TestDecisions checks that each record in docs/dev/DECISIONS.md is a heading "### NUMBER. TITLE" and at most 8 lines, in ascending order.
func TestDecisions(t *testing.T) {
	records := strings.Split(readFile(t, decisions), "\n### ")
	last := 0
	for _, record := range records[1:] {
		record, _, _ = strings.Cut(record, "\n## ")
		lines := strings.Split(strings.TrimSpace(record), "\n")
		number, _, _ := strings.Cut(lines[0], ". ")
		n, err := strconv.Atoi(number)
		if err != nil || n <= last {
			t.Errorf("%s: %q: begin the heading with \"### %d. \", or a higher number", decisions, lines[0], last+1)
		}
		last = n
		if text := len(lines) - 1; text == 0 || text > 8 {
			t.Errorf("%s: %q has %d lines below its heading, want 1 to 8", decisions, lines[0], text)
		}
	}
	if last == 0 {
		t.Errorf("%s has no decision: restore them", decisions)
	}
}
