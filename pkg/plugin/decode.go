// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"bytes"
	"encoding/json"
	"reflect"
	"slices"
	"strings"
)

// maxConfig is the maximum size of stdin in bytes. The configuration that libcni passes has a few kilobytes, including prevResult.
const maxConfig = 16 << 20

// Decode decodes the configuration into the struct to which the argument "raw" points. The struct has the same keys as the JSON. For each
// unknown key, Decode logs the key together with the most similar known key. An unknown key is valid, because another plugin may read this
// key. Decode logs an unknown key, because such a key is often misspelt.
func (r *Request) Decode(raw any) error { return r.DecodeWithin("", raw) }

// DecodeWithin decodes the configuration as Decode does, but logs only unknown keys inside the object with the given key. IPAM plugins use
// DecodeWithin, because they get the configuration of the plugin that calls them.
func (r *Request) DecodeWithin(key string, raw any) error {
	if err := Decode(r.Config, raw); err != nil {
		return err
	}
	for _, f := range UnknownKeys(r.Config, key, reflect.ValueOf(raw).Elem().Interface()) {
		r.Log.Warn(f.Text, "key", quote(f.Key))
	}
	return nil
}

// Decode decodes a network configuration. An error about the type of a value carries its key.
func Decode(data []byte, into any) error {
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

// isCommon reports whether a key may occur in the configuration of any plugin. encoding/json ignores the case of keys.
func isCommon(key string) bool {
	return slices.ContainsFunc(commonKeys, func(common string) bool { return strings.EqualFold(common, key) })
}
