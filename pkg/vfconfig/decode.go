// SPDX-License-Identifier: Apache-2.0

package vfconfig

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/plugin"
)

const (
	// APIVersion is the API version of the parameters in claims and device classes.
	APIVersion = "sriov.podlace.io/v1alpha1"
	// Kind is the kind of the parameters in claims and device classes.
	Kind = "VFConfig"

	maxBytes = 10 << 10 // limit of the Kubernetes API
)

// Entry is one entry in the configuration of a ResourceClaim or DeviceClass. An entry contains settings for the VFs of a resource.
type Entry struct {
	Resource string // applies only to VFs of this resource; "": of all
	Config
}

// Parameters returns the parameters of an entry in the encoding that Decode reads.
func Parameters(resource string, c Config) ([]byte, error) {
	return json.Marshal(struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
		Resource   string `json:"resource,omitempty"`
		Config
	}{APIVersion, Kind, resource, c})
}

// Decode parses encoded parameters and returns the entry that they contain. Decode is strict: it returns an error for each setting that
// this version would not apply. Each error starts with the given path of the parameters, followed by the key.
func Decode(data []byte, path string) (Entry, error) {
	if len(data) > maxBytes {
		return Entry{}, fmt.Errorf("%s: %d bytes: want at most %d", path, len(data), maxBytes)
	}
	var e Entry
	head := map[string]string{}
	err := eachMember(data, func(key string, value any) error {
		switch key {
		case "apiVersion", "kind", "resource":
			s, ok := value.(string)
			if !ok {
				return keyError{key, fmt.Errorf("%s: want a string", formatValue(value))}
			}
			head[key] = s
			return nil
		}
		if e.fieldOf(key) == nil {
			return keyError{key, fmt.Errorf("%s: %w", formatValue(value), errNoKey(key))}
		}
		if err := e.Put(key, value); err != nil {
			return keyError{key, err}
		}
		return nil
	})
	if err == nil {
		err = checkHead(head)
	}
	if err == nil {
		err = e.Validate()
	}
	var at keyError
	switch {
	case errors.As(err, &at):
		return Entry{}, fmt.Errorf("%s.%w", path, at)
	case err != nil:
		return Entry{}, fmt.Errorf("%s: %w", path, err)
	}
	e.Resource = head["resource"]
	return e, nil
}

// checkHead checks the API version and the kind of the parameters. If the parameters contain the name of a resource, checkHead requires
// that this name has a prefix.
func checkHead(head map[string]string) error {
	for _, k := range []struct{ key, want string }{{"apiVersion", APIVersion}, {"kind", Kind}} {
		if s, ok := head[k.key]; !ok {
			return fmt.Errorf("%s is missing: want %s", k.key, k.want)
		} else if s != k.want {
			return keyError{k.key, fmt.Errorf("%s: want %s", formatValue(s), k.want)}
		}
	}
	resource, ok := head["resource"]
	if prefix, name, _ := strings.Cut(resource, "/"); ok && (prefix == "" || name == "" || strings.ContainsAny(resource, " \t\n")) {
		return keyError{"resource", fmt.Errorf("%s: want the name of a resource, such as example.com/fast", formatValue(resource))}
	}
	return nil
}

// keyError is an error about the value of one key.
type keyError struct {
	key string
	err error
}

func (e keyError) Error() string { return shownKey(e.key) + ": " + e.err.Error() }
func (e keyError) Unwrap() error { return e.err }

// shownKey formats a key for an error message. shownKey quotes or shortens a key that is long or contains a line break.
func shownKey(key string) string {
	if quoted := fmt.Sprintf("%+.40q", key); len(quoted) != len(key)+2 || key == "" {
		return quoted
	}
	return key
}

// errNoKey returns the error for an unknown key. The text of this error contains the known key that is most similar.
func errNoKey(key string) error {
	if near := plugin.Nearest(key, append(Keys(), "apiVersion", "kind", "resource")); near != "" {
		return fmt.Errorf("no such key; did you mean %s?", near)
	}
	return errors.New("no such key; known keys: " + strings.Join(Keys(), ", "))
}

// eachMember calls take() for each member of a JSON object. eachMember stops at the first error. eachMember returns an error for duplicate
// keys, which encoding/json accepts.
func eachMember(data []byte, take func(key string, value any) error) error {
	d := json.NewDecoder(bytes.NewReader(data))
	d.UseNumber()
	token, err := d.Token()
	if err == nil && token != json.Delim('{') {
		err = errors.New("want an object")
	}
	if err != nil {
		return syntax(err)
	}
	var seen []string
	for d.More() {
		token, err := d.Token()
		if err != nil {
			return syntax(err)
		}
		key, _ := token.(string)
		var value any
		if err := d.Decode(&value); err != nil {
			return keyError{key, syntax(err)}
		}
		if slices.Contains(seen, key) {
			return keyError{key, errors.New("duplicate key")}
		}
		seen = append(seen, key)
		if err := take(key, value); err != nil {
			return err
		}
	}
	if _, err := d.Token(); err != nil {
		return syntax(err)
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return errors.New("there is text after the object")
	}
	return nil
}

func syntax(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return errors.New("unexpected end of JSON input")
	}
	return err
}

// UnmarshalJSON reads the settings in a record, in the format that MarshalJSON writes. If this version does not know a key, UnmarshalJSON
// stores the key in the field Unknown, and Validate refuses it. Without the field Unknown, a setting of another version would be lost
// without an error.
func (c *Config) UnmarshalJSON(data []byte) error {
	if string(data) == "null" {
		return nil
	}
	*c = Config{}
	return eachMember(data, func(key string, value any) error {
		switch {
		case key == claimedKey:
			return putList(&c.Claimed, value)
		case c.fieldOf(key) == nil:
			c.Unknown = append(c.Unknown, key)
			return nil
		}
		return c.putValue(key, value)
	})
}
