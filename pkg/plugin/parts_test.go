// SPDX-License-Identifier: Apache-2.0

package plugin

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// TestParts: an entry of podlace-pod stands for three plugins, and each gets its section, its capability and the keys that all share.
func TestParts(t *testing.T) {
	entry := `{"cniVersion": "1.1.0", "name": "pods", "type": "podlace-pod", "bridge": "cni0", "ipam": {"type": "host-local"},
		"dns": {"domain": "x"}, "portmap": {"snat": true}, "capabilities": {"portMappings": true, "bandwidth": true, "ips": true},
		"prevResult": {"ips": []}, "cni.dev/valid-attachments": []}`
	const shared = `"cni.dev/valid-attachments":[],"cniVersion":"1.1.0","name":"pods","prevResult":{"ips":[]}`
	want := map[string]string{
		"bridge": `{"bridge":"cni0","capabilities":{"ips":true},"cni.dev/valid-attachments":[],"cniVersion":"1.1.0","dns":{"domain":"x"},` +
			`"ipam":{"type":"host-local"},"name":"pods","prevResult":{"ips":[]},"type":"bridge"}`,
		"portmap":   `{"capabilities":{"portMappings":true},` + shared + `,"snat":true,"type":"portmap"}`,
		"bandwidth": `{"capabilities":{"bandwidth":true},` + shared + `,"type":"bandwidth"}`,
	}
	got := map[string]string{}
	for _, p := range Parts([]byte(entry)) {
		got[p.Kind] = string(p.Config)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	for entry, want := range map[string]string{
		entry: "bridge false bridge name; portmap false portmap.bridge name; bandwidth false bandwidth.bridge name",
		`{"type": "podlace-pod", "name": "pods"}`: "bridge false bridge name; portmap true portmap.bridge name; " +
			"bandwidth true bandwidth.bridge name",
		`{"type": "podlace-bridge"}`: "bridge false bridge name",
		`{"type": "firewall"}`:       "firewall false bridge name",
	} {
		var got []string
		for _, p := range Parts([]byte(entry)) {
			unused := map[bool]string{true: " true ", false: " false "}[p.Unused]
			got = append(got, p.Kind+unused+p.Key("bridge")+" "+p.Key("name"))
		}
		if diff := cmp.Diff(want, strings.Join(got, "; ")); diff != "" {
			t.Errorf("%s:\n%s", entry, diff)
		}
	}
}

// TestSplitRefuses: what belongs to no part has an error with its key, and the network's name is still there for DEL.
func TestSplitRefuses(t *testing.T) {
	for keys, want := range map[string]string{
		`"portmap": []`:                 "portmap: want an object with the keys of the plugin portmap",
		`"portmap": null`:               "portmap: want an object with the keys of the plugin portmap",
		`"bandwidth": {"name": "x"}`:    "bandwidth.name: this key belongs to the whole entry: move it out of bandwidth",
		`"portmap": {"ipam": {}}`:       "portmap.ipam: this key belongs to the whole entry: move it out of portmap",
		`"portmap": {"cni.dev/x": 1}`:   "portmap.cni.dev/x: this key belongs to the whole entry: move it out of portmap",
		`"capabilities": ["bandwidth"]`: "capabilities: want an object",
	} {
		parts, err := Split([]byte(`{"name": "pods", ` + keys + `}`))
		if err == nil || !strings.Contains(err.Error(), want) || len(parts) != 3 {
			t.Fatalf("%s: %d parts, %v, want %s", keys, len(parts), err, want)
		}
		if !strings.Contains(string(parts[2].Config), `"name":"pods"`) {
			t.Errorf("%s: %s", keys, parts[2].Config)
		}
	}
}

// TestKind: a type has the prefix of a cluster or not, and podlace-pod has it always.
func TestKind(t *testing.T) {
	for _, kind := range Kinds() {
		for _, name := range TypesOf(kind) {
			if Kind(name) != kind || !Runs(name, kind) {
				t.Errorf("%s is of the kind %s, want %s", name, Kind(name), kind)
			}
		}
		isPart := kind == "bridge" || kind == "portmap" || kind == "bandwidth"
		if Runs(PodType, kind) != (isPart || kind == PodType) || Runs("firewall", kind) || Runs("bridge", kind) != (kind == "bridge") {
			t.Errorf("%s: %t", kind, Runs(PodType, kind))
		}
	}
	if got := Kind("podlace-podlace-pod"); got != "podlace-podlace-pod" {
		t.Error(got)
	}
}
