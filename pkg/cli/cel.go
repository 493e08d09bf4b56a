// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/plugin"
)

// publishedAttributes returns the attributes of a VF in a ResourceSlice, and their types.
func publishedAttributes() map[attribute]string {
	return map[attribute]string{
		{claim.Driver, "resource"}: "string", {claim.Driver, "kind"}: "string", {claim.Driver, "pf"}: "string",
		{claim.Driver, "pfAddress"}: "string", {claim.Driver, "card"}: "string", {claim.Driver, "vf"}: "int",
		{claim.Driver, "numa"}: "int", {claim.Driver, "vendor"}: "string", {claim.Driver, "product"}: "string",
		{claim.Driver, "driver"}: "string", {claim.Driver, "linkType"}: "string", {claim.Driver, "rdma"}: "bool",
		{"resource.kubernetes.io", "pciBusID"}: "string", {"resource.kubernetes.io", "pcieRoot"}: "string",
		{"k8s.cni.cncf.io", "deviceID"}: "string", {"k8s.cni.cncf.io", "resourceName"}: "string",
		{"resource.kubernetes.io", "numaNode"}: "int", {"dra.net", "numaNode"}: "int",
	}
}

// mayBeMissing reports whether some VFs lack an attribute. The NUMA node of a VF may be unknown.
func mayBeMissing(a attribute) bool { return a.name == "numaNode" && a.domain != claim.Driver }

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
	// celDriver matches a CEL comparison of device.driver. Reading device.driver is always safe, because every device has a driver.
	celDriver = regexp.MustCompile(`device\.driver\s*==(?:\s*["']([^"']+)["'])?`)
	// celCall matches the opening parenthesis after a name, which shows that the name is a function such as exists(...) and not an attribute.
	celCall = regexp.MustCompile(`^\s*\(`)
	// celLiteral matches a comparison with a literal. The regular expression has one group each for a string, a number and a bool.
	celLiteral = regexp.MustCompile(`^\s*(?:==|<=?|>=?)\s*(?:("[^"]*"|'[^']*')|(-?\d[\w.]*)|(true|false))\s*(?:$|\)|&&|\|\||,)`)
	// celOperator matches an operator at the end of an expression.
	celOperator = regexp.MustCompile(`(?:&&|\|\||[=<>!]=|[=<>!+\-*/%?:.,])$`)
)

// celProblems returns the problems of a CEL expression that selects devices: attributes that no VF has, comparisons with a value of another
// type, and reads of an attribute that a device may lack. If a device lacks an attribute that the expression reads, the scheduler stops
// with an error, and the pod starts on no node. The argument `sure` is true if the expression is evaluated only for devices of this driver.
//
// celProblems searches the text of the expression and does not evaluate the expression. Reading an attribute is safe if the expression
// tests earlier whether the device has the attribute.
func celProblems(expression string, sure bool) (problems []string) {
	if text := celSyntax(expression); text != "" {
		return []string{text}
	}
	for _, m := range celBind.FindAllStringSubmatch(expression, -1) {
		expression = regexp.MustCompile(`\b`+m[1]+`\.`).ReplaceAllLiteralString(expression, m[2]+".")
	}
	guards := guardsOf(expression)
	for _, m := range celRead.FindAllStringSubmatchIndex(expression, -1) {
		name := m[4:6]
		if name[0] < 0 {
			name = m[6:8]
		}
		a, rest := attribute{expression[m[2]:m[3]], expression[name[0]:name[1]]}, expression[m[1]:]
		driver, compared := lastDriver(expression[:m[0]])
		if celCall.MatchString(rest) || compared && driver != "" && driver != claim.Driver {
			continue
		}
		text := wrongType(a, rest)
		if text == "" && !slices.ContainsFunc(guards, func(g guard) bool { return g.attribute == a && g.from <= m[0] }) {
			text = readRisk(a, sure || compared)
		}
		if text != "" && !slices.Contains(problems, text) {
			problems = append(problems, text)
		}
	}
	return problems
}

// lastDriver reports whether a part of an expression compares device.driver. The first result is the driver name in the last comparison, or
// "" if this comparison contains no literal name.
func lastDriver(expression string) (name string, compared bool) {
	all := celDriver.FindAllStringSubmatch(expression, -1)
	if len(all) == 0 {
		return "", false
	}
	return all[len(all)-1][1], true
}

// wrongType returns an error text if an expression compares an attribute with a literal of another type. The argument `rest` is the text of
// the expression after the attribute.
func wrongType(a attribute, rest string) string {
	m := celLiteral.FindStringSubmatch(rest)
	want := publishedAttributes()[a]
	if m == nil || want == "" {
		return ""
	}
	for i, is := range []string{"string", "int", "bool"} {
		if literal := m[i+1]; literal != "" && is != want {
			return fmt.Sprintf("it compares %s with %s, but the type of the attribute is %s, so the comparison never succeeds", a, literal, want)
		}
	}
	return ""
}

