// SPDX-License-Identifier: Apache-2.0

package validate

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/podlace/podlace/pkg/daemon/pool"
	"github.com/podlace/podlace/pkg/nodefile"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/strict"
	"github.com/podlace/podlace/pkg/yamlfile"
)

// Problem is an error or a warning about one position in a file.
type Problem struct {
	strict.Place
	Code  plugin.FindingCode `json:"code"`
	Error bool               `json:"error"` // pods or the daemon fail; otherwise the setting does not have the effect that it suggests
	Text  string             `json:"text"`
}

// String returns file:line:column: key: level: text [code].
func (p Problem) String() string {
	level := map[bool]string{true: "error", false: "warning"}[p.Error]
	return fmt.Sprintf("%s: %s: %s [%s]", p.Where(), level, p.Text, p.Code)
}

// Files returns the problems of each file, and conflicts between networks in different files. It does no I/O, except that it reads the file
// in the key resolvConf, and the plugins in the folder of a network's name.
func Files(files []yamlfile.File, node Node) []Problem {
	c := &checker{node: node}
	for _, f := range files {
		c.file(f, nil)
	}
	c.clashes()
	c.attachments()
	return c.problems
}

// checker collects the problems of all files.
type checker struct {
	node     Node
	problems []Problem
	networks []network

	definitions []definition
	pods        []podNetworks
}

// part is a whole file, or a string with JSON text in a manifest.
type part struct {
	file     string
	line     int    // lines of the file before the part
	total    int    // lines of the file
	object   string // key of the object in the file, with a dot
	key      string
	list     *network // the list to which this file in the folder of its name belongs, or nil
	nad      string   // NetworkAttachmentDefinition, whose name Multus uses for a nameless network; it passes the pod's device, too
	resource string   // whose device Multus passes to this NetworkAttachmentDefinition's plugin
	data     []byte
	source   []byte // the whole file
	root     strict.Value
}

// add adds a problem at a position within the part.
func (c *checker) add(t part, at strict.Place, code plugin.FindingCode, isError bool, format string, args ...any) {
	c.problems = append(c.problems, Problem{t.place(at), code, isError, fmt.Sprintf(format, args...)})
}

// place converts a position within the part to one in the file. If the exact column cannot be computed, it is that of the line's first
// word.
func (t part) place(at strict.Place) strict.Place {
	if t.key != "" {
		at.Key = strings.TrimSuffix(t.key+": "+strings.TrimPrefix(at.Key, t.object), ": ")
	}
	inner := lineOf(t.data, max(at.Line, 1))
	at.File, at.Line = t.file, min(t.line+max(at.Line, 1), t.total) // YAML's errors may be after the end
	outer := lineOf(t.source, at.Line)
	if begins := bytes.Index(outer, inner); at.Column > 0 && begins >= 0 && len(inner) > 0 {
		at.Column += utf8.RuneCount(outer[:begins])
	} else {
		at.Column = 1 + len(outer) - len(bytes.TrimLeft(outer, " \t-"))
	}
	return at
}

// lineOf returns a line of the text, counted from 1.
func lineOf(text []byte, line int) []byte {
	lines := bytes.SplitN(text, []byte("\n"), line+1)
	return lines[min(line, len(lines))-1]
}

// file checks a file. list is the one to which it belongs as a plugin, or nil.
func (c *checker) file(f yamlfile.File, list *network) {
	whole := part{file: f.Name, list: list, total: 1 + bytes.Count(f.Data, []byte("\n")), data: f.Data, source: f.Data}
	if trimmed := bytes.TrimSpace(f.Data); len(trimmed) == 0 {
		c.add(whole, strict.Place{}, emptyFile, true, "the file is empty")
	} else if strict.IsUTF16(f.Data) || bytes.HasPrefix(bytes.TrimPrefix(trimmed, []byte("\ufeff")), []byte("{")) ||
		filepath.Ext(f.Name) == ".conflist" {
		c.json(whole)
	} else {
		c.manifests(whole)
	}
}

