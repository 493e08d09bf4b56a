// SPDX-License-Identifier: Apache-2.0

package kubelet

import "testing"

// TestMergePublished runs the test cases of Kubernetes 1.37 for the policies of the Topology Manager
// (pkg/kubelet/cm/topologymanager/policy_test.go), in the format of formatHints.
func TestMergePublished(t *testing.T) {
	const four = Mask(15)
	both := []Policy{BestEffort, Restricted}
	all := append([]Policy{SingleNUMA}, both...)
	for _, c := range []struct {
		name, lists string
		policies    []Policy
		want        string
	}{
		// commonPolicyMergeTestCases of Kubernetes.
		{"same mask, both preferred, node 0", "0*|0*", all, "0*"},
		{"same mask, both preferred, node 1", "1*|1*", all, "1*"},
		{"no hints beside a preferred hint, node 0", "any*|0*", all, "0*"},
		{"no hints beside a preferred hint, node 1", "any*|1*", all, "1*"},
		{"two hints and a matching one, node 0", "0* 1*|0*", all, "0*"},
		{"two hints and a matching one, node 1", "0* 1*|1*", all, "1*"},
		{"the narrower preferred hint of both", "0* 1*|0* 01", all, "0*"},
		{"wide preferred hints before narrow ones that are not", "1* 01|0* 1* 01", all, "1*"},
		// mergeTestCases of best-effort and restricted.
		{"two hints each, some with different bits", "01* 02*|01* 02*", both, "01*"},
		{"no providers", "none", both, "0123*"},
		{"a provider without a preference", "any*", both, "0123*"},
		{"a provider without a possible affinity", "", both, "0123"},
		{"any node, not preferred", "any", both, "0123"},
		{"no common mask", "0*|1*", both, "0123"},
		{"same mask, one not preferred, node 0", "0*|0", both, "0"},
		{"same mask, one not preferred, node 1", "1*|1", both, "1"},
		{"a wider mask, both preferred, node 0", "0*|01*", both, "0"},
		{"two hints and a single one that is not preferred", "0* 1*|01", both, "0"},
		{"a wider mask, both preferred, node 1", "1*|01*", both, "1"},
		{"count of the best hint that is not preferred (1)", "0123 01|01", both, "01"},
		{"count of the best hint that is not preferred (2)", "0123 01|03", both, "03"},
		{"count of the best hint that is not preferred (3)", "0123 01|12", both, "12"},
		{"count of the best hint that is not preferred (4)", "0123 01|23", both, "23"},
		{"count of the best hint that is not preferred (5)", "0123 01|12 23", both, "12"},
		{"count of the best hint that is not preferred (6)", "0123 01|123 12 13 23", both, "12"},
		// mergeTestCases of single-numa-node.
		{"single: no providers", "none", []Policy{SingleNUMA}, "any*"},
		{"single: a provider without a preference", "any*", []Policy{SingleNUMA}, "any*"},
		{"single: a provider without a possible affinity", "", []Policy{SingleNUMA}, "any"},
		{"single: any node, not preferred", "any", []Policy{SingleNUMA}, "any"},
		{"single: no common mask", "0*|1*", []Policy{SingleNUMA}, "any"},
		{"single: same mask, one not preferred, node 0", "0*|0", []Policy{SingleNUMA}, "any"},
		{"single: same mask, one not preferred, node 1", "1*|1", []Policy{SingleNUMA}, "any"},
		{"single: two hints and a single one that is not preferred", "0* 1*|01", []Policy{SingleNUMA}, "any"},
		{"single: a resource that needs two nodes", "01*|0* 1* 01", []Policy{SingleNUMA}, "any"},
		{"single: a provider without a preference beside hints", "0* 1* 01|any*", []Policy{SingleNUMA}, "0*"},
	} {
		for _, policy := range c.policies {
			var lists [][]Hint
			if c.lists != "none" {
				lists = parseHints(c.lists)
			}
			got, admit := Merge(policy, four, lists)
			if formatHints(got) != c.want || admit != (policy == BestEffort || got.Preferred) {
				t.Errorf("%s, %s: %q gives %s, admitted %v, want %s", c.name, policy, c.lists, formatHints(got), admit, c.want)
			}
		}
	}
}

// TestCompareHintsPublished runs the cases of TestCompareHintsNarrowest in Kubernetes 1.37: the result of requiredNodes, the current hint,
// the candidate, and the better of the two.
func TestCompareHintsPublished(t *testing.T) {
	for _, c := range []struct {
		enough                   int
		current, candidate, want string
	}{
		{1, "", "0*", "0*"}, {1, "", "0", "0"}, {1, "0", "0*", "0*"}, {1, "0*", "0", "0*"}, {1, "01*", "0*", "0*"}, {1, "0*", "01*", "0*"},
		{1, "12", "01", "01"}, {1, "01", "12", "01"},
		{2, "01", "0", "01"}, {2, "12", "01", "01"}, {2, "01", "12", "01"}, {2, "0", "012", "0"}, {2, "0", "01", "01"},
		{3, "0", "01", "01"}, {3, "0", "12", "12"},
		{4, "01", "123", "123"}, {4, "123", "01", "123"}, {4, "012", "123", "012"}, {4, "123", "012", "012"},
	} {
		m := merger{machine: 15, enough: c.enough}
		if c.current != "" {
			m.best = &parseHints(c.current)[0][0]
		}
		candidate := parseHints(c.candidate)[0][0]
		if m.isBetter(candidate) {
			m.best = &candidate
		}
		if got := formatHints(*m.best); got != c.want {
			t.Errorf("at least %d nodes, %q against %q: %s, want %s", c.enough, c.candidate, c.current, got, c.want)
		}
	}
}
