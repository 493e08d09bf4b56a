// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"strings"
)

// describeDecodeError replaces the Go types in an error of encoding/json, which an administrator does not know, by JSON keys and types. t
// is the type into which the document was decoded, or nil.
func describeDecodeError(err error, t reflect.Type) error {
	var wrong *json.UnmarshalTypeError
	if !errors.As(err, &wrong) {
		return err
	}
	path, declared := resolvePath(wrong.Field, t)
	key := path
	if key == "" {
		key = "the value"
	} else if declared != nil && declared != wrong.Type {
		key = "an entry of " + key
	}
	return WithKey(path, fmt.Errorf("%s is %s: want %s", key, jsonValue(wrong.Value), wantedKind(wrong.Type)))
}

// resolvePath follows the dotted path of a decode error from t. It returns the path of keys in the document, without embedded structs, and
// the Go type at its end, or nil if that is unknown.
func resolvePath(path string, t reflect.Type) (string, reflect.Type) {
	var keys []string
	for name := range strings.SplitSeq(path, ".") {
		for t != nil && (t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice || t.Kind() == reflect.Array) {
			t = t.Elem()
		}
		if t != nil && t.Kind() == reflect.Struct {
			if of, ok := Fields(t)[name]; ok {
				if t = of; t.Kind() == reflect.Pointer {
					t = t.Elem()
				}
			} else if f, ok := t.FieldByName(name); ok && f.Anonymous {
				t = f.Type
				continue
			} else {
				t = nil
			}
		}
		keys = append(keys, name)
	}
	return strings.Join(keys, "."), t
}

// jsonValue returns the JSON type of a value that encoding/json describes, for example, as "string", "array" or "number 7.5".
func jsonValue(v string) string {
	if number, ok := strings.CutPrefix(v, "number "); ok {
		return number
	}
	switch v {
	case "array":
		return "a list"
	case "object":
		return "an object"
	case "bool":
		return "true or false"
	}
	return "a " + v
}

// wantedKind returns the name of the JSON type that the Go type t expects.
func wantedKind(t reflect.Type) string {
	switch t.Kind() {
	case reflect.String:
		return "a string"
	case reflect.Bool:
		return "true or false"
	case reflect.Float32, reflect.Float64:
		return "a number"
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		return fmt.Sprintf("a whole number of at most %d bits", t.Bits())
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return fmt.Sprintf("a whole number from 0 on, of at most %d bits", t.Bits())
	case reflect.Pointer:
		return wantedKind(t.Elem())
	case reflect.Slice, reflect.Array:
		return "a list of " + entries(t.Elem())
	}
	return "an object"
}

func entries(t reflect.Type) string {
	if t == reflect.TypeFor[json.RawMessage]() {
		return "values"
	}
	switch t.Kind() {
	case reflect.String:
		return "strings"
	case reflect.Pointer:
		return entries(t.Elem())
	case reflect.Slice, reflect.Array:
		return "lists of " + entries(t.Elem())
	case reflect.Struct, reflect.Map:
		return "objects"
	}
	return "values"
}
