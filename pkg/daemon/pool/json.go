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

// Place is the position of a value in a configuration file.
type Place struct {
	File string `json:"file,omitempty"`
	Line int    `json:"line"`
	Key  string `json:"key,omitempty"` // resourceList[0].selectors.pfNames[1]
}

// child() returns the line and the path of a key or item inside the value at p.
func (p Place) child(line int, below string) Place {
	if p.Key != "" && !strings.HasPrefix(below, "[") {
		below = "." + below
	}
	return Place{p.File, line, p.Key + below}
}

// Problem is an error or a warning with its position in a configuration.
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

// Limits of a configuration: bytes, nesting levels and reported problems. Parse refuses larger input.
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

// The type value is a JSON value with its position in the file. encoding/json does not provide this position.
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

// The type treeReader converts JSON text into values with positions.
type treeReader struct {
	decoder *json.Decoder
	breaks  []int // offsets of the line breaks
	reader  *reader
}

// parseJSON parses a file and returns it as one value. If the JSON is invalid, parseJSON reports only the first syntax error.
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
	t := treeReader{json.NewDecoder(bytes.NewReader(data)), nil, r}
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
			root.Line = t.lineOf(syntax.Offset - 1)
		}
		r.fail(root, "%v", err)
		return value{}, false
	}
	return t.readValue(root, 0)
}

// lineOf returns the line number of the byte at an offset in the file.
func (t *treeReader) lineOf(offset int64) int {
	n, _ := slices.BinarySearch(t.breaks, int(offset))
	return n + 1
}

// readValue reads the next value. If the nesting is too deep, readValue returns false as its second result, and the caller must stop.
func (t *treeReader) readValue(at Place, depth int) (value, bool) {
	token, err := t.decoder.Token()
	at.Line = t.lineOf(t.decoder.InputOffset() - 1)
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

func (t *treeReader) list(v value, depth int) (value, bool) {
	v.kind = list
	for t.decoder.More() {
		item, ok := t.readValue(v.child(0, fmt.Sprintf("[%d]", len(v.items))), depth+1)
		if !ok {
			return v, false
		}
		v.items = append(v.items, item)
	}
	_, err := t.decoder.Token()
	return v, err == nil
}

func (t *treeReader) object(v value, depth int) (value, bool) {
	v.kind = object
	for t.decoder.More() {
		token, _ := t.decoder.Token()
		key, _ := token.(string)
		m, ok := t.readValue(v.child(0, quoteKey(key)), depth+1)
		if !ok {
			return v, false
		}
		v.members = append(v.members, member{key, m})
	}
	_, err := t.decoder.Token()
	return v, err == nil
}

// quoteKey returns a key for messages. quoteKey quotes and truncates a key that is long or contains special characters.
func quoteKey(key string) string {
	if quoted := fmt.Sprintf("%+.40q", key); len(quoted) != len(key)+2 || key == "" {
		return quoted
	}
	return key
}
