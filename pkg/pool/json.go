// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
)

// Place is a location in a configuration file.
type Place struct {
	File string `json:"file,omitempty"`
	Line int    `json:"line"`
	Key  string `json:"key,omitempty"` // resourceList[0].selectors.pfNames[1]
}

// below returns the place of a key or an item below p.
func (p Place) below(line int, below string) Place {
	if p.Key != "" && !strings.HasPrefix(below, "[") {
		below = "." + below
	}
	return Place{p.File, line, p.Key + below}
}

// Problem is an error or a warning about one place of a configuration.
type Problem struct {
	Place
	Text string `json:"text"`
}

// Error returns the problem in one line: file:line: key: text.
func (p Problem) Error() string {
	if p.Key == "" {
		return fmt.Sprintf("%s:%d: %s", p.File, p.Line, p.Text)
	}
	return fmt.Sprintf("%s:%d: %s: %s", p.File, p.Line, p.Key, p.Text)
}

// Limits of a configuration. Larger input is refused.
const (
	maxBytes    = 1 << 20
	maxDepth    = 16
	maxProblems = 100
)

type kind string

const (
	null    kind = "null"
	boolean kind = "a boolean"
	number  kind = "a number"
	text    kind = "a string"
	list    kind = "a list"
	object  kind = "an object"
)

// value is a JSON value with its place, which encoding/json does not report.
type value struct {
	Place
	kind    kind
	text    string // of a string or a number
	yes     bool   // value of a boolean
	items   []value
	members []member
}

type member struct {
	key   string
	value value
}

// tree reads JSON into values.
type tree struct {
	decoder *json.Decoder
	breaks  []int // offsets of the line breaks
	reader  *reader
}

// parseJSON returns the whole file as one value. It reports only the first syntax error.
func parseJSON(r *reader, data []byte) (value, bool) {
	root := Place{File: r.file, Line: 1}
	if bytes.HasPrefix(data, []byte("\xef\xbb\xbf")) {
		r.fail(root, "the file begins with a byte order mark (BOM): save it as UTF-8 without one")
		return value{}, false
	}
	if len(data) > maxBytes {
		r.fail(root, "too large: want at most %d bytes", maxBytes)
		return value{}, false
	}
	t := tree{json.NewDecoder(bytes.NewReader(data)), nil, r}
	for i, b := range data {
		if b == '\n' {
			t.breaks = append(t.breaks, i)
		}
	}
	t.decoder.UseNumber()
	var raw json.RawMessage
	if err := json.Unmarshal(data, &raw); err != nil {
		var syntax *json.SyntaxError
		if errors.As(err, &syntax) {
			root.Line = t.line(syntax.Offset - 1)
		}
		r.fail(root, "%v", err)
		return value{}, false
	}
	return t.value(root, 0)
}

// line returns the line number of an offset.
func (t *tree) line(offset int64) int {
	n, _ := slices.BinarySearch(t.breaks, int(offset))
	return n + 1
}

// value reads the next value. It fails if the nesting is too deep, and the caller must stop then.
func (t *tree) value(at Place, depth int) (value, bool) {
	token, err := t.decoder.Token()
	at.Line = t.line(t.decoder.InputOffset() - 1)
	v := value{Place: at}
	if err != nil || depth > maxDepth {
		t.reader.fail(at, "nested more than %d levels deep", maxDepth)
		return v, false
	}
	switch token := token.(type) {
	case nil:
		v.kind = null
	case bool:
		v.kind, v.yes = boolean, token
	case json.Number:
		v.kind, v.text = number, string(token)
	case string:
		v.kind, v.text = text, token
	case json.Delim:
		if token == '[' {
			return t.list(v, depth)
		}
		return t.object(v, depth)
	}
	return v, true
}

func (t *tree) list(v value, depth int) (value, bool) {
	v.kind = list
	for t.decoder.More() {
		item, ok := t.value(v.below(0, fmt.Sprintf("[%d]", len(v.items))), depth+1)
		if !ok {
			return v, false
		}
		v.items = append(v.items, item)
	}
	_, err := t.decoder.Token()
	return v, err == nil
}

func (t *tree) object(v value, depth int) (value, bool) {
	v.kind = object
	for t.decoder.More() {
		token, _ := t.decoder.Token()
		key, _ := token.(string)
		m, ok := t.value(v.below(0, quoteKey(key)), depth+1)
		if !ok {
			return v, false
		}
		v.members = append(v.members, member{key, m})
	}
	_, err := t.decoder.Token()
	return v, err == nil
}

// quoteKey returns a key for messages. A key that is long or would break the line is quoted and cut.
func quoteKey(key string) string {
	if quoted := fmt.Sprintf("%+.40q", key); len(quoted) != len(key)+2 || key == "" {
		return quoted
	}
	return key
}
