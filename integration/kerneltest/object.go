// SPDX-License-Identifier: Apache-2.0

package kerneltest

import (
	"maps"
	"strings"
)

// Object is a plugin configuration in a test.
type Object map[string]any

// With returns a copy of the configuration with other values, given as pairs of a key and a value. A nil value removes the key.
func (o Object) With(pairs ...any) Object {
	out := maps.Clone(o)
	for i := 0; i < len(pairs); i += 2 {
		out[pairs[i].(string)] = pairs[i+1]
		if pairs[i+1] == nil {
			delete(out, pairs[i].(string))
		}
	}
	return out
}

// Call is With, but sets an environment variable in env for a key that begins with CNI_.
func (o Object) Call(env map[string]string, pairs ...any) Object {
	for i := 0; i < len(pairs); i += 2 {
		if key := pairs[i].(string); strings.HasPrefix(key, "CNI_") {
			env[key] = pairs[i+1].(string)
		} else {
			o = o.With(key, pairs[i+1])
		}
	}
	return o
}
