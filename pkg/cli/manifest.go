// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/cli/validate"
	"github.com/podlace/podlace/pkg/strict"
)

// claimAPI is the only version of resource.k8s.io that check-claim supports.
const claimAPI = "resource.k8s.io/v1"

// A manifest is a Kubernetes object. The type manifest has only the fields that decide which VFs a pod gets, and which settings the VFs
// get. Only the API server validates the other fields of the object.
type manifest struct {
	APIVersion string          `json:"apiVersion"`
	Kind       string          `json:"kind"`
	Metadata   metadata        `json:"metadata"`
	Spec       json.RawMessage `json:"spec"`
	root       strict.Value
}

type metadata struct {
	Name      string `json:"name"`
	Namespace string `json:"namespace"`
}

// String returns the file name, followed by the kind and name of the object as kubectl prints them.
func (m manifest) String() string {
	name := m.Metadata.Name
	if m.Kind != kindClass {
		name = m.namespace() + "/" + name
	}
	return fmt.Sprintf("%s: %s %s", m.root.File, m.Kind, name)
}

// at() returns the position of a key, in the form file:line:column: kind and name: key.
func (m manifest) at(key string) string {
	at := m.root.At(strings.TrimPrefix(m.root.Key+"."+key, "."))
	at.Key = strings.TrimPrefix(m.String(), at.File+": ") + ": " + key
	return at.Where()
}

func (m manifest) namespace() string { return cmp.Or(m.Metadata.Namespace, "default") }

// The following constants are the kinds of Kubernetes objects that check-claim reads.
const (
	kindClaim    = "ResourceClaim"
	kindTemplate = "ResourceClaimTemplate"
	kindClass    = "DeviceClass"
	kindPod      = "Pod"
)

// classSpec is the specification of a DeviceClass.
type classSpec struct {
	Selectors            []celSelector `json:"selectors"`
	Config               []configEntry `json:"config"`
	ExtendedResourceName string        `json:"extendedResourceName"`
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
	Name           string       `json:"name"`
	Exactly        *subRequest  `json:"exactly"`
	FirstAvailable []subRequest `json:"firstAvailable"`
}

type subRequest struct {
	Name        string             `json:"name"`
	Class       string             `json:"deviceClassName"`
	Selectors   []celSelector      `json:"selectors"`
	Mode        string             `json:"allocationMode"`
	Count       int                `json:"count"`
	AdminAccess bool               `json:"adminAccess"`
	Derived     []derivedAttribute `json:"derivedAttributes"`
}

type derivedAttribute struct {
	Name string `json:"name"`
}

type celSelector struct {
	CEL struct {
		Expression string `json:"expression"`
	} `json:"cel"`
}

// configEntry is an entry of the list devices.config in a claim, or of the list config in a class. An entry in a class has no list of
// requests.
type configEntry struct {
	Requests []string `json:"requests"`
	Opaque   *opaque  `json:"opaque"`
}

type opaque struct {
	Driver     string          `json:"driver"`
	Parameters json.RawMessage `json:"parameters"`
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
	} `json:"resources"`
}

// readManifests reads the manifests of a file, of all files in a folder, or of standard input.
func readManifests(stdin io.Reader, name string) (all []manifest, err error) {
	files, err := readFiles(stdin, name)
	for _, f := range files {
		objects, wrong := parseManifests(f.Name, f.Data)
		all, err = append(all, objects...), errors.Join(err, wrong)
	}
	return all, err
}

// parseManifests returns all objects in a YAML or JSON text, with the items of lists. A repeated key is an error, as for an API server.
func parseManifests(file string, data []byte) (all []manifest, err error) {
	documents, err := validate.Documents(file, data)
	r := strict.Report{}
	for _, d := range documents {
		if d.Data == nil {
			continue
		}
		for _, object := range append(d.Get("items").Items(), d) {
			m := manifest{root: object}
			text, err := json.Marshal(object)
			if err == nil {
				err = json.Unmarshal(text, &m)
			}
			if err != nil {
				r.Fail(object.Place, "%v", err)
			}
			all = append(all, m)
		}
		d.Walk(func(v *strict.Value, repeated bool) {
			if repeated {
				r.Fail(v.Place, "duplicate key")
			}
		})
	}
	return all, cmp.Or(err, r.Err())
}

// decode() decodes the specification of an object into a Go value.
func (m manifest) decode(to any) error {
	if m.APIVersion != claimAPI {
		return fmt.Errorf("%s: %q: want %s", m.at("apiVersion"), m.APIVersion, claimAPI)
	}
	if len(m.Spec) == 0 {
		return fmt.Errorf("%s is missing", m.at("spec"))
	}
	if err := json.Unmarshal(m.Spec, to); err != nil {
		return fmt.Errorf("%s: %w", m.at("spec"), err)
	}
	return nil
}

// podSpec decodes the specification of a pod, or of the pod template at a path of another object. An object without a pod template may
// belong to another API group that has a kind of the same name. For such an object, podSpec returns a specification without claims.
func (m manifest) podSpec(template []string) (spec podSpec, err error) {
	raw := m.Spec
	for _, key := range append(slices.Clone(template), "spec")[1:] {
		var object map[string]json.RawMessage
		if json.Unmarshal(raw, &object) != nil {
			return spec, nil
		}
		raw = object[key]
	}
	switch {
	case len(raw) == 0 && m.Kind == kindPod:
		return spec, fmt.Errorf("%s is missing", m.at("spec"))
	case len(raw) == 0:
		return spec, nil
	}
	if err := json.Unmarshal(raw, &spec); err != nil {
		return spec, fmt.Errorf("%s: %w", m.at(strings.Join(append(slices.Clone(template), "spec"), ".")), err)
	}
	return spec, nil
}
