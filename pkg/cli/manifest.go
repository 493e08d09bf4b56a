// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strings"

	"sigs.k8s.io/yaml"

	"github.com/podlace/podlace/pkg/store"
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
	Items      []manifest      `json:"items"` // of a List
	file       string
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
	return fmt.Sprintf("%s: %s %s", m.file, m.Kind, name)
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

var documentEnd = regexp.MustCompile(`(?m)^---(?:[ \t].*)?$`)

// readManifests reads a file with manifests. The name - stands for standard input.
func readManifests(stdin io.Reader, file string) ([]manifest, error) {
	if file == "-" {
		data, err := readAtMost(stdin, maxStdin)
		if err != nil {
			return nil, err
		}
		return parseManifests("stdin", data)
	}
	data, err := store.ReadFile(file)
	if err != nil {
		return nil, err
	}
	return parseManifests(file, data)
}

// parseManifests returns all objects in a YAML text, which may contain several documents, or in a JSON text. An object of kind List is
// replaced by its items.
func parseManifests(file string, data []byte) (all []manifest, err error) {
	line := 0
	for _, document := range documentEnd.Split(string(data), -1) {
		padded := strings.Repeat("\n", line) + document // errors then have the line number of the file
		line += strings.Count(document, "\n")
		text, err := yaml.YAMLToJSONStrict([]byte(padded))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		if bytes.Equal(bytes.TrimSpace(text), []byte("null")) {
			continue
		}
		var m manifest
		if err := json.Unmarshal(text, &m); err != nil {
			return nil, fmt.Errorf("%s: %w", file, err)
		}
		for _, m := range append(m.Items, m) {
			m.file, m.Items = file, nil
			all = append(all, m)
		}
	}
	return all, nil
}

// decode() decodes the specification of an object into a Go value.
func (m manifest) decode(to any) error {
	if m.APIVersion != claimAPI {
		return fmt.Errorf("%s: apiVersion %q: want %s", m, m.APIVersion, claimAPI)
	}
	if len(m.Spec) == 0 {
		return fmt.Errorf("%s: spec is missing", m)
	}
	if err := json.Unmarshal(m.Spec, to); err != nil {
		return fmt.Errorf("%s: spec: %w", m, err)
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
		return spec, fmt.Errorf("%s: spec is missing", m)
	case len(raw) == 0:
		return spec, nil
	}
	if err := json.Unmarshal(raw, &spec); err != nil {
		return spec, fmt.Errorf("%s: %s.spec: %w", m, strings.Join(template, "."), err)
	}
	return spec, nil
}
