// SPDX-License-Identifier: Apache-2.0

package ipam

import "encoding/json"

// Object returns the object of a configuration that says which IPAM plugin there is, and how. DEL uses it on configurations that may be
// wrong elsewhere.
func Object(config []byte) json.RawMessage {
	var keys struct {
		IPAM json.RawMessage `json:"ipam"`
	}
	_ = json.Unmarshal(config, &keys)
	return keys.IPAM
}

// Type returns the type that an object names, or "".
func Type(object json.RawMessage) string {
	var keys struct {
		Type string `json:"type"`
	}
	_ = json.Unmarshal(object, &keys)
	return keys.Type
}

// WithKey returns a configuration with another value of a key.
func WithKey(config []byte, key string, value json.RawMessage) []byte {
	var keys map[string]json.RawMessage
	if json.Unmarshal(config, &keys) != nil {
		return config
	}
	keys[key] = value
	out, err := json.Marshal(keys)
	if err != nil {
		return config
	}
	return out
}
