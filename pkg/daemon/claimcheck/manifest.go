// SPDX-License-Identifier: Apache-2.0

package claimcheck

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/strict"
	"github.com/podlace/podlace/pkg/yamlfile"
)

// claimAPI is the only version of resource.k8s.io that check-claim supports.
const claimAPI = "resource.k8s.io/v1"

// The following constants are the kinds of Kubernetes objects that check-claim reads, besides those with pods.
const (
	kindClaim    = "ResourceClaim"
	kindTemplate = "ResourceClaimTemplate"
	kindClass    = "DeviceClass"
)

// A manifest is a Kubernetes object, or a part of it.
type manifest struct {
	root strict.Value
	part string // such as ", container web"
}

func (m manifest) kind() string { return m.root.Get("kind").Text() }

func (m manifest) name() string { return m.root.Get("metadata", "name").Text() }

func (m manifest) namespace() string {
	return cmp.Or(m.root.Get("metadata", "namespace").Text(), "default")
}

// String returns the file name, followed by the kind and name of the object as kubectl prints them.
func (m manifest) String() string {
	name := m.name()
	if m.kind() != kindClass {
		name = m.namespace() + "/" + name
	}
	return fmt.Sprintf("%s: %s %s%s", m.root.File, m.kind(), name, m.part)
}

// id identifies an object of a cluster.
func (m manifest) id() [3]string { return [3]string{m.kind(), m.namespace(), m.name()} }

// at returns the position of a key, in the form file:line:column: kind and name: key.
func (m manifest) at(key string) string {
	at := m.root.At(strings.TrimPrefix(m.root.Key+"."+key, "."))
	at.Key = strings.TrimPrefix(m.String(), at.File+": ") + ": " + key
	return at.Where()
}

// readManifests reads the manifests of a file, of all files in a folder, or of standard input.
func (c *checker) readManifests(stdin io.Reader, name string) (all []manifest, err error) {
	files, err := yamlfile.Files(stdin, name)
	for _, f := range files {
		all = append(all, c.parseManifests(f.Name, f.Data)...)
	}
	return all, err
}

// parseManifests returns the objects in a YAML or JSON text, and those in lists. A repeated key is a problem, as for an API server.
func (c *checker) parseManifests(file string, data []byte) (all []manifest) {
	documents, err := yamlfile.Read(file, data)
	for _, d := range documents {
		items := d.Get("items").Items()
		if items == nil {
			items = []strict.Value{d}
		}
		for _, object := range items {
			all = append(all, manifest{root: object})
		}
		d.Walk(func(v *strict.Value, repeated bool) {
			if repeated {
				c.fail("%s: duplicate key", v.Where())
			}
		})
	}
	var problems strict.Problems
	errors.As(err, &problems)
	for _, p := range problems {
		c.fail("%v", p)
	}
	return all
}

// decodeSpec decodes the specification of an object into a type of the Kubernetes API. It reports false if the object has none.
func (c *checker) decodeSpec(m manifest, to any) bool {
	spec := m.root.Get("spec")
	switch version := m.root.Get("apiVersion").Text(); {
	case version != claimAPI:
		c.fail("%s: %q: want %s", m.at("apiVersion"), version, claimAPI)
		return false
	case spec.Data == nil:
		c.fail("%s is missing", m.at("spec"))
		return false
	}
	c.decode(m, spec, to, true)
	return true
}

// decode decodes a value of an object without the parts that have another type. It reports these, and also unknown keys if asked to.
func (c *checker) decode(m manifest, v strict.Value, to any, keys bool) {
	w := decoder{c, m, nil}
	if keys {
		w.all = reflect.TypeOf(to)
	}
	w.check(&v, reflect.TypeOf(to))
	text, _ := json.Marshal(v)
	_ = json.Unmarshal(text, to) // check left what fits
}

// decoder compares the keys and types of an object with a Go type.
type decoder struct {
	*checker
	manifest
	all reflect.Type // nil if other keys are allowed
}

func (w decoder) where(v strict.Value) string { return w.at(strings.TrimPrefix(v.Key, w.root.Key+".")) }

// check sets values of a wrong type to null. A type with its own decoder, such as a quantity, accepts what this decoder accepts.
func (w decoder) check(v *strict.Value, t reflect.Type) {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	object, isObject := v.Data.(strict.Object)
	list, isList := v.Data.(strict.List)
	switch {
	case v.Data == nil:
		return
	case reflect.PointerTo(t).Implements(reflect.TypeFor[json.Unmarshaler]()):
	case isObject && t.Kind() == reflect.Struct:
		w.checkObject(object, keysOf(t))
		return
	case isObject && t.Kind() == reflect.Map:
		for i := range object {
			w.check(&object[i], t.Elem())
		}
		return
	case isList && t.Kind() == reflect.Slice:
		for i := range list {
			w.check(&list[i], t.Elem())
		}
		return
	}
	text, _ := json.Marshal(v)
	if json.Unmarshal(text, reflect.New(t).Interface()) != nil {
		want := map[reflect.Kind]string{reflect.Slice: "a list", reflect.String: "a string", reflect.Int64: "a whole number",
			reflect.Int32: "a whole number", reflect.Bool: "true or false"}
		w.fail("%s: %s: want %s", w.where(*v), *v, cmp.Or(want[t.Kind()], "an object"))
		v.Data = nil
	}
}

// checkObject reports unknown keys. One that does not resemble a known key is only a notice, because a newer version of Kubernetes may know
// it.
func (w decoder) checkObject(object strict.Object, known map[string]reflect.Type) {
	for i, member := range object {
		if t := known[member.Name]; t != nil {
			w.check(&object[i], t)
		}
		if known[member.Name] != nil || w.all == nil {
			continue
		}
		at := w.where(member)
		near := strict.Nearest(member.Name, slices.Sorted(maps.Keys(known)))
		switch place := findKey(w.all, "spec", member.Name); {
		case near != "":
			w.fail("%s: unknown key; did you mean %s?", at, near)
		case place != "":
			w.fail("%s: unknown key; the key %s belongs to %s", at, member.Name, place)
		default:
			w.notice("%s: this version of sriov-device-plugin does not know the key", at)
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
			if name, _, _ := strings.Cut(f.Tag.Get("json"), ","); name != "" {
				keys[name] = f.Type
			}
		}
	}
	return keys
}

// findKey returns the path of the first object that has the given key, or "". Kubernetes' metadata is left out.
func findKey(t reflect.Type, path, key string) string {
	keys := keysOf(t)
	delete(keys, "metadata")
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
