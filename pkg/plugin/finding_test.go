// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func keysOf(findings []Finding) (keys []string) {
	for _, f := range findings {
		keys = append(keys, f.Key)
	}
	return keys
}

// TestDuplicateKeysAreFound checks that DuplicateKeys finds repeated keys at any depth. encoding/json silently uses the last value of a
// repeated key.
func TestDuplicateKeysAreFound(t *testing.T) {
	for config, want := range map[string][]string{
		`{"a":1,"b":{"a":1},"c":[{"a":1},{"a":2}]}`: nil,
		`{"a":1,"a":1}`:             {"a"},
		`{"a":1,"b":2,"a":3,"a":4}`: {"a", "a"},
		`{"plugins":[{},{"ipam":{"ranges":[[{"subnet":1,"subnet":2}]]}}]}`: {"plugins[1].ipam.ranges[0][0].subnet"},
		`{"a":{"x":[1,{},"}"],"y":"{"},"b":{"y":1,"y":[{"z":1,"z":2}]}}`:   {"b.y", "b.y[0].z"},
		`{"isGateway":true,"isgateway":false}`:                             nil, // different keys, except for encoding/json
		`{"a":1,"a":`:                                                      nil, // invalid JSON: Decode reports it
		`[{"a":1,"a":2}]`:                                                  {"[0].a"},
		`7`:                                                                nil,
		``:                                                                 nil,
		strings.Repeat(`{"a":`, 20000) + "1" + strings.Repeat("}", 20000): nil,
	} {
		if diff := cmp.Diff(want, keysOf(DuplicateKeys([]byte(config)))); diff != "" {
			t.Errorf("%.80s: %s", config, diff)
		}
	}
}

func TestCapabilitiesThatNothingComesOf(t *testing.T) {
	for config, want := range map[string][]string{
		`{"capabilities":{"bandwidth":true}}`:                                               nil,
		`{"capabilities":{"bandwidth":true,"io.kubernetes.cri.pod-annotations":true}}`:      nil,
		`{"capabilities":{"bandwidth":true,"vendor.example/x":true,"tlsCertificate":true}}`: nil,
		`{}`:                                   {"capabilities"},
		`{"capabilities":{}}`:                  {"capabilities"},
		`{"capabilities":null}`:                {"capabilities"},
		`{"capabilities":{"bandwidth":false}}`: {"capabilities"},
		`{"capabilities":{"bandwith":true}}`:   {"capabilities.bandwith", "capabilities"},
		`{"capabilities":{"Bandwidth":true}}`:  {"capabilities.Bandwidth", "capabilities"},
		`{"capabilities":{"bandwidth":true,"portMapings":true}}`: {"capabilities.portMapings"},
		`{"capabilities":7}`: nil, // libcni rejects it
	} {
		if diff := cmp.Diff(want, keysOf(Capabilities([]byte(config), "bandwidth", "no pod is limited"))); diff != "" {
			t.Errorf("%s: %s", config, diff)
		}
	}
	if found := Capabilities([]byte(`{}`), "", ""); found != nil {
		t.Errorf("a plugin that needs none: %v", found)
	}
	if text := Capabilities([]byte(`{}`), "bandwidth", "no pod is limited")[0].String(); text !=
		`capabilities: without {"bandwidth": true} the runtime passes no bandwidth, so no pod is limited` {
		t.Error(text)
	}
}
