// SPDX-License-Identifier: Apache-2.0

// Package strict reads the files that people write. It parses JSON into values that know their line, column and key. A Report then checks
// them against the known keys and collects every fault instead of stopping at the first.
package strict

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unicode/utf8"
)

// Place is the position of a key with its value, or of an item in a list.
type Place struct {
	File   string `json:"file,omitempty"`
	Line   int    `json:"line"`
	Column int    `json:"column"`        // in characters, from 1
	Key    string `json:"key,omitempty"` // path, such as resourceList[0].selectors.pfNames[1]
}

// Where returns the position in the form file:line:column: key. Without a file it returns only the key.
func (p Place) Where() string {
	if p.File == "" {
		return p.Key
	}
	return strings.TrimSuffix(fmt.Sprintf("%s:%d:%d: %s", p.File, p.Line, p.Column, p.Key), ": ")
}

// Problem is an error or a warning about one position in a file.
type Problem struct {
	Place
	Text string `json:"text"`
}

// Error returns the problem in one line.
func (p Problem) Error() string { return strings.TrimPrefix(p.Where()+": "+p.Text, ": ") }

// Problems is the error of a file with at least one problem.
type Problems []Problem

// maxLines is the most lines of an error, because a generated file can have the same fault a thousand times.
const maxLines = 100

// Error returns one line for each problem.
func (p Problems) Error() string {
	var lines []string
	for _, problem := range p[:min(len(p), maxLines)] {
		lines = append(lines, problem.Error())
	}
	if more := len(p) - maxLines; more > 0 {
		lines = append(lines, fmt.Sprintf("%s: %d more errors", p[0].File, more))
	}
	return strings.Join(lines, "\n")
}

// Value is a value of a file. Its data is nil, a bool, a json.Number, a string, a List or an Object.
type Value struct {
	Place
	Name string // key in the object around it
	Data any
}

// List is the data of a value that contains values without names.
type List []Value

// Object is the data of a value that contains values with names, in the order of the file. Names may repeat.
type Object []Value

// String returns the value for messages: a short text as it stands in the file, or the type of a list or object.
func (v Value) String() string {
	switch data := v.Data.(type) {
	case nil:
		return "null"
	case string:
		return fmt.Sprintf("%+.40q", data)
	case List:
		return "a list"
	case Object:
		return "an object"
	}
	return fmt.Sprintf("%.40s", fmt.Sprint(v.Data))
}

// Walk calls a function for each value inside v. The function may change the data of the value.
func (v Value) Walk(visit func(v *Value)) {
	inner := v.Items()
	if object, ok := v.Data.(Object); ok {
		inner = object
	}
	for i := range inner {
		visit(&inner[i])
		inner[i].Walk(visit)
	}
}

// At returns the place of a key below v. For a missing key it is the place of the innermost value on the way, with the full key.
func (v Value) At(key string) Place {
	at := v.Place
	object, _ := v.Data.(Object)
	for _, inner := range append(v.Items(), object...) {
		if rest, ok := strings.CutPrefix(key, inner.Key); ok && (rest == "" || rest[0] == '.' || rest[0] == '[') {
			at = inner.At(key)
		}
	}
	at.Key = key
	return at
}

// Get returns the value at a path of names below v. It is a value without data if there is none.
func (v Value) Get(path ...string) Value {
	for _, name := range path {
		object, _ := v.Data.(Object)
		v = Value{}
		for _, m := range object {
			if m.Name == name {
				v = m
			}
		}
	}
	return v
}

// Items returns the items of a list, or nothing for another value.
func (v Value) Items() []Value {
	list, _ := v.Data.(List)
	return list
}

// Text returns the text of a string, number or boolean, or "".
func (v Value) Text() string {
	switch v.Data.(type) {
	case nil, List, Object:
		return ""
	}
	return fmt.Sprint(v.Data)
}

// MarshalJSON returns the value as JSON.
func (v Value) MarshalJSON() ([]byte, error) {
	object, ok := v.Data.(Object)
	if !ok {
		return json.Marshal(v.Data)
	}
	members := map[string]any{}
	for _, m := range object {
		members[m.Name] = m
	}
	return json.Marshal(members)
}

// Report collects the problems of a file.
type Report struct {
	File     string
	Key      string // path of the outermost value, if it is part of another object
	Lenient  bool   // as in encoding/json, null is no value, and the case of keys does not matter
	Problems Problems
	Notes    []Problem // about valid keys
}

// Fail adds a problem.
func (r *Report) Fail(at Place, format string, args ...any) {
	r.Problems = append(r.Problems, Problem{at, fmt.Sprintf(format, args...)})
}

// Note adds a problem that is no error.
func (r *Report) Note(at Place, format string, args ...any) {
	r.Notes = append(r.Notes, Problem{at, fmt.Sprintf(format, args...)})
}

