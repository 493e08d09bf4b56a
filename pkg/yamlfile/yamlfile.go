// SPDX-License-Identifier: Apache-2.0

// Package yamlfile reads YAML and JSON into values that know their line, column and key.
package yamlfile

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"sort"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/podlace/podlace/pkg/strict"
)

// Read returns the documents of a YAML or JSON text. An error is a value of strict.Problems, with the documents before the fault.
func Read(file string, data []byte) (documents []strict.Value, err error) {
	decoder := yaml.NewDecoder(bytes.NewReader(data))
	r := yamlReader{file, len(data) + 1000}
	for {
		var document yaml.Node
		err := decoder.Decode(&document)
		if errors.Is(err, io.EOF) {
			return documents, nil
		}
		for _, n := range document.Content {
			documents = append(documents, r.read(n, strict.Place{File: file, Line: n.Line, Column: n.Column}, 0))
		}
		line := 1
		if r.left <= 0 {
			err = errors.New("aliases repeat so much that the text is too large")
		} else if err != nil {
			line = faultyLine(data)
		}
		if err != nil {
			text := lineNumber.ReplaceAllString(err.Error(), "")
			return documents, strict.Problems{{Place: strict.Place{File: file, Line: line, Column: 1}, Text: text}}
		}
	}
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

// The type yamlReader converts YAML nodes into values. Aliases can make a value that is much larger than the text, or endless.
type yamlReader struct {
	file string
	left int // values that may still follow
}

const maxDepth = 100 // levels of nesting

func (r *yamlReader) read(n *yaml.Node, at strict.Place, depth int) strict.Value {
	if n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	if r.left--; r.left <= 0 || depth > maxDepth {
		r.left = 0
		return strict.Value{Place: at}
	}
	switch n.Kind {
	case yaml.MappingNode:
		return strict.Value{Place: at, Data: r.object(n, at.Key, depth)}
	case yaml.SequenceNode:
		list := strict.List{}
		for i, item := range n.Content {
			place := strict.Place{File: r.file, Line: item.Line, Column: item.Column, Key: fmt.Sprintf("%s[%d]", at.Key, i)}
			list = append(list, r.read(item, place, depth+1))
		}
		return strict.Value{Place: at, Data: list}
	}
	var data any
	_ = n.Decode(&data) // a text that does not fit its tag stays a text
	switch data.(type) {
	case nil, bool, string:
	case int, int64, uint64, float64:
		data = json.Number(fmt.Sprint(data))
	default:
		data = n.Value // such as a time, which JSON does not have
	}
	return strict.Value{Place: at, Data: data}
}

// object() reads a mapping. The keys of a merge (<<) come last, without those that the mapping has itself.
func (r *yamlReader) object(n *yaml.Node, path string, depth int) strict.Object {
	object, merged := strict.Object{}, strict.Object{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		key := n.Content[i]
		place := strict.Place{File: r.file, Line: key.Line, Column: key.Column, Key: strings.TrimPrefix(path+"."+key.Value, ".")}
		v := r.read(n.Content[i+1], place, depth+1)
		v.Name = key.Value
		if inner, ok := v.Data.(strict.Object); ok && key.Tag == "!!merge" {
			merged = append(merged, inner...)
			continue
		}
		object = append(object, v)
	}
	for _, v := range merged {
		if !slices.ContainsFunc(object, func(own strict.Value) bool { return own.Name == v.Name }) {
			object = append(object, v)
		}
	}
	return object
}
