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
	// APIVersion is the API version of the parameters in claims and classes.
	APIVersion = "sriov.podlace.io/v1alpha1"
	// Kind is the kind of the parameters in claims and classes.
	Kind = "VFConfig"

	maxBytes = 10 << 10 // limit of the Kubernetes API
)

// Entry is an entry of a ResourceClaim or DeviceClass: the settings for the VFs of a resource.
type Entry struct {
	Resource string // applies only to VFs of this resource; "": of all
	Config
}

// Parameters returns the encoded parameters of an entry, which Decode reads.
func Parameters(resource string, c Config) ([]byte, error) {
	return json.Marshal(struct {
		APIVersion string `json:"apiVersion"`
		Kind       string `json:"kind"`
		Resource   string `json:"resource,omitempty"`
		Config
	}{APIVersion, Kind, resource, c})
}

// Decode reads the parameters of an entry. It is strict: a setting that this version would not apply is an error. Errors begin with
// path, the place of the parameters, and the key.
func Decode(data []byte, path string) (Entry, error) {
	if len(data) > maxBytes {
		return Entry{}, fmt.Errorf("%s: %d bytes: want at most %d", path, len(data), maxBytes)
	}
	var e Entry
	head := map[string]string{}
	err := members(data, func(key string, value any) error {
		switch key {
		case "apiVersion", "kind", "resource":
			s, ok := value.(string)
			if !ok {
				return keyError{key, fmt.Errorf("%s: want a string", formatValue(value))}
			}
			head[key] = s
			return nil
		}
		if e.field(key) == nil {
			return keyError{key, errNoKey(key)}
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

// checkHead checks API version and kind of the parameters. The name of a resource must have its prefix.
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

// keyError is an error about the value of a key.
type keyError struct {
	key string
	err error
}

func (e keyError) Error() string { return shownKey(e.key) + ": " + e.err.Error() }
func (e keyError) Unwrap() error { return e.err }

// shownKey returns a key for an error, quoted or shortened if it is long or would break the line.
func shownKey(key string) string {
	if quoted := fmt.Sprintf("%+.40q", key); len(quoted) != len(key)+2 || key == "" {
		return quoted
	}
	return key
}

// errNoKey returns the error for an unknown key, with the nearest known one.
func errNoKey(key string) error {
	if near := plugin.Nearest(key, append(Keys(), "apiVersion", "kind", "resource")); near != "" {
		return fmt.Errorf("no such key; did you mean %s?", near)
	}
	return errors.New("no such key; known keys: " + strings.Join(Keys(), ", "))
}

// members passes the members of an object to take, until one is an error. It refuses duplicate keys, which encoding/json accepts.
func members(data []byte, take func(key string, value any) error) error {
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

// UnmarshalJSON reads settings from a record as MarshalJSON writes them. Keys of another version go to Unknown, which Validate
// refuses: otherwise a setting would be ignored silently.
func (c *Config) UnmarshalJSON(data []byte) error {
	if string(data) == "null" {
		return nil
	}
	*c = Config{}
	return members(data, func(key string, value any) error {
		switch {
		case key == claimedKey:
			return putList(&c.Claimed, value)
		case c.field(key) == nil:
			c.Unknown = append(c.Unknown, key)
			return nil
		}
		return c.put(key, value)
	})
}
