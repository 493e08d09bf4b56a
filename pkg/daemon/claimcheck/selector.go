// SPDX-License-Identifier: Apache-2.0

package claimcheck

import (
	"fmt"
	"maps"
	"reflect"
	"regexp"
	"slices"
	"strings"

	"github.com/google/cel-go/common/ast"
	"github.com/google/cel-go/common/operators"
	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/dynamic-resource-allocation/cel"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/strict"
)

// A selector is a CEL expression that selects devices.
type selector struct {
	cel.CompilationResult
	place   string
	reads   []read
	drivers []string // with which it compares device.driver
}

// A read is a place in an expression that reads an attribute.
type read struct {
	attribute
	guarded  bool // it is no error if a device lacks the attribute
	operator string
	values   []any // literals to which the operator compares it
}

func (r read) isEquality() bool { return r.operator == operators.Equals || r.operator == operators.In }

// celFault matches an error of the CEL compiler: line and column in the expression, and the text.
var celFault = regexp.MustCompile(`ERROR: <input>:(\d+):(\d+): (.*)`)

// compile compiles the selectors of a class or of a request. It reports false if one of them is no valid CEL expression.
func (c *checker) compile(m manifest, path string, list []resourceapi.DeviceSelector) (out []selector, ok bool) {
	ok = true
	for i, one := range list {
		at := m.at(fmt.Sprintf("%s.selectors[%d].cel.expression", path, i))
		if one.CEL == nil || strings.TrimSpace(one.CEL.Expression) == "" {
			c.fail("%s is missing", at)
			ok = false
			continue
		}
		s := selector{CompilationResult: c.compiled.GetOrCompile(one.CEL.Expression), place: at}
		if s.Error != nil {
			text := s.Error.Detail
			if fault := celFault.FindStringSubmatch(text); fault != nil {
				text = fmt.Sprintf("line %s, character %s: %s", fault[1], fault[2], fault[3])
			}
			c.fail("%s: %s", at, text)
			ok = false
			continue
		}
		s.inspect()
		out = append(out, s)
	}
	return out, ok
}

// inspect finds the attributes that the expression reads, and the drivers that it compares.
func (s *selector) inspect() {
	parsed, _ := s.Environment.Compile(s.Expression) // it was compiled before
	bound, seen := map[string]string{}, map[int64]bool{}
	add := func(e ast.Expr, operator string, values []any) {
		if a, guarded, ok := attributeOf(e, bound); ok && !seen[e.ID()] {
			s.reads = append(s.reads, read{a, guarded, operator, values})
			seen[e.ID()] = true
		}
	}
	ast.PreOrderVisit(parsed.NativeRep().Expr(), ast.NewExprVisitor(func(e ast.Expr) {
		switch e.Kind() {
		case ast.ComprehensionKind: // cel.bind(name, device.attributes["domain"], ...)
			bound[e.AsComprehension().AccuVar()] = domainOf(e.AsComprehension().AccuInit(), bound)
		case ast.CallKind:
			s.inspectCall(e.AsCall(), add)
		}
		add(e, "", nil)
	}))
}

// inspectCall finds an attribute, or the driver, that a call compares with literals.
func (s *selector) inspectCall(call ast.CallExpr, add func(ast.Expr, string, []any)) {
	args := call.Args()
	if len(args) != 2 {
		return
	}
	for i, arg := range args {
		values := literals(args[1-i])
		if isDriver(arg) {
			for _, v := range values {
				s.drivers = append(s.drivers, fmt.Sprint(v))
			}
		} else if len(values) > 0 {
			add(arg, call.FunctionName(), values)
		}
	}
}

func isDriver(e ast.Expr) bool {
	device, name, _ := member(e)
	return name == "driver" && isIdent(device, "device")
}

func isIdent(e ast.Expr, name string) bool { return e.Kind() == ast.IdentKind && e.AsIdent() == name }

// literals returns the value of a literal, or the values in a list of literals.
func literals(e ast.Expr) (values []any) {
	switch e.Kind() {
	case ast.LiteralKind:
		return []any{e.AsLiteral().Value()}
	case ast.ListKind:
		for _, element := range e.AsList().Elements() {
			values = append(values, literals(element)...)
		}
	}
	return values
}

