// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"bytes"
	"encoding/json"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/strict"
)

// maxConfig is the maximum size of stdin in bytes. The configuration that libcni passes has a few kilobytes, including prevResult.
const maxConfig = 16 << 20

// Decode decodes the configuration into the struct to which raw points. It logs each unknown key with the most similar known one: the key
// is valid, because another plugin may read it, but often misspelt.
func (r *Request) Decode(raw any) error { return r.DecodeWithin("", raw) }

// DecodeWithin is Decode for IPAM plugins, which get the configuration of their caller: it logs only unknown keys inside the object with
// the given key.
func (r *Request) DecodeWithin(key string, raw any) error {
	if err := Decode(r.Config, raw); err != nil {
		return err
	}
	for _, f := range UnknownKeys(r.Config, key, reflect.ValueOf(raw).Elem().Interface()) {
		r.Log.Warn(f.Text, "key", f.Key)
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

// commonKeys may occur in the configuration of any plugin (SPEC.md section 1 and "Deriving runtime configuration from plugin
// configuration").
var commonKeys = []string{"$schema", "cniVersion", "cniVersions", "name", "type", "capabilities", "args", "runtimeConfig", "prevResult",
	"ipam", "dns", "logLevel", "logFile", "disableCheck", "disableGC", "loadOnlyInlinedPlugins", "plugins"}

// Fields returns the types of the values that encoding/json decodes into a struct, by their keys. It also looks into pointers and lists.
func Fields(t reflect.Type) map[string]reflect.Type {
	fields := map[string]reflect.Type{}
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
		t = t.Elem()
	}
	if t.Kind() == reflect.Struct {
		for _, f := range reflect.VisibleFields(t) {
			if name, _, _ := strings.Cut(f.Tag.Get("json"), ","); name != "" && name != "-" {
				fields[name] = f.Type
			}
		}
	}
	return fields
}

// CheckKeys compares a value with the Go type into which it is decoded. It calls unknown for each key without a field in the type, and
// reports values of another type.
func CheckKeys(r *strict.Report, v strict.Value, t reflect.Type, unknown func(v strict.Value, known []string)) {
	below := func(t reflect.Type) func(strict.Value) {
		return func(v strict.Value) { CheckKeys(r, v, t, unknown) }
	}
	switch {
	case v.Data == nil || t == reflect.TypeFor[json.RawMessage]():
	case t.Kind() == reflect.Pointer:
		CheckKeys(r, v, t.Elem(), unknown)
	case t.Kind() == reflect.Slice:
		r.Each(below(t.Elem()))(v)
	case t.Kind() == reflect.Map:
		r.Members(below(t.Elem()))(v)
	case t.Kind() == reflect.Struct && (t.NumField() == 0 || len(Fields(t)) > 0): // a quantity, whose fields have no keys, decodes itself
		fields := strict.Fields{}
		known := slices.Sorted(maps.Keys(Fields(t)))
		for key, t := range Fields(t) {
			fields[key] = below(t)
		}
		fields[strict.Others] = func(v strict.Value) { unknown(v, known) }
		r.Object(v, fields)
	default:
		if text, _ := json.Marshal(v); json.Unmarshal(text, reflect.New(t).Interface()) != nil {
			r.Fail(v.Place, "%s: want %s", v, wantedKind(t))
		}
	}
}

// isCommon reports whether a key may occur in the configuration of any plugin. encoding/json ignores the case of keys.
func isCommon(key string) bool {
	return slices.ContainsFunc(commonKeys, func(common string) bool { return strings.EqualFold(common, key) })
}
