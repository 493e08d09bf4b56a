// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"helm.sh/helm/v4/pkg/chart/common"
	"helm.sh/helm/v4/pkg/chart/common/util"
	v2 "helm.sh/helm/v4/pkg/chart/v2"
	"helm.sh/helm/v4/pkg/chart/v2/loader"
	"helm.sh/helm/v4/pkg/engine"
	core "k8s.io/api/core/v1"
	"sigs.k8s.io/yaml"
)

// packChart returns the archive of the chart.
func packChart() ([]byte, error) {
	files, err := newChart(conf, testImage, "1.2.3", "v1.2.3")
	if err != nil {
		return nil, err
	}
	return files.archive(time.Unix(0, 0))
}

var packOnce = sync.OnceValues(packChart)

// packedChart returns the archive of the chart, which takes seconds to make, so all tests share one.
func packedChart(t *testing.T) []byte {
	t.Helper()
	archive, err := packOnce()
	if err != nil {
		t.Fatal(err)
	}
	return archive
}

// loadedChart returns the chart, loaded by Helm.
func loadedChart(t *testing.T) *v2.Chart {
	t.Helper()
	c, err := loader.LoadArchive(bytes.NewReader(packedChart(t)))
	if err == nil {
		err = c.Validate()
	}
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// helmTemplate returns the output of `helm template` with values in YAML.
func helmTemplate(c *v2.Chart, namespace, values string) ([]byte, error) {
	set := map[string]any{}
	if err := yaml.Unmarshal([]byte(values), &set); err != nil {
		return nil, err
	}
	release := common.ReleaseOptions{Name: "podlace", Namespace: namespace, Revision: 1, IsInstall: true}
	all, err := util.ToRenderValues(c, set, release, common.DefaultCapabilities)
	if err != nil {
		return nil, err
	}
	files, err := engine.Render(c, all)
	if err != nil {
		return nil, err
	}
	var texts []string
	for name, text := range files {
		if text = strings.TrimSpace(text); text != "" && !strings.HasSuffix(name, ".txt") {
			texts = append(texts, text)
		}
	}
	return []byte(strings.Join(texts, "\n---\n")), nil
}

func templated(t *testing.T, c *v2.Chart, values string) objectsByName {
	t.Helper()
	text, err := helmTemplate(c, "default", values)
	if err != nil {
		t.Fatal(err)
	}
	return decodeObjects(t, text)
}

// Chart and manifest have equal objects for each choice of components, and without components.
func TestChartEqualsManifest(t *testing.T) {
	c := loadedChart(t)
	known, err := componentNames(conf)
	if err != nil {
		t.Fatal(err)
	}
	all := validChoices(known)
	if len(all) < 30 {
		t.Fatalf("%d choices", len(all))
	}
	for _, choice := range all {
		t.Run(strings.Join(choice, " "), func(t *testing.T) {
			values := ""
			for _, name := range choice {
				values += name + ": true\n"
			}
			if diff := cmp.Diff(decodeObjects(t, rendered(t, choice...)), templated(t, c, values)); diff != "" {
				t.Errorf("the chart and the manifest differ: correct scripts/image/template.go and values.go, which make the chart of conf/cluster\n"+
					"(-manifest +chart)\n%s", diff)
			}
		})
	}
}

// A release in the namespace podlace lacks the Namespace object, because Helm creates it.
func TestChartNamespace(t *testing.T) {
	text, err := helmTemplate(loadedChart(t), "podlace", "")
	if err != nil {
		t.Fatal(err)
	}
	want := decodeObjects(t, rendered(t))
	delete(want, "Namespace podlace")
	if diff := cmp.Diff(want, decodeObjects(t, text)); diff != "" {
		t.Error(diff)
	}
}

// Values replace the configurations. The keys of config override those that components set.
func TestChartValues(t *testing.T) {
	c := loadedChart(t)
	for _, test := range []struct{ values, object, file, want string }{
		{"config: {mtu: 1400, confDir: ''}", "podlace-node", "config.json", `{"confDir":"","mtu":1400,"offLink":"refuse"}`},
		{"vxlan: true\nconfig: {vxlan: {vni: 16777215}}", "podlace-node", "config.json", `{"offLink":"vxlan","vxlan":{"vni":16777215}}`},
		{"vxlan: true\nconfig: {offLink: fabric}", "podlace-node", "config.json", `{"offLink":"fabric"}`},
		{"conflist: '{\"name\": \"cbr0\"}'", "podlace-node", "10-podlace.conflist", `{"name":"cbr0"}`},
		{"dra: true\nsriovConfig: {resourceList: [{resourceName: slow, api: dra}]}", "sriov-device-plugin", "config.json",
			`{"resourceList":[{"api":"dra","resourceName":"slow"}]}`},
		{"dra: true\nsriovConfig: {resourceList: [{resourceName: slow, api: dra}]}\nconflist: '{\"name\": \"cbr0\"}'", "podlace-node", "10-podlace.conflist",
			`{"name":"cbr0"}`},
	} {
		objects := templated(t, c, test.values)
		text := objects["ConfigMap "+test.object].(*core.ConfigMap).Data[test.file]
		var got bytes.Buffer
		err := json.Compact(&got, []byte(text))
		if err != nil || strings.TrimSuffix(got.String(), "\n") != test.want || !strings.HasSuffix(text, "}\n") {
			t.Errorf("%s: %v, %q, want %s", test.values, err, text, test.want)
		}
		if objects["DeviceClass fast.example.com"] != nil {
			t.Errorf("%s: the class of the example is left", test.values)
		}
	}
}

// TestChartRefuses checks that the error of a wrong value contains the path of the value or the reason.
func TestChartRefuses(t *testing.T) {
	c := loadedChart(t)
	for values, says := range map[string]string{
		"vxlna: true":                  "'vxlna' not allowed",
		"k3s: 'yes'":                   "/k3s",
		"config: {offLnk: vxlan}":      "'offLnk' not allowed",
		"config: {offLink: vxlna}":     "/config/offLink",
		"config: {vxlan: {vni: 0}}":    "/config/vxlan/vni",
		"config: {mtu: '1500'}":        "/config/mtu",
		"image: ''":                    "the chart has no default image",
		"k3s: true\ncrio: true":        "components k3s and crio exclude each other",
		"sriov: true\ndra: true":       "components sriov and dra exclude each other",
		"openshift: true":              "component openshift needs dra or sriov",
		"openshift: true\nvxlan: true": "components openshift and vxlan exclude each other",
	} {
		if _, err := helmTemplate(c, "default", values); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %v, want %s", values, err, says)
		}
	}
}