// Err returns all problems in the order of the file, or nil if there are none.
func (r *Report) Err() error {
	if len(r.Problems) == 0 {
		return nil
	}
	Sort(r.Problems)
	return r.Problems
}

// Sort sorts problems by their line. Those of one line keep their order.
func Sort(problems []Problem) {
	slices.SortStableFunc(problems, func(a, b Problem) int { return a.Line - b.Line })
}

// MaxDepth is the most levels of nesting in JSON and YAML. The paths of deeper values would take quadratic memory.
const (
	MaxDepth = 100
	TooDeep  = "nested more than 100 levels deep"
)

// ParseJSON parses a JSON text. It reports false if the text is no JSON, with the first syntax error only.
func (r *Report) ParseJSON(data []byte) (Value, bool) {
	p := parser{r, json.NewDecoder(bytes.NewReader(data)), data, 0, Place{File: r.File, Line: 1, Column: 1, Key: r.Key}}
	root := p.at
	if IsUTF16(data) {
		r.Fail(root, "the file is in UTF-16: save it as UTF-8")
		return Value{}, false
	}
	if bytes.HasPrefix(data, []byte("\xef\xbb\xbf")) {
		r.Fail(root, "the file begins with a byte order mark (BOM): save it as UTF-8 without one")
		return Value{}, false
	}
	var raw json.RawMessage
	if err := json.Unmarshal(data, &raw); err != nil {
		text, end := "the text ends here: a }, a ] or a quote is missing", len(data)
		if len(bytes.TrimSpace(data)) == 0 {
			text = "the text is empty: want JSON"
		}
		var wrong *json.SyntaxError
		if errors.As(err, &wrong) && wrong.Error() != "unexpected end of JSON input" {
			text = "no JSON: " + wrong.Error()
			if !strings.HasSuffix(text, "after top-level value") {
				text += "; put commas between keys but not after the last, and quotes around keys and strings"
			}
			end = int(wrong.Offset) - 1 // the offset is after the character
		}
		p.moveTo(end)
		r.Fail(p.at, "%s", text)
		return Value{}, false
	}
	p.decoder.UseNumber()
	return p.value(root, 0)
}

// IsUTF16 reports whether a text begins with a byte order mark of UTF-16.
func IsUTF16(data []byte) bool {
	return bytes.HasPrefix(data, []byte("\xff\xfe")) || bytes.HasPrefix(data, []byte("\xfe\xff"))
}

// parser converts the tokens of valid JSON into values with their places.
type parser struct {
	report  *Report
	decoder *json.Decoder
	data    []byte
	read    int   // bytes before the current position
	at      Place // current position, with the key of the outermost value
}

// moveTo moves the current position forward to an offset. Counting from the beginning of the text would take quadratic time.
func (p *parser) moveTo(offset int) {
	passed := p.data[p.read:max(p.read, min(offset, len(p.data)))]
	if last := bytes.LastIndexByte(passed, '\n'); last >= 0 {
		p.at.Line, p.at.Column = p.at.Line+bytes.Count(passed, []byte("\n")), 1
		passed = passed[last+1:]
	}
	p.at.Column += utf8.RuneCount(passed)
	p.read = max(p.read, offset)
}

// value reads the next value, which stands at a place. It returns false if the nesting is too deep.
func (p *parser) value(at Place, depth int) (Value, bool) {
	token, _ := p.decoder.Token()
	open, nested := token.(json.Delim)
	if !nested {
		return Value{Place: at, Data: token}, true
	}
	if depth == MaxDepth {
		p.report.Fail(Place{at.File, at.Line, at.Column, p.report.Key}, TooDeep)
		return Value{}, false
	}
	var inner []Value
	for p.decoder.More() {
		after := int(p.decoder.InputOffset())
		p.moveTo(len(p.data) - len(bytes.TrimLeft(p.data[after:], ", \t\r\n")))
		below, name := p.at, ""
		below.Key = fmt.Sprintf("%s[%d]", at.Key, len(inner))
		if open == '{' {
			token, _ := p.decoder.Token()
			name, _ = token.(string)
			below.Key = Under(at.Key, name)
		}
		v, ok := p.value(below, depth+1)
		if !ok {
			return Value{}, false
		}
		v.Name = name
		inner = append(inner, v)
	}
	_, err := p.decoder.Token()
	if open == '{' {
		return Value{Place: at, Data: Object(inner)}, err == nil
	}
	return Value{Place: at, Data: append(List{}, inner...)}, err == nil
}

// Under returns the path of a name in the object at a path. A name that is long or has special characters is quoted and shortened.
func Under(path, name string) string {
	if quoted := fmt.Sprintf("%+.40q", name); len(quoted) != len(name)+2 || name == "" {
		name = quoted
	}
	return strings.TrimPrefix(path+"."+name, ".")
}