// member returns the operand and the name in operand.name or operand["name"], and whether it is no error if the operand lacks the name.
func member(e ast.Expr) (operand ast.Expr, name string, guarded bool) {
	switch e.Kind() {
	case ast.SelectKind:
		s := e.AsSelect()
		return s.Operand(), s.FieldName(), s.IsTestOnly()
	case ast.CallKind:
		args, function := slices.Clone(e.AsCall().Args()), e.AsCall().FunctionName()
		if function == operators.In {
			slices.Reverse(args)
		} else if !slices.Contains([]string{operators.Index, operators.OptSelect, operators.OptIndex}, function) {
			break
		}
		if values := literals(args[1]); len(values) == 1 {
			return args[0], fmt.Sprint(values[0]), function != operators.Index
		}
	}
	return nil, "", false
}

// attributeOf returns the attribute that an expression reads, and whether the read is safe if a device lacks the attribute.
func attributeOf(e ast.Expr, bound map[string]string) (a attribute, guarded, ok bool) {
	from, name, guarded := member(e)
	if from == nil {
		return a, false, false
	}
	a = attribute{domainOf(from, bound), name}
	return a, guarded, a.domain != "" && a.name != ""
}

// domainOf returns the domain of device.attributes["domain"] or of a name that is bound to it, or "".
func domainOf(e ast.Expr, bound map[string]string) string {
	if e.Kind() == ast.IdentKind {
		return bound[e.AsIdent()]
	}
	if attributes, domain, _ := member(e); attributes != nil {
		if device, name, _ := member(attributes); name == "attributes" && isIdent(device, "device") {
			return domain
		}
	}
	return ""
}

// otherDriver returns a driver without devices here for whose devices the selectors are meant, or "".
func (c *checker) otherDriver(list []selector) string {
	for _, s := range list {
		if len(s.drivers) > 0 && !slices.ContainsFunc(s.drivers, func(d string) bool { return d == claim.Driver || c.drivers[d] }) {
			return s.drivers[0]
		}
	}
	return ""
}

// checkReads reports attributes that no device has, and comparisons with a value of another type.
func (c *checker) checkReads(list []selector) (ok bool) {
	before := len(c.problems)
	for _, s := range list {
		for _, r := range s.reads {
			c.checkRead(s, r)
		}
	}
	return len(c.problems) == before
}

func (c *checker) checkRead(s selector, r read) {
	value, own := c.own[r.attribute]
	elsewhere := slices.ContainsFunc(s.drivers, func(d string) bool { return d != claim.Driver })
	switch {
	case own:
		for _, v := range r.values {
			form := forms()[r.name]
			switch text, isText := v.(string); {
			case r.operator == operators.NotEquals:
			case reflect.TypeOf(v) != reflect.TypeOf(value):
				c.fail("%s: it compares %s with %s, but the type of the attribute is %s", s.place, r, literal(v), typeName(value))
			case isText && r.isEquality() && form != "" && !regexp.MustCompile("^("+form+")$").MatchString(text):
				c.fail("%s: it compares %s with %s, which no VF can have: want a value such as %s", s.place, r, literal(v), c.describe(r.attribute))
			}
		}
	case len(c.values[r.attribute]) > 0 || elsewhere:
	case r.guarded && slices.ContainsFunc(s.reads, func(o read) bool { return o.attribute == r.attribute && !o.guarded }):
	case r.guarded:
		c.notice("%s: it tests for %s: %s", s.place, r, c.unknown(r.attribute, attribute.expression))
	default:
		c.fail("%s: it reads %s: %s", s.place, r, c.unknown(r.attribute, attribute.expression))
	}
}

// forms returns regular expressions for the attributes whose values have a fixed form.
func forms() map[string]string {
	const digits, address = "[0-9a-f]{4}", "[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}[.][0-7]"
	return map[string]string{"vendor": digits, "product": digits, "kind": "vf|pf|no-pf", "linkType": "ether|infiniband", "pfAddress": address,
		"pciBusID": address, "resource": ".+/.+"}
}

