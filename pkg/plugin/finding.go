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
	Key  string      `json:"key"`  // path of the key as in strict.Place, such as plugins[1].capabilities
	Text string      `json:"text"` // the problem and the remedy
	Code FindingCode `json:"code"`
}

// FindingCode is the stable name of one kind of problem in a configuration, which 'podlace explain CODE' explains.
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
	NeedsPF           FindingCode = "needs-pf"
)

// String returns the key and the text of the finding in one line.
func (f Finding) String() string { return f.Key + ": " + f.Text }

// LogFindings logs a warning for each finding.
func (r *Request) LogFindings(findings []Finding) {
	for _, f := range findings {
		r.Log.Warn("a configuration key does not have the effect that it suggests", "key", f.Key, "finding", f.Text)
	}
}

// IsCapability reports whether a known runtime has a capability of this name.
func IsCapability(name string) bool { return slices.Contains(knownCapabilities, name) }

// UnknownKeys returns a finding for each key of a configuration, or of the object with the key within, that is no field of the struct raw.
// It skips the objects "args" and "runtimeConfig", because other plugins use them too.
func UnknownKeys(config []byte, within string, raw any) (found []Finding) {
	r := &strict.Report{Lenient: true}
	root, _ := r.ParseJSON(config)
	t := reflect.TypeOf(raw)
	if within != "" {
		root, t = root.Get(within), Fields(t)[within]
	}
	CheckKeys(r, root, t, func(v strict.Value, known []string) {
		top := v.Key == strict.Under("", v.Name)
		if top {
			known = append(known, commonKeys...)
		}
		if strings.HasPrefix(v.Name, "cni.dev/") || v.Name == DeadKey || top && isCommon(v.Name) ||
			strings.HasPrefix(v.Key, "args.") || strings.HasPrefix(v.Key, "runtimeConfig.") {
			return
		}
		text := "unknown key is ignored"
		if nearest := strict.Nearest(v.Name, known); nearest != "" {
			text += "; did you mean " + nearest + "?"
		}
		found = append(found, Finding{v.Key, text, UnknownKey})
	})
	return found
}

// knownCapabilities are those of CONVENTIONS.md, containerd and CRI-O.
var knownCapabilities = []string{"portMappings", "ipRanges", "bandwidth", "dns", "ips", "mac", "infinibandGUID", "deviceID", "aliases",
	"cgroupPath",
	"CNIDeviceInfoFile", "io.kubernetes.cri.pod-annotations"}

// Capabilities returns a finding for each capability that looks misspelt, and one if the configuration does not request needed, unless that
// is "". loss describes the effect of a missing capability.
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
			found = append(found, Finding{strict.Under("capabilities", name), text, UnknownCapability})
		}
	}
	if needed != "" && string(c.Capabilities[needed]) != "true" {
		text := fmt.Sprintf(`without {"%s": true} the runtime passes no %s, so %s`, needed, needed, loss)
		found = append(found, Finding{"capabilities", text, MissingCapability})
	}
	return found
}
