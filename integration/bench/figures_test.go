// SPDX-License-Identifier: Apache-2.0

package main

import (
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/cli/sandbox"
)

func TestFigures(t *testing.T) {
	r := &report{}
	r.addGrowth("more", 1.2, map[string]figure{sideOurs: {Base: 10, Value: 13}, sideReference: {Base: 10, Value: 11}})
	r.addGrowth("without ours", 1.2, map[string]figure{sideReference: {Base: 10, Value: 11}})
	r.addLoad("many", 0.5, map[string]figure{sideOurs: {Value: 10}, sideReference: {Value: 25}})
	r.addLoad("many, without a bar", 0, map[string]figure{sideOurs: {Value: 10}, sideReference: {Value: 25}})
	r.addLoad("ours alone", 0, map[string]figure{sideOurs: {Value: 151}})
	var got []target
	for _, row := range append(r.Growth, r.Loads...) {
		got = append(got, row.target)
	}
	want := []target{{1.3, "<= 1.20", missed}, {}, {0.4, "<= 0.50", met}, {Ratio: 0.4}, {}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestThousands(t *testing.T) {
	for n, want := range map[int]string{0: "0", 999: "999", 1000: "1,000", 123456: "123,456", 1234567: "1,234,567"} {
		if got := thousands(n); got != want {
			t.Errorf("%d: %s", n, got)
		}
	}
}

func TestDrift(t *testing.T) {
	if got := drift([]time.Duration{1e6, 1e6, 9e6, 9e6, 2e6, 2e6, 7e6}); got != (figure{Base: 1, Value: 2}) {
		t.Errorf("got %+v, want the first and the last third", got)
	}
}

func TestWants(t *testing.T) {
	for asked, want := range map[string]string{"all": "chains datapath leases gc", "scale": "leases gc", "gc,chains": "chains gc",
		"leases": "leases"} {
		o, got := options{groups: strings.Split(asked, ",")}, []string{}
		for _, group := range []string{groupChains, groupDatapath, "leases", "gc"} {
			if o.isSelected(group) {
				got = append(got, group)
			}
		}
		if strings.Join(got, " ") != want {
			t.Errorf("%s: %v, want %s", asked, got, want)
		}
	}
}

func TestDistinct(t *testing.T) {
	one := func(name, result string) *chain { return &chain{pod: &sandbox.Pod{Name: name}, result: []byte(result)} }
	a, b := one("a", `{"ips":[{"address":"10.0.0.2/24"}]}`), one("b", `{"ips":[{"address":"10.0.0.3/24"}]}`)
	if err := (&podCrowd{chains: []*chain{a, b}}).distinct(); err != nil {
		t.Error(err)
	}
	if err := (&podCrowd{chains: []*chain{a, b, one("c", string(a.result))}}).distinct(); err == nil {
		t.Error("an address given twice is no error")
	}
}

// testLedger writes the record and lease of one valid attachment into temporary folders.
func testLedger(t *testing.T) *nodeLedger {
	t.Helper()
	l := &nodeLedger{
		chain:  &chain{network: "n", pod: &sandbox.Pod{Path: "/run/netns/a"}},
		record: map[string]any{"format": 1, "state": map[string]any{"bridge": "br"}}, next: netip.MustParseAddr("10.0.0.1"),
		recordFolder: t.TempDir(), leaseFolder: t.TempDir(),
	}
	if err := l.writeAttachment("a", "/run/netns/a", &l.valid); err != nil {
		t.Fatal(err)
	}
	if err := l.noteState(); err != nil {
		t.Fatal(err)
	}
	return l
}

func TestExact(t *testing.T) {
	l := testLedger(t)
	if err := l.checkExact(); err != nil {
		t.Fatal(err)
	}
	if err := l.writeAttachment("b", "/run/netns/b", &l.stale); err != nil {
		t.Fatal(err)
	}
	if err := l.checkExact(); err == nil {
		t.Error("a lease that is left is no error")
	}
	lease := filepath.Join(l.leaseFolder, "10.0.0.3")
	if err := os.Remove(lease); err != nil {
		t.Fatal(err)
	}
	if err := l.checkExact(); err == nil {
		t.Error("a record that is left is no error")
	}
	if err := os.Remove(l.recordPath(l.stale[0])); err != nil {
		t.Fatal(err)
	}
	if err := l.checkExact(); err != nil {
		t.Error(err)
	}
	if err := os.Rename(filepath.Join(l.leaseFolder, "10.0.0.2"), lease); err != nil {
		t.Fatal(err)
	}
	if err := l.checkExact(); err == nil {
		t.Error("a valid lease that is gone is no error")
	}
}