func typeName(v any) string { return strings.TrimSuffix(reflect.TypeOf(v).String(), "64") }

// noKey matches the error of CEL for an attribute that a device lacks.
var noKey = regexp.MustCompile(`no such key: (\w+)`)

// matching returns the devices that all selectors match. Like the scheduler, it stops at the first that does not. ok is false if an
// evaluation fails, also for devices of other drivers and for VFs without a NUMA node, which other nodes may have.
func (c *checker) matching(list []selector) (matched []device, ok bool) {
	if _, ok = c.evaluate(list, device{driver: "other.example.com"}); !ok {
		return nil, false
	}
	for _, d := range c.devices {
		match, ok := c.evaluate(list, d)
		if match {
			matched = append(matched, d)
		}
		if ok && d.driver == claim.Driver {
			d.Attributes = maps.Clone(d.Attributes)
			maps.DeleteFunc(d.Attributes, func(name resourceapi.QualifiedName, _ resourceapi.DeviceAttribute) bool {
				return strings.HasSuffix(string(name), "/numaNode")
			})
			_, ok = c.evaluate(list, d)
		}
		if !ok {
			return nil, false
		}
	}
	return matched, true
}

// evaluate reports whether all selectors match a device, and false as second result if one of them fails.
func (c *checker) evaluate(list []selector, d device) (match, ok bool) {
	for _, s := range list {
		match, _, err := s.DeviceMatches(c.ctx, cel.Device{Driver: d.driver, AllowMultipleAllocations: d.AllowMultipleAllocations,
			Attributes: d.Attributes, Capacity: d.Capacity})
		if err != nil {
			where, hint := s.failure(d, err)
			c.fail("%s: it fails on %s, and the scheduler then starts the pod on no node: %s", s.place, where, hint)
		}
		if err != nil || !match {
			return false, err == nil
		}
	}
	return true, true
}

// failure describes the devices on which a selector fails, and what to write instead.
func (s selector) failure(d device, err error) (where, hint string) {
	key := noKey.FindStringSubmatch(err.Error())
	i := slices.IndexFunc(s.reads, func(r read) bool { return len(key) > 0 && r.name == key[1] && !r.guarded })
	switch {
	case d.Name == "":
		return fmt.Sprintf("devices of other drivers (%v)", err), fmt.Sprintf("begin with device.driver == %q &&", claim.Driver)
	case i < 0 && d.driver == claim.Driver && strings.Contains(s.Expression, "device.capacity"):
		return "VFs, which have no capacity", fmt.Sprintf("%v: select by attributes", err)
	case i < 0:
		return "device " + d.Name, err.Error()
	}
	hint = fmt.Sprintf("write %q in device.attributes[%q] && first", key[1], s.reads[i].domain)
	if key[1] == "numaNode" {
		hint += ", or compare " + attribute{claim.Driver, "numa"}.expression() + ", which every VF has"
	}
	return "a device without " + s.reads[i].String(), hint
}

// checkValues reports comparisons with a value that no device has. They are problems if the selectors match no device at all.
func (c *checker) checkValues(list []selector, report func(string, ...any)) (found bool) {
	for _, s := range list {
		for _, r := range s.reads {
			have := c.values[r.attribute]
			if !r.isEquality() || len(have) == 0 ||
				slices.ContainsFunc(r.values, func(v any) bool { return have[v] }) {
				continue
			}
			say, hint := report, ""
			near := strict.Nearest(literal(r.values[0]), c.literals(r.attribute))
			if _, text := r.values[0].(string); text && near != "" {
				hint = fmt.Sprintf("; did you mean %s?", near)
			}
			if r.attribute == (attribute{claim.Driver, "resource"}) {
				say, hint = c.fail, hint+`; a resource has devices if it is in the configuration, with "api": "dra"`
			}
			say("%s: it compares %s with %s, which no device here has: they have %s%s", s.place, r, literal(r.values[0]),
				c.describe(r.attribute), hint)
			found = true
		}
	}
	return found
}
