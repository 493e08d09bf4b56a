// SPDX-License-Identifier: Apache-2.0

package ipam

import (
	"cmp"
	"encoding/json"
)

// ChainedSuffix ends the name of the network under which a chained plugin requests the leases of its VFs. Those under the name without it
// belong to the main plugin, whose GC would delete leases of VF interfaces, because the runtime does not pass these interfaces to GC.
const ChainedSuffix = ".vf"

// Object returns the value of the key ipam in a configuration, whose other parts may be invalid, for DEL.
func Object(config []byte) json.RawMessage {
	var keys struct {
		IPAM json.RawMessage `json:"ipam"`
	}
	_ = json.Unmarshal(config, &keys)
	return keys.IPAM
}

// Type returns the plugin type in an ipam object, or "".
func Type(object json.RawMessage) string {
	var keys struct {
		Type string `json:"type"`
	}
	_ = json.Unmarshal(object, &keys)
	return keys.Type
}

// DefaultBridge is the bridge of a configuration that names none.
const DefaultBridge = "cni0"

// BridgeIn returns the name of the bridge in a configuration, whose other parts may be invalid.
func BridgeIn(config []byte) string {
	var keys struct {
		Bridge string `json:"bridge"`
	}
	_ = json.Unmarshal(config, &keys)
	return cmp.Or(keys.Bridge, DefaultBridge)
}

// BridgeNote returns the name of the note that each network on a bridge has since its first ADD.
func BridgeNote(bridge string) string { return "bridge-" + bridge }

// WithKey returns a copy of a configuration in which a key has another value.
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
