// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bufio"
	"fmt"
	"io"
	"slices"
	"strings"
)

// modes of kube-proxy that a list may name.
var modes = []string{"iptables", "nftables"} //nolint:gochecknoglobals // a constant

// readList returns the names of the specs that must pass with a mode of kube-proxy. A line of the list has the modes, with commas
// between them, a tab and the name.
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
			if !slices.Contains(modes, one) {
				return nil, fmt.Errorf("list of specs, line %d: %q is no mode of kube-proxy, which are %s", number, one, strings.Join(modes, ", "))
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

// broken returns one line for each spec of the list that did not pass, with the reason.
func broken(list []string, got report) (lines []string) {
	for _, name := range list {
		one, known := got.Results[name]
		switch {
		case !known:
			lines = append(lines, fmt.Sprintf("missing from the suite: %s", name))
		case one.State == notRun:
			lines = append(lines, fmt.Sprintf("not run: %s", name))
		case one.State != passed:
			lines = append(lines, fmt.Sprintf("%s: %s: %s", one.State, name, firstLine(one.Reason)))
		}
	}
	return lines
}

// unlisted returns the names of specs with a state that are not in the list.
func unlisted(list []string, got report, want state) (names []string) {
	for name, one := range got.Results {
		if one.State == want && !slices.Contains(list, name) {
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
