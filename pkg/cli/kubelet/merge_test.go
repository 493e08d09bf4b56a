// SPDX-License-Identifier: Apache-2.0

package kubelet

import (
	"fmt"
	"strings"
	"testing"
)

// formatHints formats hints as in "0 01 1* any": a digit is a NUMA node, * marks a preferred hint, and "any" is the empty set.
func formatHints(hints ...Hint) string {
	var out []string
	for _, h := range hints {
		word := ""
		for i := range 64 {
			if h.Nodes>>i&1 == 1 {
				word += fmt.Sprint(i)
			}
		}
		if word == "" {
			word = "any"
		}
		if h.Preferred {
			word += "*"
		}
		out = append(out, word)
	}
	return strings.Join(out, " ")
}

// parseHints parses lists in the format of formatHints, with "|" between resources.
func parseHints(words string) [][]Hint {
	var lists [][]Hint
	for _, list := range strings.Split(words, "|") {
		out := []Hint{}
		for _, word := range strings.Fields(list) {
			var h Hint
			for _, c := range strings.NewReplacer("any", "").Replace(word) {
				if h.Preferred = c == '*'; !h.Preferred {
					h.Nodes |= 1 << (c - '0')
				}
			}
			out = append(out, h)
		}
		if len(out) == 1 && out[0] == (Hint{0, true}) {
			out = nil
		}
		lists = append(lists, out)
	}
	return lists
}

func TestMerge(t *testing.T) {
	for _, c := range []struct {
		name, lists string
		machine     Mask
		policy      Policy
		want        string
		admit       bool
	}{
		{"none asks no provider", "01", 3, None, "any", true},
		{"the lowest of equals", "1* 0* 01", 3, BestEffort, "0*", true},
		{"preferred before narrow", "0 01*", 3, Restricted, "01*", true},
		{"not preferred", "01", 3, BestEffort, "01", true},
		{"not preferred, restricted", "01", 3, Restricted, "01", false},
		{"not preferred, single", "01", 3, SingleNUMA, "any", false},
		{"preferred on two, single", "01*", 3, SingleNUMA, "any", false},
		{"no provider cares", "any*", 3, SingleNUMA, "any*", true},
		{"no provider cares, restricted", "any*", 3, Restricted, "01*", true},
		{"one does not care", "any*|1* 01", 3, SingleNUMA, "1*", true},
		{"cannot be", "|0* 1* 01", 3, BestEffort, "0", true},
		{"cannot be, restricted", "|0* 1* 01", 3, Restricted, "0", false},
		{"the only node there is", "0*", 1, SingleNUMA, "any*", true},
		{"the node that both have", "0* 1* 01|1* 01", 3, BestEffort, "1*", true},
		{"others, each preferred", "0* 01|1* 01", 3, BestEffort, "0", true},
		{"other nodes, though each is preferred", "0*|01*", 3, Restricted, "0", false},
		{"one node, but not preferred, single", "0", 3, SingleNUMA, "any", false},
		{"nothing in common", "0*|1*", 3, BestEffort, "01", true},
		{"as many nodes as the neediest resource needs", "0 1 2 01 02 12 012|01 12 012", 7, BestEffort, "01", true},
		{"of the same number the lowest", "12 02|012", 7, BestEffort, "02", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, admit := Merge(c.policy, c.machine, parseHints(c.lists))
			if formatHints(got) != c.want || admit != c.admit {
				t.Errorf("%s %s: %s, admitted %v, want %s, %v", c.policy, c.lists, formatHints(got), admit, c.want, c.admit)
			}
		})
	}
}
