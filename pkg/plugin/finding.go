// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"
)

// Finding describes a setting that is valid but probably does not have the intended effect.
type Finding struct {
	Key  string      `json:"key"`  // path of the key, such as plugins[1].capabilities
	Text string      `json:"text"` // the problem and the remedy
	Code FindingCode `json:"code"`
}

// FindingCode is the stable name of one kind of problem in a configuration. The command 'podlace explain CODE' prints the meaning of a
// code.
type FindingCode string

// Codes of the findings that plugins return.
const (
	UnknownKey        FindingCode = "unknown-key"
	DuplicateKey      FindingCode = "duplicate-key"
	UnknownCapability FindingCode = "unknown-capability"
	MissingCapability FindingCode = "missing-capability"
	WithoutIPAM       FindingCode = "without-ipam"
	SubnetOverlap     FindingCode = "subnet-overlap"
	NoKubelet         FindingCode = "no-kubelet"
)

// String returns the key and the text of the finding in one line.
func (f Finding) String() string { return f.Key + ": " + f.Text }

// LogFindings logs a warning for each finding.
func (r *Request) LogFindings(findings []Finding) {
	for _, f := range findings {
		r.Log.Warn("a configuration key does not have the effect that it suggests", "key", quote(f.Key), "finding", f.Text)
	}
}

// UnknownKeys returns a finding for each unknown key of a configuration. The last argument of UnknownKeys is a struct with one field for
// each known key. The second argument of UnknownKeys is the key of an object, or "". If the second argument is not "", UnknownKeys checks
// only the keys inside the object with this key.
func UnknownKeys(config []byte, within string, raw any) []Finding {
	t := reflect.TypeOf(raw)
	if within == "" {
		return unknownKeys("", config, t)
	}
	var object map[string]json.RawMessage
	if f, ok := jsonFields(t)[within]; ok && json.Unmarshal(config, &object) == nil {
		return unknownKeys(within+".", object[within], f.of)
	}
	return nil
}

// unknownKeys returns a finding for each key of a JSON object for which the struct type has no field. unknownKeys does not check the
// objects "args" and "runtimeConfig", because other plugins use them too.
func unknownKeys(path string, data []byte, t reflect.Type) (found []Finding) {
	var object map[string]json.RawMessage
	if json.Unmarshal(data, &object) != nil {
		return nil
	}
	fields := jsonFields(t)
	for _, key := range slices.Sorted(maps.Keys(object)) {
		if f, ok := fields[strings.ToLower(key)]; ok {
			if f.of.Kind() == reflect.Struct && key != "args" && key != "runtimeConfig" {
				found = append(found, unknownKeys(path+key+".", object[key], f.of)...)
			}
			continue
		}
		if strings.HasPrefix(key, "cni.dev/") || key == DeadKey || path == "" && containsFold(commonKeys, key) {
			continue
		}
		var known []string
		for _, f := range fields {
			known = append(known, f.name)
		}
		if path == "" {
			known = append(known, commonKeys...)
		}
		slices.Sort(known)
		text := "unknown key is ignored"
		if nearest := Nearest(key, known); nearest != "" {
			text += "; the nearest known key is " + nearest
		}
		found = append(found, Finding{path + key, text, UnknownKey})
	}
	return found
}

// DuplicateKeys returns a finding for each repeated key in a JSON object.
func DuplicateKeys(data []byte) (found []Finding) {
	if !json.Valid(data) { // also limits the nesting depth for the walk
		return nil
	}
	walkKeys(json.NewDecoder(bytes.NewReader(data)), "", func(path string, repeated bool, _ int) {
		if repeated {
			found = append(found, Finding{path, "the object has this key twice, and only the last value counts", DuplicateKey})
		}
	})
	return found
}

// Place is a position in a text. Line and Column start at 1. Column is a number of characters, not of bytes.
type Place struct{ Line, Column int }

// PlaceAt returns the line and column of the byte at an offset.
func PlaceAt(text []byte, offset int) Place {
	before := text[:max(0, min(offset, len(text)))]
	start := 1 + bytes.LastIndexByte(before, '\n')
	return Place{1 + bytes.Count(before, []byte("\n")), 1 + utf8.RuneCount(before[start:])}
}

// KeyPlaces returns the line and column of each key and each list entry in a JSON text. The keys of the returned map are paths such as
// plugins[1].snat.
func KeyPlaces(data []byte) map[string]Place {
	places := map[string]Place{}
	at, read := Place{1, 1}, 0
	if json.Valid(data) {
		walkKeys(json.NewDecoder(bytes.NewReader(data)), "", func(path string, _ bool, after int) {
			next := len(data) - len(bytes.TrimLeft(data[after:], ", \t\r\n"))
			at, read = at.after(data[read:next]), next // counting from the beginning would take quadratic time
			places[path] = at
		})
	}
	return places
}

// The function after() returns the place directly after the given text, if this text begins at the place p.
func (p Place) after(text []byte) Place {
	end := PlaceAt(text, len(text))
	if end.Line == 1 {
		return Place{p.Line, p.Column + end.Column - 1}
	}
	return Place{p.Line + end.Line - 1, end.Column}
}

// walkKeys reads one JSON value and calls the function visit() for each key of an object and each item of an array. The last argument of
// visit() is an offset in the text, shortly before the key or item. Between this offset and the key or item, only white space and a comma
// may occur.
func walkKeys(dec *json.Decoder, path string, visit func(path string, repeated bool, after int)) {
	token, err := dec.Token()
	if err != nil {
		return
	}
	seen := map[string]bool{}
	for i := 0; (token == json.Delim('{') || token == json.Delim('[')) && dec.More(); i++ {
		inner, repeated, after := path+"["+strconv.Itoa(i)+"]", false, int(dec.InputOffset())
		if token == json.Delim('{') {
			name, _ := dec.Token()
			key, _ := name.(string)
			if inner = key; path != "" {
				inner = path + "." + key
			}
			repeated, seen[key] = seen[key], true
		}
		visit(inner, repeated, after)
		walkKeys(dec, inner, visit)
	}
	if token == json.Delim('{') || token == json.Delim('[') {
		_, _ = dec.Token() // the closing delimiter
	}
}

// knownCapabilities contains the capabilities of CONVENTIONS.md, containerd and CRI-O.
var knownCapabilities = []string{"portMappings", "ipRanges", "bandwidth", "dns", "ips", "mac", "infinibandGUID", "deviceID", "aliases",
	"cgroupPath",
	"CNIDeviceInfoFile", "io.kubernetes.cri.pod-annotations"}

// Capabilities returns a finding for each capability that looks misspelt. It also returns one if `needed` is not "" and the configuration
// does not request this capability. The argument `loss` describes the effect of a missing capability.
func Capabilities(config []byte, needed, loss string) (found []Finding) {
	var c struct {
		Capabilities map[string]json.RawMessage `json:"capabilities"`
	}
	if json.Unmarshal(config, &c) != nil {
		return nil
	}
	for _, name := range slices.Sorted(maps.Keys(c.Capabilities)) {
		if nearest := Nearest(name, knownCapabilities); !slices.Contains(knownCapabilities, name) && nearest != "" {
			text := "no known runtime has a capability of this name; the nearest is " + nearest
			found = append(found, Finding{"capabilities." + name, text, UnknownCapability})
		}
	}
	if needed != "" && string(c.Capabilities[needed]) != "true" {
		text := fmt.Sprintf(`without {"%s": true} the runtime passes no %s, so %s`, needed, needed, loss)
		found = append(found, Finding{"capabilities", text, MissingCapability})
	}
	return found
}
