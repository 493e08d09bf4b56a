// SPDX-License-Identifier: Apache-2.0

package main

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	core "k8s.io/api/core/v1"
	resource "k8s.io/api/resource/v1"
)

// configOf writes a configuration of the device plugin into a file, and returns its path.
func configOf(t *testing.T, text string) string {
	t.Helper()
	file := filepath.Join(t.TempDir(), "config.json")
	if err := os.WriteFile(file, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return file
}

// The manifest has the user's configuration with its resources in the conflist and its DeviceClasses, and nothing of the shipped example.
// But for the DeviceClasses, the chart has equal objects.
func TestSRIOVConfig(t *testing.T) {
	helm := loadedChart(t)
	for _, test := range []struct {
		config, components, resources string
		classes                       []string
	}{
		{`{"resourceList": [{"resourceName": "fast", "resourcePrefix": "example.com", "api": "dra", "vf": {"mtu": 1500}}]}`, "dra",
			`["example.com/fast"]`, []string{"fast.example.com"}},
		{`{"resourceList": [{"resourceName": "a", "api": "dra"}, {"resourceName": "b", "selectors": {"pfNames": ["ens0f0"]}}]}`, "dra noagent",
			"", []string{"a.intel.com"}},
		{`{"resourceList": [{"resourceName": "b"}, {"resourceName": "c", "resourcePrefix": "example.com", "driver": "vfio-pci"}]}`, "sriov privileged",
			`["intel.com/b","example.com/c"]`, nil},
		{`{"resourceList": [{"resourceName": "b"}], "pfs": [{"pfName": "ens0f0", "numVfs": 4}]}`, "sriov privileged", `["intel.com/b"]`, nil},
		{`{"resourceList": [{"resourceName": "b"}], "pfs": [{"pfName": "ens0f0", "numVfs": 0, "offerPf": true}]}`, "sriov", `["intel.com/b"]`, nil},
		{`{"resourceList": [{"resourceName": "a", "api": "dra", "hosts": ["worker-*"]}, {"resourceName": "a", "api": "dra", "hosts": ["edge-*"]},` +
			` {"resourceName": "g", "hosts": ["worker-*"]}]}`, "dra", `["intel.com/a","intel.com/g"]`, []string{"a.intel.com"}},
	} {
		c, err := readSRIOVConfig(configOf(t, test.config))
		if err != nil {
			t.Fatalf("%s: %v", test.config, err)
		}
		text, err := renderManifest(conf, testImage, strings.Fields(test.components), c)
		if err != nil {
			t.Fatalf("%s: %v", test.config, err)
		}
		objects := decodeObjects(t, text)
		if got := objects["ConfigMap sriov-device-plugin"].(*core.ConfigMap).Data["config.json"]; got != test.config {
			t.Errorf("config.json is %s, want %s", got, test.config)
		}
		var classes []string
		for name, o := range objects {
			if class, ok := o.(*resource.DeviceClass); ok {
				classes = append(classes, class.Name)
				delete(objects, name)
			}
		}
		if !slices.Equal(classes, test.classes) {
			t.Errorf("%s: DeviceClasses %q, want %q", test.config, classes, test.classes)
		}
		charted := templated(t, helm, chartValues(test.components, test.config))
		asJSON := cmp.FilterPath(func(p cmp.Path) bool { return strings.HasSuffix(p.GoString(), `Data["config.json"]`) },
			cmp.Comparer(func(a, b string) bool { return canonicalJSON(a) == canonicalJSON(b) }))
		if diff := cmp.Diff(objects, charted, asJSON); diff != "" {
			t.Errorf("%s: the chart and the manifest differ (-manifest +chart)\n%s", test.config, diff)
		}
		if test.resources == "" {
			continue
		}
		entry := sriovEntry(t, objects["ConfigMap podlace-node"].(*core.ConfigMap).Data["10-podlace.conflist"])
		if string(entry["resources"]) != test.resources {
			t.Errorf("%s: the conflist has %s, want %s", test.config, entry["resources"], test.resources)
		}
	}
}

// chartValues returns values of the chart with components and a configuration of the device plugin.
func chartValues(components, config string) string {
	values := "sriovConfig: " + config + "\n"
	for _, name := range strings.Fields(components) {
		values += name + ": true\n"
	}
	return values
}

// canonicalJSON returns a JSON text with sorted keys and without spaces, or "" if it is invalid.
func canonicalJSON(text string) string {
	var value any
	if json.Unmarshal([]byte(text), &value) != nil {
		return ""
	}
	canonical, _ := json.Marshal(value)
	return string(canonical)
}

// TestSRIOVConfigRefused checks that the error of an unusable configuration names the place or the missing component. The chart, which does
// not parse the configuration, has the same errors about components.
func TestSRIOVConfigRefused(t *testing.T) {
	helm := loadedChart(t)
	const one = `{"resourceList": [{"resourceName": "b"}]}`
	for _, test := range []struct{ config, components, says string }{
		{`{"resourceList": [{"resourceNam": "b"}]}`, "sriov", `resourceNam`},
		{`{"resourceList": []}`, "sriov", "at least one resource"},
		{`{"resourceList": [{"resourceName": "a", "api": "dra", "vf": {"mtu": 1500}, "hosts": ["x"]}, {"resourceName": "a", "api": "dra", "hosts": ["y"]}]}`,
			"dra", "resource intel.com/a has other settings in vf on other nodes"},
		{`{"resourceList": [{"resourceName": "b"}], "pfs": [{"pfName": "ens0f0", "numVfs": 4, "hosts": ["x"]}]}`, "sriov", "the key numVfs"},
		{`{"resourceList": [{"resourceName": "b"}, {"resourceName": "b"}]}`, "sriov", "has the same name"},
		{one, "", "needs the component sriov or dra"},
		{one, "dra", "use the component sriov"},
		{`{"resourceList": [{"resourceName": "b", "api": "dra"}]}`, "sriov", "needs the component dra"},
		{`{"resourceList": [{"resourceName": "b", "driver": "vfio-pci"}]}`, "sriov", "the key driver, which needs write access to sysfs: add the component privileged"},
		{`{"resourceList": [{"resourceName": "b"}], "pfs": [{"pfName": "ens0f0", "numVfs": 4}]}`, "sriov", "the key numVfs"},
		{`{"resourceList": [{"resourceName": "b", "api": "dra"}], "pfs": [{"pfName": "ens0f0", "numVfs": 4, "offerWhole": true}]}`, "dra", "the key numVfs"},
	} {
		err := run([]string{"manifest", "-conf", conf, "-image", testImage, "-sriov-config", configOf(t, test.config),
			"-component", test.components, "-out", filepath.Join(t.TempDir(), "podlace.yaml")})
		if test.components == "" {
			err = run([]string{"manifest", "-conf", conf, "-image", testImage, "-sriov-config", configOf(t, test.config)})
		}
		if err == nil || !strings.Contains(err.Error(), test.says) {
			t.Errorf("%s with %q: %v, want %s", test.config, test.components, err, test.says)
			continue
		}
		_, parsed := readSRIOVConfig(configOf(t, test.config))
		_, charted := helmTemplate(helm, "default", chartValues(test.components, test.config))
		if parsed == nil && (charted == nil || !strings.HasSuffix(charted.Error(), ": "+err.Error())) {
			t.Errorf("%s with %q: the chart says %v, want %v", test.config, test.components, charted, err)
		}
	}
	if err := run([]string{"manifest", "-conf", conf, "-image", testImage, "-sriov-config", "/nope.json"}); err == nil {
		t.Error("a missing file is no error")
	}
}
