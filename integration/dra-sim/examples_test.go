// SPDX-License-Identifier: Apache-2.0

package main

import (
	"bytes"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/dynamic-resource-allocation/cel"
	"sigs.k8s.io/yaml"

	"github.com/podlace/podlace/pkg/claim"
	"github.com/podlace/podlace/pkg/daemon/claimcheck"
)

const document = "../../docs/DRA.md"

// codeBlocks returns the code blocks of a document in one language.
func codeBlocks(t *testing.T, path, language string) (out []string) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	for _, m := range regexp.MustCompile("(?s)\n```"+language+"\n(.*?)\n```").FindAllStringSubmatch(string(data), -1) {
		out = append(out, m[1]+"\n")
	}
	return out
}

// objectOf decodes a Kubernetes object from YAML. An unknown key in the YAML text is an error.
func objectOf(t *testing.T, text string) runtime.Object {
	t.Helper()
	var head metav1.TypeMeta
	if err := yaml.Unmarshal([]byte(text), &head); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	objects := map[string]runtime.Object{"Namespace": &corev1.Namespace{}, "Pod": &corev1.Pod{}, "DeviceClass": &resourceapi.DeviceClass{},
		"ResourceClaim":         &resourceapi.ResourceClaim{},
		"ResourceClaimTemplate": &resourceapi.ResourceClaimTemplate{}, "DeviceTaintRule": &resourceapi.DeviceTaintRule{}}
	o := objects[head.Kind]
	if o == nil {
		t.Fatalf("no test knows the kind %q of %s", head.Kind, text)
	}
	if err := yaml.UnmarshalStrict([]byte(text), o); err != nil {
		t.Fatalf("%v in %s", err, text)
	}
	return o
}

// celExpressions returns the CEL expressions of a DeviceClass, and those of requests by the DeviceClass that they use.
func celExpressions(o runtime.Object) (ofClass []string, ofRequest map[string][]string) {
	of := func(selectors []resourceapi.DeviceSelector) (out []string) {
		for _, s := range selectors {
			out = append(out, s.CEL.Expression)
		}
		return out
	}
	ofRequest = map[string][]string{}
	var spec resourceapi.ResourceClaimSpec
	switch o := o.(type) {
	case *resourceapi.DeviceClass:
		return of(o.Spec.Selectors), nil
	case *resourceapi.ResourceClaim:
		spec = o.Spec
	case *resourceapi.ResourceClaimTemplate:
		spec = o.Spec.Spec
	}
	for _, r := range spec.Devices.Requests {
		if r.Exactly != nil {
			ofRequest[r.Exactly.DeviceClassName] = append(ofRequest[r.Exactly.DeviceClassName], of(r.Exactly.Selectors)...)
		}
		for _, s := range r.FirstAvailable {
			ofRequest[s.DeviceClassName] = append(ofRequest[s.DeviceClassName], of(s.Selectors)...)
		}
	}
	return nil, ofRequest
}

// everyDevice returns healthy and faulty devices of machines with and without NUMA nodes, and one of another driver.
func everyDevice(t *testing.T) (out []cel.Device) {
	t.Helper()
	c, err := parseDefaultConfig()
	if err != nil {
		t.Fatal(err)
	}
	out = append(out, cel.Device{Driver: "gpu.example.com"})
	for _, m := range []machine{{name: "a", numa: 2, pfs: 3, vfs: 2, blind: 1}, {name: "b", pfs: 2, vfs: 1},
		{name: "c", numa: 1, pfs: 1, vfs: 1}} {
		for _, s := range publishedSlices(m.name, m.inventory(c)) {
			for _, d := range s.Spec.Devices {
				out = append(out, cel.Device{Driver: claim.Driver, Attributes: d.Attributes})
			}
		}
	}
	return out
}

// matchesDevice evaluates an expression for a device, which must compile and give no error.
func matchesDevice(t *testing.T, expression string, d cel.Device) bool {
	t.Helper()
	r := cel.GetCompiler(cel.Features{}).CompileCELExpression(expression, cel.Options{})
	if r.Error != nil {
		t.Fatalf("%s: %v", expression, r.Error)
	}
	ok, _, err := r.DeviceMatches(t.Context(), d)
	if err != nil {
		t.Errorf("%s: %v, with a device of driver %s", expression, err, d.Driver)
	}
	return ok
}

