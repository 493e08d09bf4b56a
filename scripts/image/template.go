// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"
	"strings"
)

// mergedLine is a line of the YAML text of a Kubernetes object. Each bit of the field `in` stands for one valid set of components. The bit
// is 1 if the object contains the line with this set of components.
type mergedLine struct {
	text string
	in   uint64
}

// mergeLines adds another text of an object to the merged lines. The lines of each text keep their order, so the text can be rebuilt from
// the merged lines.
func mergeLines(merged []mergedLine, text []string, in uint64) (all []mergedLine) {
	common := commonLines(merged, text)
	i, j := 0, 0
	for i < len(merged) || j < len(text) {
		switch {
		case i < len(merged) && j < len(text) && merged[i].text == text[j]:
			all = append(all, mergedLine{text[j], merged[i].in | in})
			i, j = i+1, j+1
		case j == len(text) || i < len(merged) && common[i+1][j] >= common[i][j+1]:
			all = append(all, merged[i])
			i++
		default:
			all = append(all, mergedLine{text[j], in})
			j++
		}
	}
	return all
}

// splitUnits splits the text of an object into lines. splitUnits does not split a list item without an inner list, so that lines of
// similar items, such as volumes, are not mixed.
func splitUnits(text string) (all []string) {
	lines := strings.Split(text, "\n")
	for i := 0; i < len(lines); {
		end := i + 1
		if item := strings.TrimLeft(lines[i], " "); strings.HasPrefix(item, "- ") {
			for inside := lines[i][:len(lines[i])-len(item)] + "  "; end < len(lines) && strings.HasPrefix(lines[end], inside); end++ {
			}
			if hasList(lines[i+1 : end]) {
				end = i + 1
			}
		}
		all = append(all, strings.Join(lines[i:end], "\n"))
		i = end
	}
	return all
}

func hasList(lines []string) bool {
	return slices.ContainsFunc(lines, func(l string) bool { return strings.HasPrefix(strings.TrimLeft(l, " "), "- ") })
}

// commonLines returns a table for the merge of two texts. Element [i][j] of the table is the length of the longest common subsequence of
// two lists. The first list contains the lines of the argument `merged` from index i, and the second list contains the lines of the
// argument `text` from index j.
func commonLines(merged []mergedLine, text []string) [][]int {
	common := make([][]int, len(merged)+1)
	for i := range common {
		common[i] = make([]int, len(text)+1)
	}
	for i := len(merged) - 1; i >= 0; i-- {
		for j := len(text) - 1; j >= 0; j-- {
			if merged[i].text == text[j] {
				common[i][j] = common[i+1][j+1] + 1
			} else {
				common[i][j] = max(common[i+1][j], common[i][j+1])
			}
		}
	}
	return common
}

// componentLiteral is a condition that a component is chosen or is not chosen.
type componentLiteral struct {
	text string
	in   uint64
}

func allLiterals(components []string, choices [][]string) (all []componentLiteral) {
	everything := uint64(1)<<len(choices) - 1
	for _, c := range components {
		var in uint64
		for i, choice := range choices {
			if slices.Contains(choice, c) {
				in |= 1 << i
			}
		}
		all = append(all, componentLiteral{".Values." + c, in}, componentLiteral{"(not .Values." + c + ")", everything &^ in})
	}
	return all
}

// shortestCondition returns the shortest template condition that is true for each component set in the argument `in`. The condition is
// false for each component set that is only in the argument `scope`.
func shortestCondition(all []componentLiteral, in, scope uint64) (string, error) {
	for size := 1; size <= 3; size++ {
		if text, ok := conditionOf(all, size, nil, in, scope); ok {
			return text, nil
		}
	}
	return "", fmt.Errorf("no condition of three components selects the choices %b of %b", in, scope)
}

// conditionOf returns a template condition that joins literals by "and" or by "or". The condition contains the literals in `chosen` and
// `size` further literals.
func conditionOf(all []componentLiteral, size int, chosen []componentLiteral, in, scope uint64) (string, bool) {
	if size > 0 {
		for i, l := range all {
			if text, ok := conditionOf(all[i+1:], size-1, append(slices.Clone(chosen), l), in, scope); ok {
				return text, true
			}
		}
		return "", false
	}
	var words []string
	both, either := ^uint64(0), uint64(0)
	for _, l := range chosen {
		words = append(words, l.text)
		both &= l.in
		either |= l.in
	}
	text := strings.Join(words, " ")
	switch {
	case both&scope == in && len(chosen) == 1:
		return strings.Trim(text, "()"), true
	case both&scope == in:
		return "and " + text, true
	case either&scope == in:
		return "or " + text, true
	}
	return "", false
}

// objectTemplateText returns the template of an object. In the template, each group of lines is inside a condition that is true if the
// chosen components need these lines.
func objectTemplateText(merged []mergedLine, all []componentLiteral, choices int) (string, error) {
	everything := uint64(1)<<choices - 1
	scope := uint64(0)
	for _, l := range merged {
		scope |= l.in
	}
	groups := groupLines(merged)
	var body strings.Builder
	for i := 0; i < len(groups); i++ {
		g := groups[i]
		if g.in == scope {
			body.WriteString(g.text)
			continue
		}
		when, err := shortestCondition(all, g.in, scope)
		if err != nil {
			return "", fmt.Errorf("%w: %s", err, g.text)
		}
		fmt.Fprintf(&body, "{{- if %s }}\n%s", when, g.text)
		if i+1 < len(groups) && groups[i+1].in == scope&^g.in {
			i++
			fmt.Fprintf(&body, "{{- else }}\n%s", groups[i].text)
		}
		body.WriteString("{{- end }}\n")
	}
	if scope == everything {
		return body.String(), nil
	}
	when, err := shortestCondition(all, scope, everything)
	return fmt.Sprintf("{{- if %s }}\n%s{{- end }}\n", when, body.String()), err
}

// groupLines joins neighbouring lines that belong to the same component sets.
func groupLines(lines []mergedLine) (groups []mergedLine) {
	for _, l := range lines {
		if n := len(groups); n > 0 && groups[n-1].in == l.in {
			groups[n-1].text += l.text + "\n"
		} else {
			groups = append(groups, mergedLine{l.text + "\n", l.in})
		}
	}
	return groups
}
