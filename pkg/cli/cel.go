// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"regexp"
	"slices"

	"github.com/podlace/podlace/pkg/claim"
)

// maybeMissing returns the attributes that some VFs lack: those of a VF whose NUMA node is unknown.
func maybeMissing() []attribute {
	return []attribute{{"resource.kubernetes.io", "numaNode"}, {"dra.net", "numaNode"}}
}

// attribute is the name of an attribute in a ResourceSlice.
type attribute struct{ domain, name string }

func (a attribute) String() string { return a.domain + "/" + a.name }

var (
	// celRead is device.attributes["domain"].name or device.attributes["domain"]["name"]. Optional forms such as .?name do not match.
	celRead = regexp.MustCompile(`device\.attributes\[["']([^"']+)["']\](?:\.([A-Za-z_]\w*)|\[["']([^"']+)["']\])`)
	// celBind is cel.bind(alias, device.attributes["domain"],
	celBind = regexp.MustCompile(`cel\.bind\(\s*(\w+)\s*,\s*(device\.attributes\[["'][^"']+["']\])\s*,`)
	// celIn is "name" in device.attributes["domain"].
	celIn = regexp.MustCompile(`["']([^"']+)["']\s+in\s+device\.attributes\[["']([^"']+)["']\]`)
	// celHas is has(device.attributes["domain"].name).
	celHas = regexp.MustCompile(`has\(\s*device\.attributes\[["']([^"']+)["']\]\.(\w+)\s*\)`)
	// celDriver compares the driver, which no device lacks.
	celDriver = regexp.MustCompile(`device\.driver\s*==`)
)

// unguarded returns what is risky in a CEL expression that selects devices: each attribute that it reads although devices may lack it. The
// scheduler stops at such a device with an error, and the pod starts on no node. sure is for an expression that sees devices of this driver
// only.
//
// The check reads the text, it does not evaluate it. A guard counts wherever it stands before the attribute.
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
		if text := risk(a, sure || celDriver.MatchString(expression[:m[0]])); text != "" && !slices.Contains(problems, text) {
			problems = append(problems, text)
		}
	}
	return problems
}

// guard is a test for an attribute, from an offset on.
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

// risk returns why reading an attribute may fail, "" if it cannot. own is for expressions that see devices of this driver only.
func risk(a attribute, own bool) string {
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
