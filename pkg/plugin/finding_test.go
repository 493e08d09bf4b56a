// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"testing"

	"github.com/google/go-cmp/cmp"
)

func keysOf(findings []Finding) (keys []string) {
	for _, f := range findings {
		keys = append(keys, f.Key)
	}
	return keys
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
