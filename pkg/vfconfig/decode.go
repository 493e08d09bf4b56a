// SPDX-License-Identifier: Apache-2.0

package vfconfig

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/podlace/podlace/pkg/strict"
)

const (
	// APIVersion of the parameters in claims and device classes.
	APIVersion = "sriov.podlace.io/v1alpha1"
	// Kind of the parameters in claims and device classes.
	Kind = "VFConfig"

	maxBytes = 10 << 10 // limit of the Kubernetes API
)

// Entry is one entry in the configuration of a ResourceClaim or DeviceClass: settings for the VFs of a resource.
type Entry struct {
	Resource string // applies only to VFs of this resource; "" for all
	Config
}

// Decode parses the encoded parameters of an Entry and refuses each setting that this version would not apply. Its error is a
// strict.Problems, whose keys start with the given path; the Entry then has the settings without problems.
func Decode(data []byte, path string) (Entry, error) {
	r := &strict.Report{Key: path}
	if len(data) > maxBytes {
		r.Fail(strict.Place{Key: path}, "%d bytes: want at most %d", len(data), maxBytes)
		return Entry{}, r.Err()
	}
	root, ok := r.ParseJSON(data)
	if !ok {
		return Entry{}, r.Err()
	}
	var e Entry
	var version, kind string
	fields := e.Fields(r)
	fields["apiVersion"] = strict.To(r, &version, strict.OneOf(APIVersion))
	fields["kind"] = strict.To(r, &kind, strict.OneOf(Kind))
	fields["resource"] = strict.To(r, &e.Resource, resourceName)
	keys := r.Object(root, fields)
	r.Require(root, keys, "apiVersion", ": want "+APIVersion)
	r.Require(root, keys, "kind", ": want "+Kind)
	if err := e.Validate(); err != nil && len(r.Problems) == 0 {
		r.Fail(root.Place, "%v", err)
	}
	return e, r.Err()
}

func resourceName(s string) (string, error) {
	if prefix, name, _ := strings.Cut(s, "/"); prefix == "" || name == "" || strings.ContainsAny(s, " \t\n") {
		return "", fmt.Errorf("%+.40q: want the name of a resource, such as example.com/fast", s)
	}
	return s, nil
}

// Fields returns the keys of all settings, each with a function that stores its value in c.
func (c *Config) Fields(r *strict.Report) strict.Fields {
	fields := strict.Fields{}
	for _, key := range Keys() {
		fields[key] = c.reader(r, key)
	}
	return fields
}

func (c *Config) reader(r *strict.Report, key string) func(strict.Value) {
	switch f := c.fieldOf(key).(type) {
	case **int:
		return strict.To(r, f, func(text json.Number) (*int, error) {
			n, err := strconv.Atoi(string(text))
			if err != nil {
				return nil, fmt.Errorf("%.40s: want a whole number", text)
			}
			return &n, checkNumber(key, n)
		})
	case **bool:
		return strict.To(r, f, func(b bool) (*bool, error) { return &b, nil })
	case *string:
		return strict.To(r, f, func(s string) (string, error) { return s, checkText(key, s) })
	case *[]string:
		return func(v strict.Value) {
			if list, ok := v.Data.(strict.List); ok && len(list) == 0 {
				r.Fail(v.Place, "the list is empty")
			}
			strict.ListTo(r, f, func(s string) (string, error) { return s, CheckIP(s) })(v)
		}
	}
	return nil
}

// UnmarshalJSON reads the settings in a record, as MarshalJSON writes them. Keys that set nothing in this version go to Unknown, so
// that Validate refuses them; they would be lost without an error otherwise.
func (c *Config) UnmarshalJSON(data []byte) error {
	type plain Config
	var keys map[string]json.RawMessage
	*c = Config{}
	if err := errors.Join(json.Unmarshal(data, (*plain)(c)), json.Unmarshal(data, &keys)); err != nil {
		return err
	}
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		if key != claimedKey && !c.Has(key) {
			c.Unknown = append(c.Unknown, key)
		}
	}
	return nil
}
