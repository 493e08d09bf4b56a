// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/podlace/podlace/pkg/strict"
	"github.com/podlace/podlace/pkg/yamlfile"
)

// claimAPI is the only version of resource.k8s.io that check-claim supports.
const claimAPI = "resource.k8s.io/v1"

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

// at() returns the position of a key, in the form file:line:column: kind and name: key.
func (m manifest) at(key string) string {
	at := m.root.At(strings.TrimPrefix(m.root.Key+"."+key, "."))
	at.Key = strings.TrimPrefix(m.String(), at.File+": ") + ": " + key
	return at.Where()
}

// The following constants are the kinds of Kubernetes objects that check-claim reads.
const (
	kindClaim    = "ResourceClaim"
	kindTemplate = "ResourceClaimTemplate"
	kindClass    = "DeviceClass"
	kindPod      = "Pod"
)

// classSpec is the specification of a DeviceClass. The types of specifications have all keys of the API, because checkKeys reports others;
// the API server alone checks the content of raw messages.
type classSpec struct {
	Selectors            []celSelector `json:"selectors"`
	Config               []classConfig `json:"config"`
	ExtendedResourceName string        `json:"extendedResourceName"`
}

// templateSpec is the specification of a ResourceClaimTemplate.
type templateSpec struct {
	Metadata json.RawMessage `json:"metadata"`
	Spec     claimSpec       `json:"spec"`
}

// claimSpec is the specification of a ResourceClaim.
type claimSpec struct {
	Devices struct {
		Requests    []claimRequest    `json:"requests"`
		Constraints []claimConstraint `json:"constraints"`
		Config      []configEntry     `json:"config"`
	} `json:"devices"`
}

type claimConstraint struct {
	Requests []string `json:"requests"`
	Match    string   `json:"matchAttribute"`
	Distinct string   `json:"distinctAttribute"`
}

type claimRequest struct {
	Name           string        `json:"name"`
	Exactly        *exactRequest `json:"exactly"`
	FirstAvailable []subRequest  `json:"firstAvailable"`
}

type exactRequest struct {
	deviceRequest
	AdminAccess bool `json:"adminAccess"`
}

type subRequest struct {
	Name string `json:"name"`
	deviceRequest
}

type deviceRequest struct {
	Class       string             `json:"deviceClassName"`
	Selectors   []celSelector      `json:"selectors"`
	Mode        string             `json:"allocationMode"`
	Count       int                `json:"count"`
	Tolerations json.RawMessage    `json:"tolerations"`
	Capacity    json.RawMessage    `json:"capacity"`
	Derived     []derivedAttribute `json:"derivedAttributes"`
}

type derivedAttribute struct {
	Name       string `json:"name"`
	Expression string `json:"expression"`
}

type celSelector struct {
	CEL struct {
		Expression string `json:"expression"`
	} `json:"cel"`
}

// classConfig is an entry of the list config in a class.
type classConfig struct {
	Opaque *struct {
		Driver     string          `json:"driver"`
		Parameters json.RawMessage `json:"parameters"`
	} `json:"opaque"`
}

// configEntry is an entry of the list devices.config in a claim.
type configEntry struct {
	Requests []string `json:"requests"`
	classConfig
}

// podSpec is the specification of a Pod.
type podSpec struct {
	Claims         []podClaim     `json:"resourceClaims"`
	Containers     []podContainer `json:"containers"`
	InitContainers []podContainer `json:"initContainers"`
}

type podClaim struct {
	Name     string `json:"name"`
	Claim    string `json:"resourceClaimName"`
	Template string `json:"resourceClaimTemplateName"`
}

type podContainer struct {
	Name      string `json:"name"`
	Resources struct {
		Limits map[string]json.RawMessage `json:"limits"`
		Claims []struct {
			Name string `json:"name"`
		} `json:"claims"`
	} `json:"resources"`
}

// readManifests reads the manifests of a file, of all files in a folder, or of standard input.
func (c *checker) readManifests(stdin io.Reader, name string) (all []manifest, err error) {
	files, err := yamlfile.Files(stdin, name)
	for _, f := range files {
		all = append(all, c.parseManifests(f.Name, f.Data)...)
	}
	return all, err
}

// parseManifests returns all objects in a YAML or JSON text, with the items of lists. A repeated key is a problem, as for an API server.
func (c *checker) parseManifests(file string, data []byte) (all []manifest) {
	documents, err := yamlfile.Read(file, data)
	for _, d := range documents {
		for _, object := range append(d.Get("items").Items(), d) {
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

// decodeSpec decodes the specification of an object into a Go value. It reports false if the object has none.
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