// json checks a JSON object, whose keys determine its kind.
func (c *checker) json(t part) {
	var keys map[string]json.RawMessage
	_ = json.Unmarshal(t.data, &keys) // ParseJSON reports errors
	has := func(names ...string) bool {
		return slices.ContainsFunc(names, func(name string) bool { return keys[name] != nil })
	}
	if has("apiVersion") && has("kind") {
		c.manifests(t)
		return
	}
	r, ok := strict.Report{}, false
	if t.root, ok = r.ParseJSON(t.data); !ok {
		c.add(t, r.Problems[0].Place, syntax, true, "%s", r.Problems[0].Text)
		return
	}
	switch {
	case has("resourceList", "pfs"):
		c.pools(t)
	case has("plugins", "type", "cniVersion"):
		c.network(t)
	case has("podCIDRs"):
		c.nodeFile(t)
	case has("offLink", "routes", "vxlan", "clusterCIDRs", "binDir", "confDir"):
		c.add(t, strict.Place{}, otherChecker, false, "podlace-node checks its configuration: 'podlace-node status' has the mistakes")
	default:
		c.add(t, strict.Place{}, unknownFile, true, "the object is no network configuration (plugins or type), no configuration of sriov-device-plugin (resourceList), "+
			"no node.json (podCIDRs) and no object of Kubernetes (apiVersion and kind)")
	}
}

// pools checks a configuration of sriov-device-plugin.
func (c *checker) pools(t part) {
	config, err := pool.Parse(pool.Source{File: t.file, AnyPrefix: true}, t.data)
	var problems strict.Problems
	errors.As(err, &problems)
	for _, p := range problems {
		c.add(t, p.Place, devicePool, true, "%s", p.Text)
	}
	if config == nil {
		return
	}
	notes := config.Notes
	if c.node.Devices != nil {
		notes = pool.Findings(config, c.node.Devices, c.node.Env)
	}
	for _, p := range append(notes, config.Unserved()...) {
		c.add(t, p.Place, devicePoolEffect, false, "%s", p.Text)
	}
	c.sameSelectors(t)
}

// sameSelectors reports a resource that gets no device because an earlier one has the same selectors.
func (c *checker) sameSelectors(t part) {
	var config struct{ ResourceList []map[string]any }
	_ = json.Unmarshal(t.data, &config) // pool.Parse has read it
	for i, r := range config.ResourceList {
		for k, earlier := range config.ResourceList[:i] {
			same := func(key string) bool { return reflect.DeepEqual(earlier[key], r[key]) }
			if same("deviceType") && same("selectors") && (earlier["hosts"] == nil || same("hosts")) {
				c.add(t, t.root.At(fmt.Sprintf("resourceList[%d]", i)), devicePoolEffect, false,
					"resource %v gets no device: resource %v (resourceList[%d]) has the same selectors", r["resourceName"], earlier["resourceName"], k)
				break
			}
		}
	}
}

// nodeFile checks node.json, from which plugins learn about the node.
func (c *checker) nodeFile(t part) {
	_, err := nodefile.Parse(t.data)
	for _, err := range joined(err) {
		c.add(t, t.root.At(plugin.KeyOf(err)), nodeFile, true, "%v", err)
	}
	for _, f := range append(duplicateKeys(t.data), plugin.UnknownKeys(t.data, "", nodefile.Node{})...) {
		c.add(t, t.root.At(f.Key), f.Code, false, "%s", f.Text)
	}
}

const lastCounts = ": only the last value counts"

// duplicateKeys returns a finding for each repeated key in an object of a JSON text.
func duplicateKeys(data []byte) (found []plugin.Finding) {
	var r strict.Report
	root, _ := r.ParseJSON(data)
	r.Problems = nil // ADD reports invalid JSON
	r.Duplicates(root)
	for _, p := range r.Problems {
		found = append(found, plugin.Finding{Key: p.Key, Text: p.Text + lastCounts, Code: plugin.DuplicateKey})
	}
	return found
}
