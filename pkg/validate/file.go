// SPDX-License-Identifier: Apache-2.0

package validate

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/nodefile"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/pool"
)

// Problem is an error or a warning about a place in a file.
type Problem struct {
	pool.Place
	Error bool   `json:"error"` // pods or the daemon fail; otherwise the setting does not have the effect that it suggests
	Text  string `json:"text"`
}

// String returns the problem in the form file:line: key: level: text.
func (p Problem) String() string {
	parts := []string{fmt.Sprintf("%s:%d", p.File, p.Line)}
	if p.Key != "" {
		parts = append(parts, p.Key)
	}
	level := "warning"
	if p.Error {
		level = "error"
	}
	return strings.Join(append(parts, level, p.Text), ": ")
}

// File is the name and the content of a file to validate.
type File struct {
	Name string
	Data []byte
}

// Files returns the problems of each file. Files also returns conflicts between the networks in different files. Files does no I/O, except
// for reading a file that the key resolvConf names.
func Files(files []File, node Node) []Problem {
	c := &checker{node: node}
	for _, f := range files {
		c.file(f)
	}
	c.clashes()
	return c.problems
}

// checker collects problems.
type checker struct {
	node     Node
	problems []Problem
	networks []network
}

// The type part is a part of a file: either the whole file, or a string in a manifest that contains JSON.
type part struct {
	file   string
	line   int // lines of the file before the part
	total  int // lines of the file
	key    string
	multus bool // Multus runs the plugins, and passes the device that a pod was allocated
	data   []byte
	lines  map[string]int // of its keys
}

// The method add() adds a problem with a line of the part.
func (c *checker) add(t part, line int, key string, isError bool, format string, args ...any) {
	if t.key != "" {
		key = strings.TrimSuffix(t.key+": "+key, ": ")
	}
	place := pool.Place{File: t.file, Line: min(t.line+max(line, 1), t.total), Key: key} // YAML's errors may be after the end
	c.problems = append(c.problems, Problem{place, isError, fmt.Sprintf(format, args...)})
}

func (c *checker) file(f File) {
	whole := part{file: f.Name, total: 1 + bytes.Count(f.Data, []byte("\n")), data: f.Data}
	if trimmed := bytes.TrimSpace(f.Data); len(trimmed) == 0 {
		c.add(whole, 1, "", true, "the file is empty")
	} else if trimmed[0] == '{' {
		c.json(whole)
	} else {
		c.manifests(whole)
	}
}

// The method json() checks a JSON object. The keys of the object show what kind of object it is.
func (c *checker) json(t part) {
	var keys map[string]json.RawMessage
	if err := json.Unmarshal(t.data, &keys); err != nil {
		c.syntax(t, err)
		return
	}
	t.lines = plugin.KeyLines(t.data)
	has := func(names ...string) bool {
		return slices.ContainsFunc(names, func(name string) bool { return keys[name] != nil })
	}
	switch {
	case has("apiVersion") && has("kind"):
		c.manifests(t)
	case has("resourceList", "pfs"):
		c.pools(t)
	case has("plugins", "type", "cniVersion"):
		c.network(t)
	case has("podCIDRs"):
		c.nodeFile(t)
	default:
		c.add(t, 1, "", true, "the object is no network configuration (plugins or type), no configuration of sriov-device-plugin (resourceList), "+
			"no node.json (podCIDRs) and no object of Kubernetes (apiVersion and kind)")
	}
}

// The method syntax() reports a JSON error. The method syntax() computes the line from the offset in the error.
func (c *checker) syntax(t part, err error) {
	line := 1
	var at *json.SyntaxError
	if errors.As(err, &at) {
		line = 1 + bytes.Count(t.data[:min(int(at.Offset), len(t.data))], []byte("\n"))
	}
	c.add(t, line, "", true, "%v", err)
}

// anyPrefix is used in place of the daemon's --resource-prefix. No check depends on this prefix.
const anyPrefix = "example.com"

// The method pools() checks a configuration of sriov-device-plugin.
func (c *checker) pools(t part) {
	config, err := pool.Parse(pool.Source{File: t.file, Prefix: anyPrefix}, t.data)
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		for _, err := range joined.Unwrap() {
			var p pool.Problem
			if errors.As(err, &p) {
				c.add(t, p.Line, p.Key, true, "%s", p.Text)
			} else {
				c.add(t, 1, "", true, "%v", err)
			}
		}
	}
	if config == nil {
		return
	}
	for _, p := range config.Notes {
		c.add(t, p.Line, p.Key, false, "%s", p.Text)
	}
	for _, r := range config.Resources {
		for _, p := range r.Unserved {
			c.add(t, p.Line, p.Key, false, "%s", p.Text)
		}
	}
}

// The method nodeFile() checks node.json, the file with which plugins get data about the node.
func (c *checker) nodeFile(t part) {
	if _, err := nodefile.Parse(t.data); err != nil {
		key, line := t.mentioned(err.Error())
		c.add(t, line, key, true, "%v", err)
	}
	for _, f := range append(plugin.DuplicateKeys(t.data), plugin.UnknownKeys(t.data, "", nodefile.Node{})...) {
		if f.Key != "cniVersion" {
			c.add(t, t.lineOf(f.Key), f.Key, false, "%s", f.Text)
		}
	}
}

// lineOf returns the line of a key. If the key has no line, the result is the line of the nearest enclosing object.
func (t part) lineOf(key string) int {
	for ; key != ""; key = key[:max(strings.LastIndexAny(key, ".["), 0)] {
		if line, ok := t.lines[key]; ok {
			return line
		}
	}
	return 1
}

var word = regexp.MustCompile(`[A-Za-z][A-Za-z0-9]*`)

// The method mentioned() finds the first word of a message that is a key in the part, and returns this key with its line. The first words
// of each message contain the key.
func (t part) mentioned(message string) (key string, line int) {
	for _, name := range word.FindAllString(message, -1) {
		for path, at := range t.lines {
			if last := path[strings.LastIndexAny(path, ".")+1:]; strings.EqualFold(last, name) && (key == "" || at < line) {
				key, line = path, at
			}
		}
		if key != "" {
			return key, line
		}
	}
	return "", 1
}
