// SPDX-License-Identifier: Apache-2.0

package ipam

import "encoding/json"

// Object returns the ipam object of a configuration. DEL uses it on configurations that may be invalid otherwise.
func Object(config []byte) json.RawMessage {
	var keys struct {
		IPAM json.RawMessage `json:"ipam"`
	}
	_ = json.Unmarshal(config, &keys)
	return keys.IPAM
}

// Type returns the type in an ipam object, or "".
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