// celSyntax returns an error text if an expression is empty, has a quote or a bracket without its counterpart, or ends with an operator.
func celSyntax(expression string) string {
	var code []byte // the expression without comments and without the content of strings
	var open []byte
	for i := 0; i < len(expression); i++ {
		c := expression[i]
		switch {
		case strings.HasPrefix(expression[i:], "//"):
			i += strings.IndexByte(expression[i:]+"\n", '\n')
			continue
		case c == '"' || c == '\'':
			length := stringLength(expression[i:], isRaw(expression[:i]))
			if length == 0 {
				return fmt.Sprintf("the quote %c is not closed", c)
			}
			i += length - 1
			code = append(code, c, c)
			continue
		case strings.IndexByte("([{", c) >= 0:
			open = append(open, c)
		case strings.IndexByte(")]}", c) >= 0:
			if len(open) == 0 || strings.IndexByte("([{", open[len(open)-1]) != strings.IndexByte(")]}", c) {
				return fmt.Sprintf("the bracket %c has no counterpart", c)
			}
			open = open[:len(open)-1]
		}
		code = append(code, c)
	}
	text := strings.TrimSpace(string(code))
	switch {
	case text == "":
		return "it is empty"
	case len(open) > 0:
		return fmt.Sprintf("the bracket %c is not closed", open[len(open)-1])
	case celOperator.MatchString(text):
		return "it ends with " + celOperator.FindString(text)
	}
	return ""
}

// isRaw reports whether a string after the given text is a raw CEL string, such as r"\d". Raw strings have no escape sequences.
func isRaw(before string) bool {
	prefix := strings.ToLower(before[len(strings.TrimRight(before, "rRbB")):])
	return strings.Contains(prefix, "r")
}

// stringLength returns the length of the CEL string at the start of a text. stringLength returns 0 if the string is not closed.
func stringLength(text string, raw bool) int {
	quote := text[:1]
	if triple := strings.Repeat(quote, 3); strings.HasPrefix(text, triple) {
		quote = triple
	}
	for i := len(quote); i < len(text); i++ {
		switch {
		case text[i] == '\\' && !raw:
			i++
		case strings.HasPrefix(text[i:], quote):
			return i + len(quote)
		}
	}
	return 0
}

// A guard is a part of a CEL expression that tests whether the device has an attribute. The guard protects all reads of the attribute after
// the offset in the field `from`.
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

// readRisk returns the reason why reading an attribute may fail. readRisk returns "" if reading the attribute cannot fail. The argument
// `own` is true if the expression is evaluated only for devices of this driver.
func readRisk(a attribute, own bool) string {
	unknown := unknownAttribute(a)
	switch {
	case unknown != "":
		return "it reads " + a.String() + ": " + unknown
	case mayBeMissing(a):
		return fmt.Sprintf(`it reads %s, which a VF without a NUMA node lacks; the scheduler then starts the pod on no node: `+
			`write "%s" in device.attributes["%s"] && ... first, or compare device.attributes["%s"].numa, which every VF has`,
			a, a.name, a.domain, claim.Driver)
	case !own && a.domain == claim.Driver:
		return fmt.Sprintf(`it reads %s, which devices of other drivers lack; the scheduler then starts the pod on no node: `+
			`begin with device.driver == "%s" &&`, a, claim.Driver)
	case !own:
		return fmt.Sprintf(`it reads %s, which devices of other drivers lack; the scheduler then starts the pod on no node: `+
			`compare device.driver first`, a)
	}
	return ""
}

// unknownAttribute returns an error text if no VF has an attribute with this name. Drivers share domains such as resource.kubernetes.io, so
// an unknown name in such a domain may belong to another driver. In such a domain, unknownAttribute only reports a name that differs from a
// VF's attribute in upper and lower case.
func unknownAttribute(a attribute) string {
	var names []string
	for known := range publishedAttributes() {
		switch {
		case known == a:
			return ""
		case strings.EqualFold(known.String(), a.String()):
			return "no VF has this attribute; did you mean " + known.String() + "?"
		case known.domain == claim.Driver:
			names = append(names, known.name)
		}
	}
	slices.Sort(names)
	switch {
	case a.domain == claim.Driver:
		if near := plugin.Nearest(a.name, names); near != "" {
			return fmt.Sprintf("no VF has this attribute; did you mean %s/%s?", claim.Driver, near)
		}
		return fmt.Sprintf("no VF has this attribute; attributes of %s: %s", claim.Driver, strings.Join(names, ", "))
	case strings.Contains(a.domain, "podlace."):
		return "no driver has this name; did you mean " + claim.Driver + "?"
	}
	return ""
}
