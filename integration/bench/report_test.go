// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"encoding/xml"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestAtMost(t *testing.T) {
	for _, c := range []struct {
		value, base, bar float64
		want             target
	}{
		{2, 10, 0.2, target{0.2, "<= 0.20", met}},
		{3, 10, 0.2, target{0.3, "<= 0.20", missed}},
		{3, 10, 0, target{Ratio: 0.3}},
		{3, 0, 0.2, target{}},
		{0, 10, 0.2, target{}},
	} {
		if diff := cmp.Diff(c.want, compareAtMost(c.value, c.base, c.bar)); diff != "" {
			t.Errorf("atMost(%v, %v, %v) (-want +got):\n%s", c.value, c.base, c.bar, diff)
		}
	}
}

func TestBars(t *testing.T) {
	for _, s := range scenarios() {
		for _, verb := range []string{verbAdd, verbDel} {
			if chainBar(s.name, verb) == 0 {
				t.Errorf("%s %s has no bar", s.name, verb)
			}
		}
		if chainBar(s.name, verbCheck) != 0 {
			t.Errorf("%s CHECK has a bar", s.name)
		}
	}
}

func sampleReport() *report {
	row := chainRow{Chain: podLimits, Verb: verbDel, Sides: map[string]verbTimes{
		sideOurs: {12, 14, 11}, sidePod: {6, 7, 5.5}, sideReference: {100, 120, 90},
	}}
	row.setVerdict(chainBar(podLimits, verbDel))
	row.One = compareAtMost(6, 100, podBar(podLimits, verbDel))
	return &report{
		Kernel: "6.1", CPUs: 2, Load: "0.1", Rounds: 30, Chains: []chainRow{row},
		Processes: []processRow{{Chain: scenarioNftables, Verb: verbAdd, target: target{Bar: "0", Verdict: met},
			Sides: map[string]startedProcesses{
				sideOurs:      {Programs: map[string]int{}},
				sideReference: {Processes: 4, Programs: map[string]int{"nft": 2, "host-local": 1}},
			}}},
		Datapath: []pathRow{{Path: pathPod, Gigabits: map[string]float64{sideOurs: 20, sideBare: 25},
			CPU: map[string]float64{sideOurs: 0.05, sideBare: 0.04}}},
		Growth: []figureRow{{What: "CHECK", Sides: map[string]figure{sideOurs: {Base: 10, Value: 5}, sideReference: {Base: 10, Value: 12}},
			target: target{0.5, "<= 0.60", met}}},
		Loads: []figureRow{{What: "GC", Sides: map[string]figure{sideOurs: {Value: 700}, sideReference: {Note: "has no GC"}},
			target: target{Bar: "<= 0.50", Verdict: met}}},
		Limits: []limitRow{{What: "10 Mbit/s, TCP", target: target{Bar: "95-101", Verdict: met},
			Percent: map[string]map[string]float64{intoPod: {sideOurs: 99.94, sideReference: 100}, outOfPod: {sideOurs: 98.6}}}},
		Skipped: []string{"no strace"}, Failed: []string{},
	}
}

func TestMarkdown(t *testing.T) {
	got := sampleReport().markdown()
	for _, line := range []string{
		"| hostPort, limits | DEL | 6.0 / 7.0, 5.5 | 12.0 / 14.0, 11.0 | 100.0 / 120.0, 90.0 | 0.06 | <= 0.20 | met | 0.12 | <= 0.30 | met |",
		"| full nftables | ADD | - | 0 | 3: host-local 1, nft 2 (4 forks) | 0 | met |",
		"| pod to pod | 20.0, 50 | - | 25.0, 40 | - | - | - |",
		"| CHECK | 10.0, 5.0 | 0.50 | 10.0, 12.0 | 1.20 | <= 0.60 | met |",
		"| GC | 700.0 | has no GC | - | <= 0.50 | met |",
		"| 10 Mbit/s, TCP | 99.9 | 100.0 | 98.6 | - | 95-101 | met |",
		"Skipped: 1\n- no strace\n",
		"Failed: 0\n",
	} {
		if !strings.Contains(got, line) {
			t.Errorf("no line %q in:\n%s", line, got)
		}
	}
}

func TestJSON(t *testing.T) {
	var out strings.Builder
	if err := sampleReport().write(&out, "json"); err != nil {
		t.Fatal(err)
	}
	var got report
	if err := json.Unmarshal([]byte(out.String()), &got); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(sampleReport(), &got,
		cmp.AllowUnexported(report{}, chainRow{}, processRow{}, pathRow{}, figureRow{}, limitRow{})); diff != "" {
		t.Errorf("read back (-want +got):\n%s", diff)
	}
}

// The longest bar has the whole room, others their part of it, and rows of the chain alone have none.
func TestPicture(t *testing.T) {
	r := sampleReport()
	r.Chains = append(r.Chains, chainRow{Chain: scenarioIptables, Verb: verbAdd, Sides: map[string]verbTimes{sideReference: {P50: 1000}}})
	got := r.picture()
	var image struct {
		Bars []struct {
			Class string  `xml:"class,attr"`
			Width float64 `xml:"width,attr"`
		} `xml:"rect"`
		Texts []string `xml:"text"`
	}
	if err := xml.Unmarshal([]byte(got), &image); err != nil {
		t.Fatalf("%v:\n%s", err, got)
	}
	widths := map[string]float64{}
	for _, b := range image.Bars {
		widths[b.Class] = b.Width
	}
	if diff := cmp.Diff(map[string]float64{sidePod: 13.8, sideOurs: 27.6, sideReference: barRoom}, widths); diff != "" {
		t.Errorf("bars (-want +got):\n%s", diff)
	}
	want := []string{"DEL of a pod: hostPort, limits", "6 ms, podlace-pod", "12 ms, chain", "100 ms, reference plugins"}
	if diff := cmp.Diff(want, image.Texts); diff != "" {
		t.Errorf("texts (-want +got):\n%s", diff)
	}
}

func TestFail(t *testing.T) {
	r := newReport(options{rounds: 3})
	r.fail("plain", errors.New("one\n  two"))
	if diff := cmp.Diff([]string{"plain: one two"}, r.Failed); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestParse(t *testing.T) {
	folder := t.TempDir()
	if err := os.WriteFile(filepath.Join(folder, "bridge"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	good := []string{"-plugins", folder, "-reference", folder}
	if _, err := parse(good); err != nil {
		t.Fatal(err)
	}
	for _, more := range [][]string{{"-rounds", "0"}, {"-o", "yaml"}, {"-seconds", "0"}, {"-scale", "0"}, {"-scale", "2"}, {"-group", "none"},
		{"more"}, {"-plugins", t.TempDir()}, {"-picture", "p.svg", "-group", groupScale}} {
		if _, err := parse(append(slices.Clone(good), more...)); err == nil {
			t.Errorf("%v is accepted", more)
		}
	}
}
