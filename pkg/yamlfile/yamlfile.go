// SPDX-License-Identifier: Apache-2.0

// Package yamlfile reads YAML and JSON into values that know their line, column and key.
package yamlfile

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"sort"

	"go.yaml.in/yaml/v3"

	"github.com/podlace/podlace/pkg/strict"
)

// Read returns the documents of a YAML or JSON text. An error is a value of strict.Problems, with the documents before the fault.
func Read(file string, data []byte) (documents []strict.Value, err error) {
	decoder := yaml.NewDecoder(bytes.NewReader(data))
	r := yamlReader{strict.Report{File: file}, len(data) + 1000}
	for len(r.Problems) == 0 {
		var document yaml.Node
		err := decoder.Decode(&document)
		if errors.Is(err, io.EOF) {
			break
		}
		for _, n := range document.Content {
			documents = append(documents, r.read(n, strict.Place{File: file, Line: n.Line, Column: n.Column}, 0))
		}
		if err != nil {
			r.Fail(strict.Place{File: file, Line: faultyLine(data), Column: 1}, "%s", lineNumber.ReplaceAllString(err.Error(), ""))
		}
	}
	return documents, r.Err()
}

// lineNumber matches the line in an error of the YAML decoder, which is that of the mapping around the fault.
var lineNumber = regexp.MustCompile(`line \d+: `)

// faultyLine returns the first line with which the beginning of a text has the same fault as the whole text.
func faultyLine(data []byte) int {
	lines, fault := bytes.SplitAfter(data, []byte("\n")), decodeAll(data).Error()
	return 1 + sort.Search(len(lines)-1, func(n int) bool { return decodeAll(bytes.Join(lines[:n+1], nil)).Error() == fault })
}

// decodeAll returns the fault of a YAML text, or io.EOF.
func decodeAll(data []byte) (err error) {
	for decoder := yaml.NewDecoder(bytes.NewReader(data)); err == nil; {
		err = decoder.Decode(&yaml.Node{})
	}
	return err
}

// yamlReader converts YAML nodes into values. Aliases can make one much larger than the text, or endless.
type yamlReader struct {
	strict.Report
	left int // values that may still follow
}

// read converts a node. Words are read as in YAML 1.1, which kubectl uses.
func (r *yamlReader) read(n *yaml.Node, at strict.Place, depth int) strict.Value {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	if r.left--; r.left == 0 {
		r.Fail(strict.Place{File: r.File, Line: 1, Column: 1}, "aliases repeat so much that the text is too large")
	} else if n.Kind != yaml.ScalarNode && depth == strict.MaxDepth {
		r.Fail(strict.Place{File: r.File, Line: at.Line, Column: at.Column}, strict.TooDeep)
	}
	if len(r.Problems) > 0 {
		return strict.Value{Place: at}
	}
	switch n.Kind {
	case yaml.MappingNode:
		return strict.Value{Place: at, Data: r.object(n, at.Key, depth)}
	case yaml.SequenceNode:
		list := strict.List{}
		for i, item := range n.Content {
			place := strict.Place{File: r.File, Line: item.Line, Column: item.Column, Key: fmt.Sprintf("%s[%d]", at.Key, i)}
			list = append(list, r.read(item, place, depth+1))
		}
		return strict.Value{Place: at, Data: list}
	}
	var data any
	_ = n.Decode(&data) // a text that does not fit its tag stays a text

	// kubectl takes yes, no, on, off, y and n for booleans.
	if word := false; n.Style == 0 && n.ShortTag() == "!!str" && n.Decode(&word) == nil {
		data = word
	}
	switch data.(type) {
	case nil, bool, string:
	case int, int64, uint64, float64:
		data = json.Number(fmt.Sprint(data))
	default:
		data = n.Value // such as a time, which JSON does not have
	}
	return strict.Value{Place: at, Data: data}
}

// object reads a mapping from its end. As in kubectl, a merge (<<) adds keys that do not follow it, and replaces those before it, which
// become duplicates. Of a list of objects, the first with a key counts.
func (r *yamlReader) object(n *yaml.Node, path string, depth int) (object strict.Object) {
	later := map[string]bool{}
	for i := len(n.Content) - 2; i >= 0; i -= 2 {
		key := n.Content[i]
		name := cmp.Or(r.read(key, strict.Place{Line: key.Line, Column: key.Column}, depth+1).Text(), key.Value) // the key on is true
		place := strict.Place{File: r.File, Line: key.Line, Column: key.Column, Key: strict.Under(path, name)}
		v := r.read(n.Content[i+1], place, depth+1)
		if v.Name = name; key.Tag != "!!merge" || len(r.Problems) > 0 {
			object, later[v.Name] = append(object, v), true
			continue
		}
		for _, source := range append(v.Items(), v) {
			keys, ok := source.Data.(strict.Object)
			if _, list := source.Data.(strict.List); !ok && !list {
				r.Fail(source.Place, "%s: want an object, or a list of objects", source)
			}
			for _, m := range keys {
				if !later[m.Name] {
					object, later[m.Name] = append(object, m), true
				}
			}
		}
	}
	slices.Reverse(object)
	return object
}
