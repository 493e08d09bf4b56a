// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"slices"
	"strings"
)

// choiceSet is a set of choices of components. Each bit stands for one valid choice.
type choiceSet [2]uint64

const maxChoices = 128

func (s choiceSet) with(i int) choiceSet      { s[i/64] |= 1 << (i % 64); return s }
func (s choiceSet) or(o choiceSet) choiceSet  { return choiceSet{s[0] | o[0], s[1] | o[1]} }
func (s choiceSet) and(o choiceSet) choiceSet { return choiceSet{s[0] & o[0], s[1] & o[1]} }
func (s choiceSet) not(o choiceSet) choiceSet { return choiceSet{s[0] &^ o[0], s[1] &^ o[1]} }

// firstChoices returns the set of the first n choices.
func firstChoices(n int) (s choiceSet) {
	for i := range n {
		s = s.with(i)
	}
	return s
}

// mergedLine is a line of an object's YAML text, and the choices with which the object contains it.
type mergedLine struct {
	text string
	in   choiceSet
}

// mergeLines adds another text of an object to the merged lines. Each text's lines keep their order, so that it can be rebuilt.
func mergeLines(merged []mergedLine, text []string, in choiceSet) (all []mergedLine) {
	common := commonLines(merged, text)
	i, j := 0, 0
	for i < len(merged) || j < len(text) {
		switch {
		case i < len(merged) && j < len(text) && merged[i].text == text[j]:
			all = append(all, mergedLine{text[j], merged[i].in.or(in)})
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

// splitUnits splits the text of an object into lines. A list item without an inner list stays together, so that similar items, such as
// volumes, do not mix.
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

// commonLines returns a table for the merge of two texts. [i][j] is the length of the longest common subsequence of merged from line i on
// and text from line j on.
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
	in   choiceSet
}

func allLiterals(components []string, choices [][]string) (all []componentLiteral) {
	everything := firstChoices(len(choices))
	for _, c := range components {
		var in choiceSet
		for i, choice := range choices {
			if slices.Contains(choice, c) {
				in = in.with(i)
			}
		}
		all = append(all, componentLiteral{".Values." + c, in}, componentLiteral{"(not .Values." + c + ")", everything.not(in)})
	}
	return all
}

// shortestCondition returns the shortest template condition that is true for each component set in `in`, and false for those only in
// `scope`.
func shortestCondition(all []componentLiteral, in, scope choiceSet) (string, error) {
	for size := 1; size <= 3; size++ {
		if text, ok := conditionOf(all, size, nil, in, scope); ok {
			return text, nil
		}
	}
	return "", fmt.Errorf("no condition of three components selects the choices %b of %b", in, scope)
}

// conditionOf returns a template condition that joins the literals in `chosen` and `size` further ones by "and" or by "or".
func conditionOf(all []componentLiteral, size int, chosen []componentLiteral, in, scope choiceSet) (string, bool) {
	if size > 0 {
		for i, l := range all {
			if text, ok := conditionOf(all[i+1:], size-1, append(slices.Clone(chosen), l), in, scope); ok {
				return text, true
			}
		}
		return "", false
	}
	var words []string
	both, either := scope, choiceSet{}
	for _, l := range chosen {
		words = append(words, l.text)
		both = both.and(l.in)
		either = either.or(l.in.and(scope))
	}
	text := strings.Join(words, " ")
	switch {
	case both == in && len(chosen) == 1:
		return strings.Trim(text, "()"), true
	case both == in:
		return "and " + text, true
	case either == in:
		return "or " + text, true
	}
	return "", false
}

// objectTemplateText returns an object's template, with each group of lines inside a condition for the components that need it.
func objectTemplateText(merged []mergedLine, all []componentLiteral, choices int) (string, error) {
	everything := firstChoices(choices)
	var scope choiceSet
	for _, l := range merged {
		scope = scope.or(l.in)
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
		if i+1 < len(groups) && groups[i+1].in == scope.not(g.in) {
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
