// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"regexp"
	"slices"

	"github.com/podlace/podlace/pkg/claim"
)

// maybeMissing returns the attributes that some VFs lack. The result of maybeMissing contains the attributes of the NUMA node, because the
// NUMA node of a VF may be unknown.
func maybeMissing() []attribute {
	return []attribute{{"resource.kubernetes.io", "numaNode"}, {"dra.net", "numaNode"}}
}

// The type attribute identifies an attribute in a ResourceSlice by domain and name.
type attribute struct{ domain, name string }

func (a attribute) String() string { return a.domain + "/" + a.name }

var (
	// celRead matches device.attributes["domain"].name and device.attributes["domain"]["name"]. celRead does not match optional CEL fields
	// such as .?name.
	celRead = regexp.MustCompile(`device\.attributes\[["']([^"']+)["']\](?:\.([A-Za-z_]\w*)|\[["']([^"']+)["']\])`)
	// celBind matches the beginning of a call of cel.bind, with an alias and device.attributes["domain"] as its first arguments.
	celBind = regexp.MustCompile(`cel\.bind\(\s*(\w+)\s*,\s*(device\.attributes\[["'][^"']+["']\])\s*,`)
	// celIn matches the CEL test '"name" in device.attributes["domain"]'.
	celIn = regexp.MustCompile(`["']([^"']+)["']\s+in\s+device\.attributes\[["']([^"']+)["']\]`)
	// celHas matches the CEL test 'has(device.attributes["domain"].name)'.
	celHas = regexp.MustCompile(`has\(\s*device\.attributes\[["']([^"']+)["']\]\.(\w+)\s*\)`)
	// celDriver matches a CEL comparison of device.driver. Every device has the attribute "driver".
	celDriver = regexp.MustCompile(`device\.driver\s*==`)
)

// unguarded() returns the problems of a CEL expression that selects devices. It is a problem if the expression reads an attribute that a
// device may lack, without testing for the attribute first. If a device lacks such an attribute, the scheduler stops with an error, and the
// pod starts on no node. The argument sure is true if the expression sees only devices of this driver.
//
// unguarded() searches the text of the expression and does not evaluate the expression. Reading an attribute is safe if the expression
// tests earlier whether the device has the attribute.
func unguarded(expression string, sure bool) (problems []string) {
	for _, m := range celBind.FindAllStringSubmatch(expression, -1) {
		expression = regexp.MustCompile(`\b`+m[1]+`\.`).ReplaceAllLiteralString(expression, m[2]+".")
	}
	guards := guardsOf(expression)
	for _, m := range celRead.FindAllStringSubmatchIndex(expression, -1) {
		name := m[4:6]
		if name[0] < 0 {
			name = m[6:8]
		}
		a := attribute{expression[m[2]:m[3]], expression[name[0]:name[1]]}
		if slices.ContainsFunc(guards, func(g guard) bool { return g.attribute == a && g.from <= m[0] }) {
			continue
		}
		if text := readRisk(a, sure || celDriver.MatchString(expression[:m[0]])); text != "" && !slices.Contains(problems, text) {
			problems = append(problems, text)
		}
	}
	return problems
}

// A guard is a part of a CEL expression that tests whether the device has an attribute. The guard protects the rest of the expression, from
// the offset in the field "from".
type guard struct {
	attribute
	from int
}

func guardsOf(expression string) (guards []guard) {
	for _, m := range celIn.FindAllStringSubmatchIndex(expression, -1) {
		guards = append(guards, guard{attribute{expression[m[4]:m[5]], expression[m[2]:m[3]]}, m[0]})
	}
	for _, m := range celHas.FindAllStringSubmatchIndex(expression, -1) {
		guards = append(guards, guard{attribute{expression[m[2]:m[3]], expression[m[4]:m[5]]}, m[0]})
	}
	return guards
}

// readRisk returns the reason why reading an attribute may fail. readRisk returns "" if reading the attribute cannot fail. The argument own
// is true if the expression sees only devices of this driver.
func readRisk(a attribute, own bool) string {
	switch {
	case slices.Contains(maybeMissing(), a):
		return fmt.Sprintf(`it reads %s, which a VF without a NUMA node lacks; the scheduler then starts the pod on no node: `+
			`write "%s" in device.attributes["%s"] && ... first, or compare device.attributes["%s"].numa, which every VF has`,
			a, a.name, a.domain, claim.Driver)
	case !own:
		return fmt.Sprintf(`it reads %s, which devices of other drivers lack; the scheduler then starts the pod on no node: `+
			`begin with device.driver == "%s" &&`, a, claim.Driver)
	}
	return ""
}
