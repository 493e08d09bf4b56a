// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strings"
)

// PodType is the plugin type that stands for the chain of bridge, portmap and bandwidth.
const PodType = "podlace-pod"

// Part is one plugin of a chain.
type Part struct {
	Kind   string // see [Kind]
	Config []byte // the configuration that the plugin would have as a separate entry of the conflist
	Unused bool   // the entry of podlace-pod has neither the part's section nor its capability

	section string
}

// Key returns the name of a part's key in the entry of the conflist.
func (p Part) Key(name string) string {
	first, _, _ := strings.Cut(name, ".")
	if p.section == "" || slices.Contains(commonKeys, first) {
		return name
	}
	return p.section + "." + name
}

// sections lists the parts of podlace-pod whose keys stand in a section, with the capability that only this part uses.
var sections = []section{{"portmap", "portMappings"}, {"bandwidth", "bandwidth"}}

type section struct{ name, capability string }

// Parts returns the plugins that an entry of a conflist stands for: the parts of podlace-pod, or the plugin itself.
func Parts(entry []byte) []Part {
	var keys struct{ Type string }
	if json.Unmarshal(entry, &keys) == nil && Kind(keys.Type) == PodType {
		parts, _ := Split(entry)
		return parts
	}
	return []Part{{Kind: Kind(keys.Type), Config: entry}}
}

// Runs reports whether a plugin of the given type is of a kind or has a part of it.
func Runs(name, kind string) bool {
	isPart := kind == "bridge" || slices.ContainsFunc(sections, func(s section) bool { return s.name == kind })
	return Kind(name) == kind || Kind(name) == PodType && isPart
}

// Split divides the configuration of podlace-pod into those of its parts, in the order of ADD. A section cannot repeat a key that all
// plugins have. Even with an error, Split returns what it could read: DEL and GC need only the network's name.
func Split(config []byte) ([]Part, error) {
	var keys map[string]json.RawMessage
	err := Decode(config, &keys)
	shared := maps.Clone(keys)
	maps.DeleteFunc(shared, func(key string, _ json.RawMessage) bool { return !isShared(key) })
	var capabilities map[string]json.RawMessage
	if raw := keys["capabilities"]; raw != nil && json.Unmarshal(raw, &capabilities) != nil {
		err = errors.Join(err, WithKey("capabilities", Errorf(CodeDecode, "network configuration: capabilities: want an object")))
	}
	parts := make([]Part, 1, 1+len(sections))
	for _, s := range sections {
		own, e := s.keys(keys[s.name])
		err = errors.Join(err, e)
		maps.Copy(own, shared)
		value, requested := capabilities[s.capability]
		if requested {
			own["capabilities"] = encoded(map[string]json.RawMessage{s.capability: value})
		}
		parts = append(parts, Part{s.name, ofType(s.name, own), keys[s.name] == nil && !requested, s.name})
		delete(keys, s.name)
		delete(capabilities, s.capability)
	}
	if keys == nil {
		keys = map[string]json.RawMessage{}
	}
	if capabilities != nil {
		keys["capabilities"] = encoded(capabilities)
	}
	parts[0] = Part{Kind: "bridge", Config: ofType("bridge", keys)}
	return parts, err
}

// isShared reports whether a key of the whole configuration holds for each part.
func isShared(key string) bool {
	return !slices.Contains([]string{"type", "capabilities", "ipam", "dns"}, key) &&
		(slices.Contains(commonKeys, key) || strings.HasPrefix(key, "cni.dev/") || key == DeadKey)
}

func (s section) keys(raw json.RawMessage) (map[string]json.RawMessage, error) {
	keys := map[string]json.RawMessage{}
	if raw == nil {
		return keys, nil
	}
	if err := json.Unmarshal(raw, &keys); err != nil || keys == nil {
		return map[string]json.RawMessage{}, WithKey(s.name, Errorf(CodeDecode, "network configuration: %s: want an object with the keys of the plugin %[1]s", s.name))
	}
	for _, key := range slices.Sorted(maps.Keys(keys)) {
		if isShared(key) || slices.Contains(commonKeys, key) {
			return keys, KeyErrorf(s.name+"."+key, "%s.%s: this key belongs to the whole entry: move it out of %[1]s", s.name, key)
		}
	}
	return keys, nil
}

func ofType(name string, keys map[string]json.RawMessage) []byte {
	keys["type"] = encoded(name)
	return encoded(keys)
}

// encoded returns a value as JSON, which cannot fail, since values come from decoded JSON.
func encoded(value any) []byte {
	text, _ := json.Marshal(value)
	return text
}

// OfPart returns the request with which a part is called. Its results of Once are those of the whole request.
func (r *Request) OfPart(p Part) *Request {
	own := *r
	own.Plugin, own.Config, own.prev = p.Kind, p.Config, nil
	own.Log = own.logger()
	return &own
}
