// SPDX-License-Identifier: Apache-2.0

package validate

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/nodefile"
	"github.com/podlace/podlace/pkg/plugin"
)

// Problem is an error or a warning about one position in a file.
type Problem struct {
	File   string             `json:"file,omitempty"`
	Line   int                `json:"line"`
	Column int                `json:"column"` // in characters, from 1
	Key    string             `json:"key,omitempty"`
	Code   plugin.FindingCode `json:"code"`
	Error  bool               `json:"error"` // pods or the daemon fail; otherwise the setting does not have the effect that it suggests
	Text   string             `json:"text"`
}

// String returns the problem in the form file:line:column: key: level: text [code].
func (p Problem) String() string {
	level := "warning"
	if p.Error {
		level = "error"
	}
	return fmt.Sprintf("%s: %s: %s [%s]", p.Where(), level, p.Text, p.Code)
}

// Where returns the position of the problem in the form file:line:column: key.
func (p Problem) Where() string {
	return strings.TrimSuffix(fmt.Sprintf("%s:%d:%d: %s", p.File, p.Line, p.Column, p.Key), ": ")
}

// File is the name and the content of a file to validate.
type File struct {
	Name string
	Data []byte
}

// Files returns the problems of each file. Files also returns conflicts between the networks in different files. Files does no I/O, except
// that Files reads the file whose path is the value of the key resolvConf.
func Files(files []File, node Node) []Problem {
	c := &checker{node: node}
	for _, f := range files {
		c.file(f)
	}
	c.clashes()
	return c.problems
}

// The type `checker` collects the problems of all files.
type checker struct {
	node     Node
	problems []Problem
	networks []network
	claims   bool // the file contains a ResourceClaim, a ResourceClaimTemplate or a DeviceClass
}

// The type `part` is either a whole file, or a string with JSON text in a manifest.
type part struct {
	file   string
	line   int // lines of the file before the part
	total  int // lines of the file
	key    string
	multus bool // Multus runs the plugins, and passes the device that a pod was allocated
	data   []byte
	source []byte                  // the whole file
	places map[string]plugin.Place // of its keys
}

// The method add() adds a problem. The argument `at` is the position of the problem within the part.
func (c *checker) add(t part, at plugin.Place, key string, code plugin.FindingCode, isError bool, format string, args ...any) {
	if t.key != "" {
		key = strings.TrimSuffix(t.key+": "+key, ": ")
	}
	at = t.inFile(at)
	c.problems = append(c.problems, Problem{t.file, at.Line, at.Column, key, code, isError, fmt.Sprintf(format, args...)})
}

// inFile converts a position within the part to a position in the file. If the exact column cannot be computed, inFile returns the
// position of the first word of the line.
func (t part) inFile(at plugin.Place) plugin.Place {
	line := min(t.line+max(at.Line, 1), t.total) // YAML's errors may be after the end
	outer, inner := lineOf(t.source, line), lineOf(t.data, max(at.Line, 1))
	begins := bytes.Index(outer, inner)
	if at.Column == 0 || begins < 0 || len(inner) == 0 {
		return plugin.Place{Line: line, Column: 1 + len(outer) - len(bytes.TrimLeft(outer, " \t-"))}
	}
	return plugin.Place{Line: line, Column: at.Column + utf8.RuneCount(outer[:begins])}
}

// lineOf returns the text of the line with the given number. The first line has the number 1.
func lineOf(text []byte, line int) []byte {
	for ; line > 1; line-- {
		_, text, _ = bytes.Cut(text, []byte("\n"))
	}
	first, _, _ := bytes.Cut(text, []byte("\n"))
	return first
}

func (c *checker) file(f File) {
	whole := part{file: f.Name, total: 1 + bytes.Count(f.Data, []byte("\n")), data: f.Data, source: f.Data}
	if trimmed := bytes.TrimSpace(f.Data); len(trimmed) == 0 {
		c.add(whole, plugin.Place{}, "", emptyFile, true, "the file is empty")
	} else if trimmed[0] == '{' {
		c.json(whole)
	} else {
		c.manifests(whole)
	}
}

// The method json() checks a JSON object. The keys of the object determine the kind of the object.
func (c *checker) json(t part) {
	var keys map[string]json.RawMessage
	if err := json.Unmarshal(t.data, &keys); err != nil {
		c.syntax(t, err)
		return
	}
	t.places = plugin.KeyPlaces(t.data)
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
		c.add(t, plugin.Place{}, "", unknownFile, true, "the object is no network configuration (plugins or type), no configuration of sriov-device-plugin (resourceList), "+
			"no node.json (podCIDRs) and no object of Kubernetes (apiVersion and kind)")
	}
}

