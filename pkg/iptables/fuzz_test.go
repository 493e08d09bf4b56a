// SPDX-License-Identifier: Apache-2.0

package iptables

import (
	"slices"
	"strings"
	"testing"
)

func FuzzNAT(f *testing.F) {
	f.Add(saved, "CNI-ABC")
	f.Add("", "")
	f.Add("-A \n-A  -j X\n:\n: ", "")
	f.Fuzz(func(t *testing.T, text, chain string) {
		lines := strings.Split(text, "\n")
		nat := parse(text)
		for _, rule := range nat.Rules(chain, "-j X ") {
			if !slices.Contains(lines, strings.TrimSuffix(rule, " ")) || !strings.HasPrefix(rule, "-A "+chain+" ") ||
				!strings.Contains(rule, "-j X ") {
				t.Errorf("%q has in %q the rule %q", text, chain, rule)
			}
		}
		lists := func(prefix string) bool {
			return strings.Contains("\n"+strings.ReplaceAll(text, "\n", " \n")+" ", "\n"+prefix+chain+" ")
		}
		if nat.HasChain(chain) != (lists(":") || lists("-A ")) && chain != "" && !strings.ContainsAny(chain, " \n") {
			t.Errorf("%q has the chain %q: %t", text, chain, nat.HasChain(chain))
		}
	})
}
