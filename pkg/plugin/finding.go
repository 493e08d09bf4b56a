// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"encoding/json"
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/strict"
)

// Finding describes a setting that is valid but probably does not have the intended effect.
type Finding struct {
	Key  string      `json:"key"`  // path of the key, such as plugins[1].capabilities
	Text string      `json:"text"` // the problem and the remedy
	Code FindingCode `json:"code"`
}

// FindingCode is the stable name of one kind of problem in a configuration. The command 'podlace explain CODE' prints the meaning of a
// code.
type FindingCode string

// Codes of the findings that plugins return.
const (
	UnknownKey        FindingCode = "unknown-key"
	DuplicateKey      FindingCode = "duplicate-key"
	UnknownCapability FindingCode = "unknown-capability"
	MissingCapability FindingCode = "missing-capability"
	WithoutIPAM       FindingCode = "without-ipam"
	SubnetOverlap     FindingCode = "subnet-overlap"
	NoKubelet         FindingCode = "no-kubelet"
)

// String returns the key and the text of the finding in one line.
func (f Finding) String() string { return f.Key + ": " + f.Text }

// LogFindings logs a warning for each finding.
func (r *Request) LogFindings(findings []Finding) {
	for _, f := range findings {
		r.Log.Warn("a configuration key does not have the effect that it suggests", "key", quote(f.Key), "finding", f.Text)
	}
}

// UnknownKeys returns a finding for each unknown key of a configuration. The last argument of UnknownKeys is a struct with one field for
// each known key. The second argument of UnknownKeys is the key of an object, or "". If the second argument is not "", UnknownKeys checks
// only the keys inside the object with this key.
func UnknownKeys(config []byte, within string, raw any) []Finding {
	t := reflect.TypeOf(raw)
	if within == "" {
		return unknownKeys("", config, t)
	}
	var object map[string]json.RawMessage
	if f, ok := jsonFields(t)[within]; ok && json.Unmarshal(config, &object) == nil {
		return unknownKeys(within, object[within], f.of)
	}
	return nil
}

// unknownKeys returns a finding for each key of a JSON object, or of the objects in a list, for which the struct type has no field.
// unknownKeys does not check the objects "args" and "runtimeConfig", because other plugins use them too.
func unknownKeys(path string, data []byte, t reflect.Type) (found []Finding) {
	var list []json.RawMessage
	if t.Kind() == reflect.Slice && json.Unmarshal(data, &list) == nil {
		for i, item := range list {
			found = append(found, unknownKeys(fmt.Sprintf("%s[%d]", path, i), item, t.Elem())...)
		}
	}
	var object map[string]json.RawMessage
	if t.Kind() != reflect.Struct || json.Unmarshal(data, &object) != nil {
		return found
	}
	fields := jsonFields(t)
	for _, key := range slices.Sorted(maps.Keys(object)) {
		at := strings.TrimPrefix(path+"."+key, ".")
		switch f, ok := fields[strings.ToLower(key)]; {
		case !ok:
			found = append(found, unknownKey(at, key, fields)...)
		case key != "args" && key != "runtimeConfig":
			found = append(found, unknownKeys(at, object[key], f.of)...)
		}
	}
	return found
}

// unknownKey returns the finding for a key that is not in the fields of its object, or nothing if the key may be in any configuration.
func unknownKey(at, key string, fields map[string]jsonField) []Finding {
	var known []string
	for _, f := range fields {
		known = append(known, f.name)
	}
	if at == key {
		known = append(known, commonKeys...)
	}
	slices.Sort(known)
	if strings.HasPrefix(key, "cni.dev/") || key == DeadKey || at == key && isCommon(key) {
		return nil
	}
	text := "unknown key is ignored"
	if nearest := strict.Nearest(key, known); nearest != "" {
		text += "; did you mean " + nearest + "?"
	}
	return []Finding{{at, text, UnknownKey}}
}

// knownCapabilities contains the capabilities of CONVENTIONS.md, containerd and CRI-O.
var knownCapabilities = []string{"portMappings", "ipRanges", "bandwidth", "dns", "ips", "mac", "infinibandGUID", "deviceID", "aliases",
	"cgroupPath",
	"CNIDeviceInfoFile", "io.kubernetes.cri.pod-annotations"}

// Capabilities returns a finding for each capability that looks misspelt. It also returns one if `needed` is not "" and the configuration
// does not request this capability. The argument `loss` describes the effect of a missing capability.
func Capabilities(config []byte, needed, loss string) (found []Finding) {
	var c struct {
		Capabilities map[string]json.RawMessage `json:"capabilities"`
	}
	if json.Unmarshal(config, &c) != nil {
		return nil
	}
	for _, name := range slices.Sorted(maps.Keys(c.Capabilities)) {
		if nearest := strict.Nearest(name, knownCapabilities); !slices.Contains(knownCapabilities, name) && nearest != "" {
			text := "no known runtime has a capability of this name; the nearest is " + nearest
			found = append(found, Finding{"capabilities." + name, text, UnknownCapability})
		}
	}
	if needed != "" && string(c.Capabilities[needed]) != "true" {
		text := fmt.Sprintf(`without {"%s": true} the runtime passes no %s, so %s`, needed, needed, loss)
		found = append(found, Finding{"capabilities", text, MissingCapability})
	}
	return found
}