// The method syntax() reports a JSON error. The method syntax() computes the line from the offset in the error.
func (c *checker) syntax(t part, err error) {
	var place plugin.Place
	var at *json.SyntaxError
	if errors.As(err, &at) {
		place = plugin.PlaceAt(t.data, int(at.Offset)-1) // the offset is after the character
	}
	c.add(t, place, "", syntax, true, "%v", err)
}

// anyPrefix takes the place of the device plugin's option --resource-prefix. The checks give the same result for any prefix.
const anyPrefix = "example.com"

// The method pools() checks a configuration of sriov-device-plugin.
func (c *checker) pools(t part) {
	config, err := pool.Parse(pool.Source{File: t.file, Prefix: anyPrefix}, t.data)
	if joined, ok := err.(interface{ Unwrap() []error }); ok {
		for _, err := range joined.Unwrap() {
			var p pool.Problem
			if errors.As(err, &p) {
				c.add(t, t.placeOnLine(p.Key, p.Line), p.Key, devicePool, true, "%s", p.Text)
			} else {
				c.add(t, plugin.Place{}, "", devicePool, true, "%v", err)
			}
		}
	}
	if config == nil {
		return
	}
	for _, p := range config.Notes {
		c.add(t, t.placeOnLine(p.Key, p.Line), p.Key, devicePoolEffect, false, "%s", p.Text)
	}
	for _, r := range config.Resources {
		for _, p := range r.Unserved {
			c.add(t, t.placeOnLine(p.Key, p.Line), p.Key, devicePoolEffect, false, "%s", p.Text)
		}
	}
	c.sameSelectors(t)
}

// sameSelectors reports a resource that gets no device because an earlier resource has the same selectors.
func (c *checker) sameSelectors(t part) {
	var config struct {
		ResourceList []struct {
			ResourceName, DeviceType string
			Selectors, Hosts         any
		}
	}
	if json.Unmarshal(t.data, &config) != nil {
		return
	}
	for i, r := range config.ResourceList {
		for k, earlier := range config.ResourceList[:i] {
			if earlier.DeviceType == r.DeviceType && reflect.DeepEqual(earlier.Selectors, r.Selectors) &&
				(earlier.Hosts == nil || reflect.DeepEqual(earlier.Hosts, r.Hosts)) {
				key := fmt.Sprintf("resourceList[%d]", i)
				c.add(t, t.placeOf(key), key, devicePoolEffect, false, "resource %s gets no device: resource %s (resourceList[%d]) has the same selectors",
					r.ResourceName, earlier.ResourceName, k)
				break
			}
		}
	}
}

// The method nodeFile() checks node.json, the file with which plugins get data about the node.
func (c *checker) nodeFile(t part) {
	if _, err := nodefile.Parse(t.data); err != nil {
		key, at := t.mentioned(err.Error())
		c.add(t, at, key, nodeFile, true, "%v", err)
	}
	for _, f := range append(plugin.DuplicateKeys(t.data), plugin.UnknownKeys(t.data, "", nodefile.Node{})...) {
		if f.Key != "cniVersion" {
			c.add(t, t.placeOf(f.Key), f.Key, f.Code, false, "%s", f.Text)
		}
	}
}

// placeOf returns the position of a key. If the position of the key is unknown, placeOf returns the position of the innermost object that
// contains the key.
func (t part) placeOf(key string) plugin.Place {
	for ; key != ""; key = key[:max(strings.LastIndexAny(key, ".["), 0)] {
		if at, ok := t.places[key]; ok {
			return at
		}
	}
	return plugin.Place{}
}

// placeOnLine returns the line and column of a key on the given line.
func (t part) placeOnLine(key string, line int) plugin.Place {
	if at := t.placeOf(key); at.Line == line {
		return at
	}
	return plugin.Place{Line: line}
}

var word = regexp.MustCompile(`[A-Za-z][A-Za-z0-9]*`)

// The method mentioned() searches a message for a key of the part. mentioned() returns the first key that it finds, with the line and
// column of the key. The messages of the checks contain the key among their first words.
func (t part) mentioned(message string) (key string, place plugin.Place) {
	for _, name := range word.FindAllString(message, -1) {
		for path, at := range t.places {
			if last := path[strings.LastIndexAny(path, ".")+1:]; strings.EqualFold(last, name) && (key == "" || isBefore(at, place)) {
				key, place = path, at
			}
		}
		if key != "" {
			return key, place
		}
	}
	return "", plugin.Place{}
}

func isBefore(a, b plugin.Place) bool {
	return a.Line < b.Line || a.Line == b.Line && a.Column < b.Column
}