// TestEveryExampleCompiles (DRA-10): the API server accepts each object in docs/DRA.md, README.md and the output of 'sriov-device-plugin
// classes'. Each selector can be evaluated for every device, even without an attribute. check-claim reports no problem, and three notices:
// about another driver's class, adminAccess, and having only examples of VFs.
func TestEveryExampleCompiles(t *testing.T) {
	config := codeBlocks(t, document, "json")
	shown := slices.Concat(codeBlocks(t, document, "yaml"), codeBlocks(t, "../../README.md", "yaml"))
	if len(config) != 1 || len(shown) < 7 {
		t.Fatalf("%d configurations and %d blocks of YAML", len(config), len(shown))
	}
	printed, err := printedClasses(t.TempDir(), config[0])
	if err != nil {
		t.Fatal(err)
	}
	server, devices := newAPIServer(), everyDevice(t)
	byClass := map[string][]string{}
	for _, c := range printed {
		byClass[c.Name], _ = celExpressions(c)
	}
	for _, text := range shown {
		for _, one := range splitDocuments(text) {
			if strings.Contains(one, "apiVersion: kubevirt.io/v1\n") {
				continue
			}
			o := objectOf(t, one)
			switch o.(type) {
			case *corev1.Pod, *corev1.Namespace:
				continue
			}
			if err := server.validateNew(o); err != nil {
				t.Errorf("%v\n%s", err, one)
			}
			ofClass, ofRequest := celExpressions(o)
			for class, list := range ofRequest {
				evaluateAll(t, devices, byClass[class], list)
			}
			evaluateAll(t, devices, nil, ofClass)
		}
	}
	for _, c := range printed {
		if err := server.validateNew(c); err != nil {
			t.Error(err)
		}
		evaluateAll(t, devices, nil, byClass[c.Name])
	}
	checkClaims(t, config[0], shown)
}

// evaluateAll evaluates a request's expressions for all devices that its class selects, like the allocator.
func evaluateAll(t *testing.T, devices []cel.Device, class, list []string) {
	t.Helper()
	for _, d := range devices {
		if !slices.ContainsFunc(class, func(e string) bool { return !matchesDevice(t, e, d) }) {
			for _, e := range list {
				matchesDevice(t, e, d)
			}
		}
	}
}

// checkClaims runs 'sriov-device-plugin check-claim' for the examples in the documents.
func checkClaims(t *testing.T, config string, shown []string) {
	t.Helper()
	dir := t.TempDir()
	for name, text := range map[string]string{"config.json": config, "all.yaml": strings.Join(shown, "\n---\n")} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var stdout, stderr bytes.Buffer
	args := []string{"check-claim", filepath.Join(dir, "all.yaml"), "--config-file", filepath.Join(dir, "config.json")}
	status, _ := claimcheck.Run(args, nil, &stdout, &stderr)
	const notice = "class \"dra.cpu\" is not known and was not checked"
	const request = "request vf: 1 VF of example.com/fast by class fast.example.com\n  mtu 1450 (claim)\n"
	if status != 0 || strings.Count(stderr.String(), "\n") != 3 || !strings.Contains(stderr.String(), notice) ||
		!strings.Contains(stdout.String(), request) {
		t.Errorf("status %d, %s\n%s", status, stderr.String(), stdout.String())
	}
}

// An expression that reads an attribute without a check for it fails for a device without it, and check-claim reports it.
func TestGuardsMatter(t *testing.T) {
	r := cel.GetCompiler(cel.Features{}).CompileCELExpression(`device.attributes["resource.kubernetes.io"].numaNode == 1`, cel.Options{})
	failed := 0
	for _, d := range everyDevice(t) {
		if _, _, err := r.DeviceMatches(t.Context(), d); err != nil {
			failed++
		}
	}
	if failed < 2 {
		t.Errorf("%d devices fail: want that of the other driver and those without a NUMA node", failed)
	}
}

// The table in docs/DRA.md has exactly the published attributes and their types.
func TestAttributesAreDocumented(t *testing.T) {
	data, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(data), "\n## Attributes of a VF\n")
	section, _, _ = strings.Cut(section, "\n## ")
	listed := map[string]string{}
	for _, row := range regexp.MustCompile("(?m)^\\| (`.*`) \\| (string|int|bool) \\|").FindAllStringSubmatch(section, -1) {
		domain := ""
		for _, name := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(row[1], -1) {
			d, id, ok := strings.Cut(name[1], "/")
			if !ok {
				d, id = domain, name[1]
			}
			domain = d
			listed[d+"/"+id] = row[2]
		}
	}
	found := map[string]string{}
	for _, d := range everyDevice(t) {
		for name, a := range d.Attributes {
			full := string(name)
			if !strings.Contains(full, "/") {
				full = claim.Driver + "/" + full
			}
			switch {
			case a.StringValue != nil:
				found[full] = "string"
			case a.IntValue != nil:
				found[full] = "int"
			default:
				found[full] = "bool"
			}
		}
	}
	if diff := cmp.Diff(found, listed); diff != "" {
		t.Errorf("%s (-published +document):\n%s", document, diff)
	}
	for _, d := range everyDevice(t)[1:] {
		for _, name := range slices.Sorted(maps.Keys(found)) {
			short := strings.TrimPrefix(name, claim.Driver+"/")
			if _, ok := d.Attributes[resourceapi.QualifiedName(short)]; !ok && !strings.HasSuffix(name, "/numaNode") {
				t.Errorf("a device lacks %s: %s", name, fmt.Sprint(d.Attributes))
			}
		}
	}
}
