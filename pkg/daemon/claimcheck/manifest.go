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

	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/strict"
	"github.com/podlace/podlace/pkg/yamlfile"
)

// claimAPI is the only version of resource.k8s.io that check-claim supports.
const claimAPI = "resource.k8s.io/v1"

// Kinds of Kubernetes objects that check-claim reads, besides those with pods.
const (
	kindClaim    = "ResourceClaim"
	kindTemplate = "ResourceClaimTemplate"
	kindClass    = "DeviceClass"
)

// A manifest is a Kubernetes object, or a part of it.
type manifest struct {
	root strict.Value
	part string // such as ", container web"
	key  string // what all findings are about, if it is not empty
}

func (m manifest) kind() string { return m.root.Get("kind").Text() }

func (m manifest) name() string { return m.root.Get("metadata", "name").Text() }

// lacksName reports whether the API server refuses the object because it has no name.
func (m manifest) lacksName() bool {
	return m.name() == "" && m.root.Get("metadata", "generateName").Text() == "" &&
		slices.Contains([]string{"Pod", kindClaim, kindTemplate, kindClass}, m.kind())
}

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
	key = cmp.Or(m.key, key)
	at := m.root.At(strings.TrimPrefix(m.root.Key+"."+key, "."))
	at.Key = strings.TrimPrefix(m.String(), at.File+": ") + ": " + key
	return at.Where()
}

// readManifests reads the manifests of a file, of all files in a folder, or of standard input.
func (c *checker) readManifests(stdin io.Reader, name string) (all []manifest, err error) {
	files, err := yamlfile.Files(stdin, name)
	for _, f := range files {
		before := len(c.problems)
		found := c.parseManifests(f.Name, f.Data)
		if all = append(all, found...); len(found) == 0 && len(c.problems) == before {
			c.notice("%s contains no object, so there was nothing to check", f.Name)
		}
	}
	return all, err
}

// parseManifests returns the objects in a YAML or JSON text, and those in lists. A repeated key is a problem, as for an API server.
func (c *checker) parseManifests(file string, data []byte) (all []manifest) {
	documents, err := yamlfile.Read(file, data)
	r := strict.Report{File: file}
	errors.As(err, &r.Problems)
	for _, d := range documents {
		for _, object := range objects(d) {
			all = append(all, manifest{root: object})
		}
		r.Duplicates(d)
	}
	for _, p := range r.Problems {
		c.fail("%v", p)
	}
	return all
}

// objects returns the objects of a list, or the only object of a document.
func objects(document strict.Value) []strict.Value {
	if items := document.Get("items").Items(); items != nil {
		return items
	}
	return []strict.Value{document}
}

// decodeSpec decodes the specification of an object into a type of the Kubernetes API. It reports false if the object has none.
func (c *checker) decodeSpec(m manifest, to any) bool {
	spec := m.root.Get("spec")
	switch version := m.root.Get("apiVersion").Text(); {
	case version != claimAPI:
		c.fail("%s: %q: want %s, where each request has exactly or firstAvailable", m.at("apiVersion"), version, claimAPI)
		return false
	case spec.Data == nil:
		c.fail("%s is missing", m.at("spec"))
		return false
	}
	c.decode(m, spec, to, true)
	return true
}

// decode decodes a value without the parts of another type, which it reports, as it does unknown keys if `keys`. A key that resembles
// no known one is only a notice, because a newer Kubernetes may know it.
func (c *checker) decode(m manifest, v strict.Value, to any, keys bool) {
	where := func(at strict.Place) string { return m.at(strings.TrimPrefix(at.Key, m.root.Key+".")) }
	var r strict.Report
	t := reflect.TypeOf(to)
	plugin.CheckKeys(&r, v, t, func(v strict.Value, known []string) {
		near, place := strict.Nearest(v.Name, known), findKey(t, "spec", v.Name)
		switch {
		case !keys:
		case near != "":
			r.Fail(v.Place, "unknown key; did you mean %s?", near)
		case place != "":
			r.Fail(v.Place, "unknown key; the key %s belongs to %s", v.Name, place)
		default:
			c.notice("%s: this version of sriov-device-plugin does not know the key", where(v.Place))
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

// findKey returns the path of the first object that has the given key, or "". Kubernetes' metadata is left out.
func findKey(t reflect.Type, path, key string) string {
	keys := plugin.Fields(t)
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
