// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"encoding"
	"encoding/json"
	"reflect"
	"slices"
)

// Schema is a JSON Schema (draft 2020-12).
type Schema map[string]any

// SchemaOf returns the schema of the JSON that is decoded into a struct, with exactly the keys that UnknownKeys accepts. describe returns
// the description of the key at a path, or "".
func SchemaOf(raw any, describe func(path string) string) Schema {
	return objectSchema(reflect.TypeOf(raw), "", describe)
}

func objectSchema(t reflect.Type, path string, describe func(string) string) Schema {
	properties := Schema{}
	for name, of := range Fields(t) {
		key := path + name
		value := schemaOf(of, key+".", describe)
		if text := describe(key); text != "" {
			value["description"] = text
		}
		properties[name] = value
	}
	return Schema{"type": "object", "properties": properties, "additionalProperties": false}
}

// schemaOf returns the schema of values of type t. A type with UnmarshalJSON may accept several JSON types, so its schema requires none;
// with only UnmarshalText, it is string.
func schemaOf(t reflect.Type, path string, describe func(string) string) Schema {
	s := Schema{}
	to := reflect.PointerTo(t)
	anyForm := to.Implements(reflect.TypeFor[json.Unmarshaler]())
	if !anyForm && to.Implements(reflect.TypeFor[encoding.TextUnmarshaler]()) {
		return Schema{"type": "string"}
	}
	switch t.Kind() {
	case reflect.Pointer:
		return schemaOf(t.Elem(), path, describe)
	case reflect.Struct:
		s = objectSchema(t, path, describe)
	case reflect.Bool:
		s["type"] = "boolean"
	case reflect.String:
		s["type"] = "string"
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64, reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32,
		reflect.Uint64:
		s["type"] = "integer"
	case reflect.Float32, reflect.Float64:
		s["type"] = "number"
	case reflect.Map:
		s = Schema{"type": "object", "additionalProperties": schemaOf(t.Elem(), path, describe)}
	case reflect.Slice:
		if t != reflect.TypeFor[json.RawMessage]() {
			s = Schema{"type": "array", "items": schemaOf(t.Elem(), path, describe)}
		}
	}
	if anyForm {
		delete(s, "type")
	}
	return s
}

// Merge adds the properties of other object schemas that s does not have.
func (s Schema) Merge(others ...Schema) Schema {
	properties, _ := s["properties"].(Schema)
	for _, o := range others {
		more, _ := o["properties"].(Schema)
		for name, value := range more {
			if _, taken := properties[name]; !taken {
				properties[name] = value
			}
		}
	}
	return s
}

// CommonKeys returns the sorted keys that may occur in the configuration of any plugin.
func CommonKeys() []string {
	return slices.Sorted(slices.Values(commonKeys))
}
