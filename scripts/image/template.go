// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"
	"strings"
)

// line is a line of an object, and the choices of components with which the object has it, one bit for each choice.
type line struct {
	text string
	in   uint64
}

// mergeLines adds the text of an object to the merged lines of its other texts. The lines of one choice keep their order, so they are again
// its text.
func mergeLines(merged []line, text []string, in uint64) (all []line) {
	common := commonLines(merged, text)
	i, j := 0, 0
	for i < len(merged) || j < len(text) {
		switch {
		case i < len(merged) && j < len(text) && merged[i].text == text[j]:
			all = append(all, line{text[j], merged[i].in | in})
			i, j = i+1, j+1
		case j == len(text) || i < len(merged) && common[i+1][j] >= common[i][j+1]:
			all = append(all, merged[i])
			i++
		default:
			all = append(all, line{text[j], in})
			j++
		}
	}
	return all
}

// units splits the text of an object into lines. The lines of a list's item that has no list inside form one unit, so that similar items,
// such as volumes, are not mixed.
func units(text string) (all []string) {
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

// commonLines returns how many lines the ends of both have in common, from each line on.
func commonLines(merged []line, text []string) [][]int {
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

// literal is a component that is chosen, or not.
type literal struct {
	text string
	in   uint64
}

func literals(components []string, choices [][]string) (all []literal) {
	everything := uint64(1)<<len(choices) - 1
	for _, c := range components {
		var in uint64
		for i, choice := range choices {
			if slices.Contains(choice, c) {
				in |= 1 << i
			}
		}
		all = append(all, literal{".Values." + c, in}, literal{"(not .Values." + c + ")", everything &^ in})
	}
	return all
}

// condition returns a shortest condition that is true in the choices of in, among those of scope.
func condition(all []literal, in, scope uint64) (string, error) {
	for size := 1; size <= 3; size++ {
		if text, ok := conditionOf(all, size, nil, in, scope); ok {
			return text, nil
		}
	}
	return "", fmt.Errorf("no condition of three components selects the choices %b of %b", in, scope)
}

// conditionOf returns "and" or "or" of as many more literals as size.
func conditionOf(all []literal, size int, chosen []literal, in, scope uint64) (string, bool) {
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

// template returns the template of an object: its lines, each group under the condition of the components that have it.
func template(merged []line, all []literal, choices int) (string, error) {
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
		when, err := condition(all, g.in, scope)
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
	when, err := condition(all, scope, everything)
	return fmt.Sprintf("{{- if %s }}\n%s{{- end }}\n", when, body.String()), err
}

// groupLines joins neighbouring lines of the same choices.
func groupLines(lines []line) (groups []line) {
	for _, l := range lines {
		if n := len(groups); n > 0 && groups[n-1].in == l.in {
			groups[n-1].text += l.text + "\n"
		} else {
			groups = append(groups, line{l.text + "\n", l.in})
		}
	}
	return groups
}
