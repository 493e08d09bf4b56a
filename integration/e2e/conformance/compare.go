// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"
)

// proxyModes contains the kube-proxy modes that may occur in the list of required e2e tests.
var proxyModes = []string{"iptables", "nftables"} //nolint:gochecknoglobals // a constant

// readList returns the Kubernetes e2e tests (specs) that must pass in a mode of kube-proxy. A line has the modes separated by commas, a
// tab, and the spec's name.
func readList(from io.Reader, mode string) (names []string, err error) {
	lines := bufio.NewScanner(from)
	seen := map[string]bool{}
	for number := 1; lines.Scan(); number++ {
		line := lines.Text()
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		in, name, found := strings.Cut(line, "\t")
		if !found || name != strings.TrimSpace(name) || name == "" {
			return nil, fmt.Errorf("list of specs, line %d: want the modes of kube-proxy, a tab and a name: %q", number, line)
		}
		wanted := strings.Split(in, ",")
		for _, one := range wanted {
			if !slices.Contains(proxyModes, one) {
				return nil, fmt.Errorf("list of specs, line %d: %q is no mode of kube-proxy, which are %s", number, one, strings.Join(proxyModes, ", "))
			}
		}
		if seen[name] {
			return nil, fmt.Errorf("list of specs, line %d: %q is there twice", number, name)
		}
		seen[name] = true
		if slices.Contains(wanted, mode) {
			names = append(names, name)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("read the list of specs: %w", err)
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("the list of specs has none for kube-proxy in mode %s", mode)
	}
	return names, nil
}

// labels matches the labels in a spec's name, such as [Conformance].
var labels = regexp.MustCompile(`\[[^\]]*\]`) //nolint:gochecknoglobals // a constant

// canonical returns a spec's name with sorted labels and single spaces, because versions of Kubernetes differ in these.
func canonical(name string) string {
	sorted := labels.FindAllString(name, -1)
	slices.Sort(sorted)
	return strings.Join(append(strings.Fields(labels.ReplaceAllString(name, " ")), sorted...), " ")
}

// failuresOf returns a line with name and reason for each spec of the list that did not pass.
func failuresOf(list []string, got suiteReport) (lines []string) {
	results := map[string]specResult{}
	for name, one := range got.Results {
		results[canonical(name)] = one
	}
	for _, name := range list {
		one, known := results[canonical(name)]
		switch {
		case !known:
			lines = append(lines, fmt.Sprintf("missing from the suite: %s: write its new name into integration/e2e/conformance/specs.txt", name))
		case one.State == notRun:
			lines = append(lines, fmt.Sprintf("not run: %s", name))
		case one.State != passed:
			lines = append(lines, fmt.Sprintf("%s: %s: %s", one.State, name, firstLine(one.Reason)))
		}
	}
	return lines
}

// unlistedSpecs returns the names of the e2e tests (specs) that have the wanted state but are not in the list.
func unlistedSpecs(list []string, got suiteReport, want specState) (names []string) {
	for name, one := range got.Results {
		if one.State == want && !slices.ContainsFunc(list, func(listed string) bool { return canonical(listed) == canonical(name) }) {
			names = append(names, name)
		}
	}
	slices.Sort(names)
	return names
}

func firstLine(text string) string {
	line, _, _ := strings.Cut(text, "\n")
	return line
}
