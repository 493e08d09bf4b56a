// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"regexp"
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
		name = cmp.Or(m.Metadata.Namespace, "default") + "/" + name
	}
	return fmt.Sprintf("%s: %s %s", m.file, m.Kind, name)
}

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
		Requests []claimRequest `json:"requests"`
		Config   []configEntry  `json:"config"`
	} `json:"devices"`
}

type claimRequest struct {
	Name           string       `json:"name"`
	Exactly        *subRequest  `json:"exactly"`
	FirstAvailable []subRequest `json:"firstAvailable"`
}

type subRequest struct {
	Name        string        `json:"name"`
	Class       string        `json:"deviceClassName"`
	Selectors   []celSelector `json:"selectors"`
	Mode        string        `json:"allocationMode"`
	Count       int           `json:"count"`
	AdminAccess bool          `json:"adminAccess"`
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

// readManifests reads all objects in a YAML file, which may contain several documents, or in a JSON file. An object of kind List is
// replaced by its items.
func readManifests(file string) (all []manifest, err error) {
	data, err := store.ReadFile(file)
	if err != nil {
		return nil, err
	}
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
	if m.Kind != kindPod && m.APIVersion != claimAPI {
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
