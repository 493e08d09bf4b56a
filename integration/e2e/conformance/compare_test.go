// SPDX-License-Identifier: Apache-2.0

package main

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestReadList(t *testing.T) {
	const good = "# comment\n\niptables,nftables\tboth\nnftables\tone with spaces [Conformance]\n"
	for _, test := range []struct {
		name, text, mode string
		want             []string
		wrong            string
	}{
		{name: "nftables", text: good, mode: "nftables", want: []string{"both", "one with spaces [Conformance]"}},
		{name: "iptables", text: good, mode: "iptables", want: []string{"both"}},
		{name: "no tab", text: "nftables spec\n", mode: "nftables", wrong: "line 1: want the modes"},
		{name: "no name", text: "nftables\t\n", mode: "nftables", wrong: "line 1: want the modes"},
		{name: "space after the name", text: "nftables\tspec \n", mode: "nftables", wrong: "line 1: want the modes"},
		{name: "unknown mode", text: good + "ipvs\tspec\n", mode: "nftables", wrong: `line 5: "ipvs" is no mode`},
		{name: "twice", text: good + "iptables\tboth\n", mode: "nftables", wrong: `line 5: "both" is there twice`},
		{name: "empty", text: "# nothing\n", mode: "nftables", wrong: "has none for kube-proxy in mode nftables"},
		{name: "none for the mode", text: "nftables\tspec\n", mode: "iptables", wrong: "has none for kube-proxy in mode iptables"},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := readList(strings.NewReader(test.text), test.mode)
			if test.wrong != "" {
				if err == nil || !strings.Contains(err.Error(), test.wrong) {
					t.Fatalf("error %v, want one with %q", err, test.wrong)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// TestSameSpec: a spec is the same if its labels change their order or get a space.
func TestSameSpec(t *testing.T) {
	const listed = "[sig-network] Services should serve [Conformance] [Serial]"
	got := suiteReport{Results: map[string]specResult{
		"[sig-network]  Services should serve  [Serial] [Conformance]": {State: passed},
		"[sig-network] Services should serve more [Conformance]":       {State: passed}}}
	if lines := failuresOf([]string{listed}, got); len(lines) > 0 {
		t.Errorf("%q", lines)
	}
	if names := unlistedSpecs([]string{listed}, got, passed); len(names) != 1 || !strings.Contains(names[0], "serve more") {
		t.Errorf("%q", names)
	}
}