// Two builds of the same source have equal bytes. A build of another commit has another version.
func TestChartTwice(t *testing.T) {
	if again, err := packChart(); err != nil || !bytes.Equal(packedChart(t), again) {
		t.Errorf("packed twice, the chart differs: %v", err)
	}
	for version, want := range map[string]string{"v1.2.3": "1.2.3", "v1.2.3-4-gabc1234": "1.2.3-4-gabc1234",
		"0123456-dirty": "0.0.0-g0123456-dirty", "unknown": "0.0.0-gunknown", "v1.2": "0.0.0-gv1-2"} {
		got := chartVersion(version)
		meta := v2.Metadata{APIVersion: "v2", Name: "podlace", Version: got}
		if err := meta.Validate(); err != nil || got != want {
			t.Errorf("%s became %s, want %s: %v", version, got, want, err)
		}
	}
}

// `make chart` writes the archive and an OCI layout with the same archive. A second run overwrites both.
func TestChartFiles(t *testing.T) {
	out := t.TempDir()
	for _, version := range []string{"v1.2.2", "v1.2.3"} {
		if err := run([]string{"chart", "-image", testImage, "-conf", conf, "-version", version, "-out", out}); err != nil {
			t.Fatal(err)
		}
	}
	archive, err := os.ReadFile(filepath.Join(out, "podlace-1.2.3.tgz"))
	if err != nil {
		t.Fatal(err)
	}
	blobs, err := filepath.Glob(filepath.Join(out, "chart", "blobs", "sha256", "*"))
	if err != nil || len(blobs) != 3 {
		t.Fatalf("%v, %v", err, blobs)
	}
	if !slices.ContainsFunc(blobs, func(file string) bool {
		data, err := os.ReadFile(file)
		return err == nil && bytes.Equal(data, archive)
	}) {
		t.Error("the layout lacks the archive")
	}
	if err := run([]string{"chart", "-conf", conf, "-out", out}); err == nil || !strings.Contains(err.Error(), "make image PUSH=") {
		t.Errorf("without an image: %v", err)
	}
}

// TestNotes checks that the notes of an installation contain the command that must run before `helm uninstall`, and the one that makes
// the DeviceClasses.
func TestNotes(t *testing.T) {
	c := loadedChart(t)
	release := common.ReleaseOptions{Name: "net", Namespace: "lan", Revision: 1, IsInstall: true}
	config := map[string]any{"resourceList": []any{map[string]any{"resourceName": "a", "api": "dra"}}}
	for want, set := range map[string]map[string]any{
		"helm upgrade net CHART --namespace lan --reuse-values --set removal=true": {},
		"podlace sriov classes --config-file config.json | kubectl apply -f -":     {"dra": true, "sriovConfig": config},
	} {
		values, err := util.ToRenderValues(c, set, release, common.DefaultCapabilities)
		if err != nil {
			t.Fatal(err)
		}
		files, err := engine.Render(c, values)
		if notes := files["podlace/templates/NOTES.txt"]; err != nil || !strings.Contains(notes, want) {
			t.Errorf("%v: %s", err, notes)
		}
	}
}
