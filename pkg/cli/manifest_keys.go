// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"encoding/json"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/strict"
)

// decode decodes a value of an object into a Go value, without the parts that have another type, which it reports. If the Go value has all
// keys, it also reports unknown ones. One that does not resemble a known key is only a notice, because a newer version of Kubernetes may
// know it.
func (c *checker) decode(m manifest, v strict.Value, to any, allKeys bool) {
	where := func(at strict.Place) string { return m.at(strings.TrimPrefix(at.Key, m.root.Key+".")) }
	var r strict.Report
	t := reflect.TypeOf(to)
	plugin.CheckKeys(&r, v, t, func(v strict.Value, known []string) {
		near, place := strict.Nearest(v.Name, known), findKey(t, "spec", v.Name)
		switch {
		case !allKeys:
		case near != "":
			r.Fail(v.Place, "unknown key; did you mean %s?", near)
		case place != "":
			r.Fail(v.Place, "unknown key; the key %s belongs to %s", v.Name, place)
		default:
			c.notice("%s: this version of podlace does not know the key", where(v.Place))
		}
	})
	for _, p := range r.Problems {
		if p.Text != strict.Duplicate { // parseManifests reports it
			c.fail("%s: %s", where(p.Place), p.Text)
		}
	}
	text, _ := json.Marshal(v)
	_ = json.Unmarshal(text, to) // skips values of another type
}

// findKey returns the path of the first object that has the given key, or "".
func findKey(t reflect.Type, path, key string) string {
	fields := plugin.Fields(t)
	for _, name := range slices.Sorted(maps.Keys(fields)) {
		if name == key {
			return path
		}
		if place := findKey(fields[name], path+"."+name, key); place != "" {
			return place
		}
	}
	return ""
}
