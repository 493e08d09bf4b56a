// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"bytes"
	"encoding/json"
	"reflect"
	"strings"
)

// maxConfig is the maximum size of stdin in bytes. The configuration that libcni passes has a few kilobytes, including prevResult.
const maxConfig = 16 << 20

// Decode decodes the configuration into the struct to which the argument "raw" points. The struct has the same keys as the JSON. For each
// unknown key, Decode logs the key together with the most similar known key. An unknown key is valid, because another plugin may read this
// key. Decode logs an unknown key, because such a key is often misspelt.
func (r *Request) Decode(raw any) error {
	if err := decode(r.Config, raw); err != nil {
		return err
	}
	r.logUnknown("", raw)
	return nil
}

// DecodeWithin decodes the configuration as Decode does, but logs only unknown keys inside the object with the given key. IPAM plugins use
// DecodeWithin, because they get the configuration of the plugin that calls them.
func (r *Request) DecodeWithin(key string, raw any) error {
	if err := decode(r.Config, raw); err != nil {
		return err
	}
	r.logUnknown(key, raw)
	return nil
}

func decode(data []byte, into any) error {
	if trimmed := bytes.TrimLeft(data, " \t\r\n"); len(trimmed) == 0 || trimmed[0] != '{' {
		return Errorf(CodeDecode, "network configuration: want a JSON object, got %s", quote(string(trimmed)))
	}
	if err := json.Unmarshal(data, into); err != nil {
		return Errorf(CodeDecode, "network configuration: %w", describeDecodeError(err, reflect.TypeOf(into).Elem()))
	}
	return nil
}

// commonKeys contains the keys that may occur in the configuration of any plugin (SPEC.md section 1 and "Deriving runtime configuration
// from plugin configuration").
var commonKeys = []string{"$schema", "cniVersion", "cniVersions", "name", "type", "capabilities", "args", "runtimeConfig", "prevResult",
	"ipam", "dns", "logLevel", "logFile", "disableCheck", "disableGC", "loadOnlyInlinedPlugins", "plugins"}

// logUnknown logs unknown keys of the configuration. A key is unknown if the last argument points to a struct that has no field for this
// key.
func (r *Request) logUnknown(within string, raw any) {
	for _, f := range UnknownKeys(r.Config, within, reflect.ValueOf(raw).Elem().Interface()) {
		r.Log.Warn(f.Text, "key", quote(f.Key))
	}
}

// The type jsonField is a field of a struct into which JSON is decoded.
type jsonField struct {
	name string
	of   reflect.Type
}

// jsonFields returns the fields of the struct t, including fields of embedded structs. The keys of the returned map are the JSON names in
// lower case.
func jsonFields(t reflect.Type) map[string]jsonField {
	fields := map[string]jsonField{}
	for f := range t.Fields() {
		ft := f.Type
		if ft.Kind() == reflect.Pointer {
			ft = ft.Elem()
		}
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		if f.Anonymous && name == "" {
			for k, v := range jsonFields(ft) {
				fields[k] = v
			}
		} else if name != "" && name != "-" {
			fields[strings.ToLower(name)] = jsonField{name, ft}
		}
	}
	return fields
}

func containsFold(list []string, s string) bool {
	for _, e := range list {
		if strings.EqualFold(e, s) {
			return true
		}
	}
	return false
}

// Nearest returns the word with the smallest edit distance to key, or "" if no word is similar enough.
func Nearest(key string, words []string) string {
	best, at := len(key)/2+1, ""
	for _, w := range words {
		if max(len(key), len(w))-min(len(key), len(w)) >= best {
			continue // the distance is at least that, and a key may have a million letters
		}
		if d := editDistance(strings.ToLower(key), strings.ToLower(w)); d < best {
			best, at = d, w
		}
	}
	return at
}

// editDistance returns the Levenshtein distance between a and b.
func editDistance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			cost := diagonal
			if a[i] != b[j] {
				cost = 1 + min(diagonal, row[j], row[j+1])
			}
			diagonal, row[j+1] = row[j+1], cost
		}
	}
	return row[len(b)]
}
