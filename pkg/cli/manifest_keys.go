// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"encoding/json"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/strict"
)

// decode decodes a value of an object into a Go value, without the parts that have another type, which it reports. If the Go value has all
// keys, it also reports unknown ones.
func (c *checker) decode(m manifest, v strict.Value, to any, allKeys bool) {
	w := keyChecker{checker: c, manifest: m}
	if allKeys {
		w.all = reflect.TypeOf(to)
	}
	w.check(&v, reflect.TypeOf(to))
	text, _ := json.Marshal(v)
	_ = json.Unmarshal(text, to) // check left what fits
}

// keyChecker compares the keys and types of an object with a Go type.
type keyChecker struct {
	*checker
	manifest
	all reflect.Type // nil if the type lacks keys of the API
}

func (w keyChecker) where(v strict.Value) string {
	return w.at(strings.TrimPrefix(v.Key, w.root.Key+"."))
}

// check sets values of a wrong type to null.
func (w keyChecker) check(v *strict.Value, t reflect.Type) {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t == reflect.TypeFor[json.RawMessage]() || v.Data == nil {
		return
	}
	fits := false
	switch data := v.Data.(type) {
	case strict.Object:
		if fits = t.Kind() == reflect.Struct || t.Kind() == reflect.Map; fits {
			w.checkObject(data, keysOf(t))
		}
	case strict.List:
		fits = t.Kind() == reflect.Slice
		for i := range data {
			if fits {
				w.check(&data[i], t.Elem())
			}
		}
	default:
		text, _ := json.Marshal(data)
		fits = json.Unmarshal(text, reflect.New(t).Interface()) == nil
	}
	if !fits {
		want := map[reflect.Kind]string{reflect.Slice: "a list", reflect.String: "a string", reflect.Int: "a whole number",
			reflect.Bool: "true or false"}
		w.fail("%s: %s: want %s", w.where(*v), *v, cmp.Or(want[t.Kind()], "an object"))
		v.Data = nil
	}
}

// checkObject reports unknown keys. One that does not resemble a known key is only a notice, because a newer version of Kubernetes may know
// it.
func (w keyChecker) checkObject(object strict.Object, known map[string]reflect.Type) {
	for i, member := range object {
		if t := known[member.Name]; t != nil {
			w.check(&object[i], t)
		} else if w.all != nil {
			at := w.where(member)
			near := strict.Nearest(member.Name, slices.Sorted(maps.Keys(known)))
			switch place := findKey(w.all, "spec", member.Name); {
			case near != "":
				w.fail("%s: unknown key; did you mean %s?", at, near)
			case place != "":
				w.fail("%s: unknown key; the key %s belongs to %s", at, member.Name, place)
			default:
				w.notice("%s: this version of podlace does not know the key", at)
			}
		}
	}
}

// keysOf returns the keys of a struct, or of the structs in a list, with the types of their values.
func keysOf(t reflect.Type) map[string]reflect.Type {
	keys := map[string]reflect.Type{}
	for t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice {
		t = t.Elem()
	}
	if t.Kind() == reflect.Struct {
		for _, f := range reflect.VisibleFields(t) {
			if name := f.Tag.Get("json"); name != "" {
				keys[name] = f.Type
			}
		}
	}
	return keys
}

// findKey returns the path of the first object that has the given key, or "".
func findKey(t reflect.Type, path, key string) string {
	keys := keysOf(t)
	for _, name := range slices.Sorted(maps.Keys(keys)) {
		if name == key {
			return path
		}
		if place := findKey(keys[name], path+"."+name, key); place != "" {
			return place
		}
	}
	return ""
}
