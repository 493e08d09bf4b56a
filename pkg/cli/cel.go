// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/strict"
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

// The type attribute identifies an attribute in a ResourceSlice by domain and name.
type attribute struct{ domain, name string }

func (a attribute) String() string { return a.domain + "/" + a.name }

var (
	// celBind matches the beginning of a call of cel.bind, with an alias and device.attributes["domain"] as its first arguments.
	celBind = regexp.MustCompile(`cel\.bind\(\s*(\w+)\s*,\s*(device\.attributes\[["'][^"']+["']\])\s*,`)
	// celDot matches device.attributes["domain"].name, but no optional CEL fields such as .?name.
	celDot = regexp.MustCompile(`(device\.attributes\[["'][^"']+["']\])\.([A-Za-z_]\w*)`)
	// celIn matches the CEL test '"name" in device.attributes["domain"]'.
	celIn = regexp.MustCompile(`["']([^"']+)["']\s+in\s+(device\.attributes\[["'][^"']+["']\])`)
	// celRead matches device.attributes["domain"]["name"], and a call of has() around it.
	celRead = regexp.MustCompile(`(has\(\s*)?device\.attributes\[["']([^"']+)["']\]\[["']([^"']+)["']\]`)
	// celDriver matches a CEL comparison of device.driver. Reading device.driver is always safe, because every device has a driver.
	celDriver = regexp.MustCompile(`device\.driver\s*==(?:\s*["']([^"']+)["'])?`)
	// celCall matches the opening parenthesis after a name, which shows that the name is a function such as exists(...) and not an attribute.
	celCall = regexp.MustCompile(`^\s*\(`)
	// celLiteral matches a comparison with a literal. The regular expression has one group each for a string, a number and a bool.
	celLiteral = regexp.MustCompile(`^\s*(?:==|<=?|>=?)\s*(?:("[^"]*"|'[^']*')|(-?\d[\w.]*)|(true|false))\s*(?:$|\)|&&|\|\||,)`)
	// celOperator matches an operator at the end of an expression.
	celOperator = regexp.MustCompile(`(?:&&|\|\||[=<>!]=|[=<>!+\-*/%?:.,])$`)
	// celText matches a comment, or a string with its prefix. Raw strings, such as r"\d", have no escape sequences.
	celText = regexp.MustCompile(`(?is)//[^\n]*|b?rb?(?:""".*?"""|'''.*?'''|"[^"]*"|'[^']*')|` +
		`b?(?:"""(?:\\.|[^\\])*?"""|'''(?:\\.|[^\\])*?'''|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')`)
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
	expression = celDot.ReplaceAllString(expression, `$1["$2"]`)
	expression = celIn.ReplaceAllString(expression, `has($2["$1"])`)
	tested := map[attribute]bool{}
	for _, m := range celRead.FindAllStringSubmatchIndex(expression, -1) {
		a, rest := attribute{expression[m[4]:m[5]], expression[m[6]:m[7]]}, expression[m[1]:]
		driver, compared := lastDriver(expression[:m[0]])
		switch {
		case m[2] >= 0:
			tested[a] = true
			continue
		case celCall.MatchString(rest) || compared && driver != "" && driver != claim.Driver:
			continue
		}
		text := wrongType(a, rest)
		if text == "" && !tested[a] {
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
	code := strings.TrimSpace(celText.ReplaceAllStringFunc(expression, func(text string) string {
		if strings.HasPrefix(text, "//") {
			return ""
		}
		return "0" // a string is a value like this
	}))
	var open []rune
	for _, c := range code {
		switch {
		case strings.ContainsRune(`"'`, c):
			return fmt.Sprintf("the quote %c is not closed", c)
		case strings.ContainsRune("([{", c):
			open = append(open, c)
		case strings.ContainsRune(")]}", c):
			if len(open) == 0 || strings.IndexRune("([{", open[len(open)-1]) != strings.IndexRune(")]}", c) {
				return fmt.Sprintf("the bracket %c has no counterpart", c)
			}
			open = open[:len(open)-1]
		}
	}
	switch {
	case code == "":
		return "it is empty"
	case len(open) > 0:
		return fmt.Sprintf("the bracket %c is not closed", open[len(open)-1])
	}
	if operator := celOperator.FindString(code); operator != "" {
		return "it ends with " + operator
	}
	return ""
}

// readRisk returns the reason why reading an attribute may fail. readRisk returns "" if reading the attribute cannot fail. The argument
// `own` is true if the expression is evaluated only for devices of this driver.
func readRisk(a attribute, own bool) string {
	unknown := unknownAttribute(a, false)
	switch {
	case unknown != "":
		return "it reads " + a.String() + ": " + unknown
	case a.name == "numaNode" && a.domain != claim.Driver: // the NUMA node of a VF may be unknown
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
// an unknown name in such a domain may belong to another driver: it is reported if it resembles an attribute of a VF, or if only devices of
// this driver are meant.
func unknownAttribute(a attribute, own bool) string {
	var names []string
	domain := strings.ToLower(a.domain)
	for known := range publishedAttributes() {
		if known == a {
			return ""
		}
		if known.domain == domain {
			names = append(names, known.name)
		}
	}
	slices.Sort(names)
	near := strict.Nearest(a.name, names)
	switch {
	case near != "":
		return fmt.Sprintf("no VF has this attribute; did you mean %s/%s?", domain, near)
	case domain == claim.Driver:
		return fmt.Sprintf("no VF has this attribute; attributes of %s: %s", claim.Driver, strings.Join(names, ", "))
	case isMisspeltDriver(domain):
		return "no driver has this name; did you mean " + claim.Driver + "?"
	case own:
		return "no VF has this attribute"
	}
	return ""
}

// isMisspeltDriver reports whether a name that is not the name of this driver resembles it.
func isMisspeltDriver(name string) bool {
	return strings.Contains(name, "podlace.") || strict.Nearest(name, []string{claim.Driver}) != ""
}
