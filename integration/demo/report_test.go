// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/cli/chain"
	"github.com/podlace/podlace/pkg/cli/reconcile"
)

func report(rows ...Row) Report {
	r := Report{Plugins: "/x", Kernel: "6.1", Seconds: 9.81}
	for _, row := range rows {
		r.add(row)
	}
	return r
}

func TestReportCounts(t *testing.T) {
	r := report(Row{Result: OK}, Row{Result: Info}, Row{Result: Skip}, Row{Result: OK})
	if r.OK != 2 || r.Skipped != 1 || r.Missed != 0 || r.Failed() {
		t.Errorf("got %+v", r)
	}
	if r = report(Row{Result: Miss}); !r.Failed() {
		t.Error("a miss is no failure")
	}
}

func TestSummaryNamesWhatWasSkipped(t *testing.T) {
	var b strings.Builder
	PrintSummary(&b, report(
		Row{Step: "one", Result: OK},
		Row{Step: "  two", Result: Skip, Note: "no ifb"},
		Row{Step: "three", Result: Skip, Note: "no IPv6"},
		Row{Step: "four", Result: Skip, Note: "no ifb"},
	))
	want := "\n1 ok, 0 missed, 3 skipped in 9.8 s (kernel 6.1)\nskipped: two; four (no ifb)\nskipped: three (no IPv6)\n"
	if diff := cmp.Diff(want, b.String()); diff != "" {
		t.Error(diff)
	}
}

func TestTable(t *testing.T) {
	var b strings.Builder
	table, err := NewTable(&b, shipped(t))
	if err != nil {
		t.Fatal(err)
	}
	table.Row(Row{Step: "leftovers", Wanted: "0", Measured: "1", Result: Miss, Note: "a\nfile " + strings.Repeat("x", 200)})
	lines := strings.Split(strings.TrimSuffix(b.String(), "\n"), "\n")
	if len(lines) != 2 {
		t.Fatalf("got %q", lines)
	}
	for _, word := range []string{"wanted", "measured", "result"} {
		at := strings.Index(lines[0], word)
		if at < 1 || lines[1][at] == ' ' || lines[1][at-1] != ' ' {
			t.Errorf("column %s does not line up:\n%s", word, b.String())
		}
	}
	if !strings.HasSuffix(lines[1], "x...") || !strings.Contains(lines[1], "MISS    a file x") {
		t.Errorf("row %q", lines[1])
	}
}

// The rows in the picture are steps of the script.
func TestPictureShowsTheScript(t *testing.T) {
	const redraw = "run 'make picture ARGS=stills'"
	picture, err := os.ReadFile(filepath.Join("..", "..", "docs", "demo.svg"))
	if err != nil {
		t.Fatal(err)
	}
	c, err := newRunner("", "", shipped(t))
	if err != nil {
		t.Fatal(err)
	}
	plain := regexp.MustCompile(`<[^>]*>`).ReplaceAllString(strings.ReplaceAll(string(picture), "\u00a0", " "), "")
	_, rows, _ := strings.Cut(plain, "\nstep ")
	_, rows, _ = strings.Cut(rows, "\n")
	rows = regexp.MustCompile(`\n\d+ ok,`).Split(rows, 2)[0]
	if strings.Count(rows, "\n") < 8 {
		t.Fatalf("docs/demo.svg shows no rows of the demo: %s\n%s", redraw, plain)
	}
	for line := range strings.Lines(rows) {
		if !slices.ContainsFunc(script(pluginTypes(c.List)), func(s step) bool {
			return strings.HasPrefix(line, s.name+"  ")
		}) {
			t.Errorf("docs/demo.svg: the demo has no step %q: %s", line, redraw)
		}
	}
}

func TestComparison(t *testing.T) {
	var b strings.Builder
	PrintComparison(&b,
		report(Row{Step: "ADD", Wanted: "fast", Measured: "5 ms", Result: OK}, Row{Step: "DEL", Measured: "7 ms", Result: Info}),
		report(Row{Step: "ADD", Wanted: "fast", Measured: "150 ms", Result: Miss, Note: "slow"}))
	want := `step  wanted  podlace      reference
ADD   fast    5 ms     ok  150 ms     MISS
DEL           7 ms         -

podlace: /x
1 ok, 0 missed, 0 skipped in 9.8 s (kernel 6.1)

reference: /x
  ADD: slow
0 ok, 1 missed, 0 skipped in 9.8 s (kernel 6.1)
`
	if diff := cmp.Diff(want, b.String()); diff != "" {
		t.Error(diff)
	}
}

func TestNotPromised(t *testing.T) {
	for name, test := range map[string]struct {
		conflist string
		want     map[string]string
	}{
		"all": {string(shipped(t)), map[string]string{}},
		"single stack": {
			`{"cniVersion":"1.0.0","name":"x","plugins":[{"type":"bridge","isDefaultGateway":true,"ipMasq":true,"ipam":
			{"type":"host-local","subnet":"10.1.0.0/16","routes":[{"dst":"::/0"}]}},{"type":"portmap","capabilities":{"portMappings":true}},
			{"type":"bandwidth","capabilities":{"bandwidth":true}}]}`,
			map[string]string{ipv6: "the conflist gives no IPv6 addresses"},
		},
		"layer 2": {
			`{"cniVersion":"1.0.0","name":"x","plugins":[{"type":"bridge"}]}`,
			map[string]string{
				ipv4: "the conflist gives no IPv4 addresses", ipv6: "the conflist gives no IPv6 addresses",
				portmap:   "no plugin of the conflist has the capability portMappings",
				bandwidth: "no plugin of the conflist has the capability bandwidth",
				gateway:   "the conflist has no isGateway", masquerading: "the conflist has no ipMasq",
			},
		},
	} {
		list, err := reconcile.Load("", []byte(test.conflist))
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		if diff := cmp.Diff(test.want, notPromised(chain.New("", "", list, nil))); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
}
