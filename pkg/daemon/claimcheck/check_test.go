// SPDX-License-Identifier: Apache-2.0

package claimcheck

import (
	"bytes"
	"encoding/json"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/integration/pcitest"
	"github.com/podlace/podlace/pkg/daemon/pool"
)

// claimOf returns a ResourceClaim whose field spec.devices has the given content.
func claimOf(devices string) string {
	return "apiVersion: resource.k8s.io/v1\nkind: ResourceClaim\nmetadata: {name: c, namespace: shop}\nspec:\n  devices:\n" + devices
}

// oneVF is a request for one VF, from the class of example.com/fast.
const oneVF = "    requests: [{name: vf, exactly: {deviceClassName: fast.example.com}}]\n"

// parameters returns an entry of spec.devices.config.
func parameters(requests, settings string) string {
	return "    - {requests: [" + requests + "], opaque: {driver: sriov.podlace.io, parameters: " +
		"{apiVersion: sriov.podlace.io/v1alpha1, kind: VFConfig, " + settings + "}}}\n"
}

// position matches the file, line and column of a message, which TestCheckClaimPlaces checks.
var position = regexp.MustCompile(`m\.yaml:[0-9]+:[0-9]+: `)

func run(args ...string) (status int, stdout, stderr string) {
	var out, said bytes.Buffer
	status, _ = Run(args, strings.NewReader(""), &out, &said)
	return status, out.String(), said.String()
}

// publishedSlices returns the ResourceSlices of a node with 32 VFs of each resource of draConfig.
func publishedSlices(t *testing.T) string {
	t.Helper()
	config, err := pool.Parse(pool.Source{Prefix: "example.com"}, []byte(draConfig))
	if err != nil {
		t.Fatal(err)
	}
	list := map[string]any{"kind": "List", "items": publish(exampleInventory(config), "node-1")}
	text, err := json.Marshal(list)
	if err != nil {
		t.Fatal(err)
	}
	return strings.ReplaceAll(string(text), `{"metadata"`, `{"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice", "metadata"`)
}

func runCheck(t *testing.T, manifest string, args ...string) (status int, stdout, stderr string) {
	t.Helper()
	dir := pcitest.WriteFiles(t, map[string]string{"config.json": draConfig, "m.yaml": manifest, "slices.json": publishedSlices(t)})
	args = append([]string{"check-claim", filepath.Join(dir, "m.yaml"), "--config-file", filepath.Join(dir, "config.json"),
		"--resource-prefix", "example.com", "--slices", filepath.Join(dir, "slices.json")}, args...)
	status, stdout, stderr = run(args...)
	return status, strings.ReplaceAll(stdout, dir+"/", ""), position.ReplaceAllString(strings.ReplaceAll(stderr, dir+"/", ""), "m.yaml: ")
}

// TestCheckClaim checks that the class and the claim are merged key by key, and that each setting is printed with its source.
func TestCheckClaim(t *testing.T) {
	const template = `apiVersion: resource.k8s.io/v1
kind: ResourceClaimTemplate
metadata: {name: two, namespace: shop}
spec:
  spec:
    devices:
      requests:
      - name: a
        exactly: {deviceClassName: fast.example.com}
      - name: b
        firstAvailable:
        - {name: fast, deviceClassName: fast.example.com, count: 2}
        - {name: open, deviceClassName: open-1.example.org}
      - {name: gpu, exactly: {deviceClassName: gpu.example.com}}
      config:
      - opaque: {driver: gpu.example.com, parameters: {vlann: 1}}
      - requests: [a]
        opaque:
          driver: sriov.podlace.io
          parameters: {apiVersion: sriov.podlace.io/v1alpha1, kind: VFConfig, vlan: 150, mac: "02:00:00:00:00:01"}
      - requests: [b]
        opaque:
          driver: sriov.podlace.io
          parameters: {apiVersion: sriov.podlace.io/v1alpha1, kind: VFConfig, resource: example.com/fast, mtu: 1400}
---
apiVersion: resource.k8s.io/v1
kind: ResourceClaim
metadata: {name: see, namespace: shop}
spec: {devices: {requests: [{name: see, exactly: {deviceClassName: fast.example.com, adminAccess: true, allocationMode: All,
  selectors: [{cel: {expression: 'device.attributes["sriov.podlace.io"].vf < 16'}}]}}]}}
---
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: gpu.example.com}
spec:
  selectors: [{cel: {expression: 'device.driver == "gpu.example.com"'}}]
---
apiVersion: v1
kind: Pod
metadata: {name: web, namespace: shop}
spec:
  resourceClaims: [{name: vf, resourceClaimTemplateName: two}]
  containers:
  - {name: app, image: x, resources: {limits: {cpu: 2, example.com/fast: 3}}}
`
	const want = `m.yaml: ResourceClaimTemplate shop/two: request a: 1 VF of example.com/fast by class fast.example.com
  vlan 150 (claim)
  mac "02:00:00:00:00:01" (claim)
  trust "on" (class)
  maxTxRate 1000 (class)
m.yaml: ResourceClaimTemplate shop/two: request b/fast: 2 VFs of example.com/fast by class fast.example.com
  vlan 100 (class)
  trust "on" (class)
  maxTxRate 1000 (class)
  mtu 1400 (claim)
m.yaml: ResourceClaimTemplate shop/two: request b/open: 1 VF of example.org/Open_1 by class open-1.example.org
m.yaml: ResourceClaim shop/see: request see: all VFs (admin access) of example.com/fast by class fast.example.com
m.yaml: Pod shop/web, container app: request vf: 3 VFs of example.com/fast by class fast.example.com
  vlan 100 (class)
  trust "on" (class)
  maxTxRate 1000 (class)
`
	status, stdout, stderr := runCheck(t, template)
	if diff := cmp.Diff(want, stdout); diff != "" || status != 0 || strings.Count(stderr, "\n") != 2 ||
		!strings.Contains(stderr, "want devices of gpu.example.com") || !strings.Contains(stderr, "admin-access") {
		t.Errorf("status %d, %s\n-want +got\n%s", status, stderr, diff)
	}
	_, stdout, _ = runCheck(t, template, "-o", "json")
	var got struct {
		Requests []served
		Problems []string
	}
	if err := json.Unmarshal([]byte(stdout), &got); err != nil || len(got.Requests) != 5 || len(got.Problems) != 0 {
		t.Errorf("%v: %s", err, stdout)
	}
}

// TestCheckClaimRefused checks that an error contains the file, the object, the entry, the key and the value.
func TestCheckClaimRefused(t *testing.T) {
	const pod = "apiVersion: v1\nkind: Pod\nmetadata: {name: web}\nspec: {resourceClaims: [{name: vf, resourceClaimTemplateName: none}]}\n"
	const at = "m.yaml: ResourceClaim shop/c: spec.devices."
	for _, c := range []struct{ name, manifest, says string }{
		{"unknown key", claimOf(oneVF + "    config:\n" + parameters("", "vlann: 1")),
			at + "config[0].opaque.parameters.vlann: unknown key; did you mean vlan?"},
		{"wrong type", claimOf(oneVF + "    config:\n" + parameters("", "vlan: many")), at + `config[0].opaque.parameters.vlan: "many": want a number`},
		{"not allowed", claimOf(oneVF + "    config:\n" + parameters("vf", "trust: \"off\"")),
			at + `config[0].opaque.parameters.trust: "off": claims may not set it; they may set: `},
		{"out of range", claimOf(oneVF + "    config:\n" + parameters("vf", "vlan: 300")),
			at + "config[0].opaque.parameters.vlan: 300: claims may set 100-199"},
		{"no such request", claimOf(oneVF + "    config:\n" + parameters("vff", "mtu: 1400")), at + `config[0].requests[0]: no request "vff"`},
		{"other resource", claimOf(oneVF + "    config:\n" + parameters("", "resource: example.com/slow, mtu: 1400")),
			at + "config[0].opaque.parameters: applies to no device of the claim (resource example.com/slow)"},
		{"one MAC for two VFs", claimOf("    requests: [{name: vf, exactly: {deviceClassName: fast.example.com, count: 2}}]\n    config:\n" +
			parameters("", `mac: "02:00:00:00:00:01"`)),
			at + `config[0].opaque.parameters.mac: "02:00:00:00:00:01": only one device can have it, but the entry applies to several devices`},
		{"unknown class", claimOf(strings.Replace(oneVF, "fast", "fats", 1)),
			at + `requests[0].exactly.deviceClassName: class "fats.example.com" is not known; did you mean fast.example.com?`},
		{"settings, no class", claimOf(strings.Replace(oneVF, "fast.example.com", "slow", 1) + "    config:\n" + parameters("", "mtu: 1400")),
			`class "slow" is not known, so the settings for its VFs were not checked: give its file with --class; known classes: fast.example.com, `},
		{"no request", claimOf("    requests: []\n"), at + "requests: no request has exactly"},
		{"old version", strings.Replace(claimOf(oneVF), "resource.k8s.io/v1", "resource.k8s.io/v1beta1", 1),
			`m.yaml: ResourceClaim shop/c: apiVersion: "resource.k8s.io/v1beta1": want resource.k8s.io/v1, where each request has exactly or firstAvailable`},
		{"unguarded", claimOf("    requests: [{name: vf, exactly: {deviceClassName: fast.example.com, selectors: " +
			`[{cel: {expression: 'device.attributes["resource.kubernetes.io"].numaNode == 1'}}]}}]` + "\n"),
			at + "requests[0].exactly.selectors[0].cel.expression: it fails on a device without resource.kubernetes.io/numaNode, and the scheduler"},
		{"no driver", "apiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {name: own}\nspec: {selectors: [{cel: {expression: " +
			`'device.attributes["sriov.podlace.io"].resource == "example.com/fast"'}}]}` + "\n",
			"m.yaml: DeviceClass own: spec.selectors[0].cel.expression: it fails on devices of other drivers (no such key: resource), and the scheduler"},
		{"template elsewhere", pod, "m.yaml: Pod default/web: spec.resourceClaims[0]: ResourceClaimTemplate none is in none of the files"},
		{"other API", claimOf("    requests: [{name: vf, exactly: {deviceClassName: fast.example.com, selectors: " +
			`[{cel: {expression: 'device.attributes["sriov.podlace.io"].resource == "example.com/old"'}}]}}]` + "\n"),
			at + `requests[0].exactly.selectors[0].cel.expression: it compares sriov.podlace.io/resource with "example.com/old", which no device here has`},
	} {
		status, _, stderr := runCheck(t, c.manifest)
		if status != exitProblems || !strings.Contains(stderr, c.says) {
			t.Errorf("%s: status %d, %s\nwant %s", c.name, status, stderr, c.says)
		}
	}
	const both = "    requests: [{name: A b, exactly: {deviceClassName: fast.example.com, count: -1, allocationMode: Al}}, {name: b, exactly: " +
		"{deviceClassName: fast.example.com, count: many, adminAccess: 1}}, {name: b, exactly: {deviceClassName: fast.example.com, count: 2, " +
		"allocationMode: All, selectors: {}}}, {name: {c: 1}}, [7]]\n    config:\n    - {requests: [b, 5], opaque: x}\n"
	_, _, stderr := runCheck(t, claimOf(both)+"---\n"+claimOf(oneVF+"    config:\n"+parameters("", "vlann: 1"))+"a: 1\na: 2\n"+
		"---\nkind: Pod\nspec: {resourceClaims: [{name: 5}], containers: 7}\n---\na: [\n")
	for _, says := range []string{
		`requests[0].name: "A b": want a name`, `requests[0].exactly.allocationMode: "Al": want ExactCount or All`,
		"requests[0].exactly.count: -1: want 1-32", `requests[1].exactly.count: "many": want a whole number`,
		"requests[1].exactly.adminAccess: 1: want true or false", "requests[2].name: b: another request has this name",
		"requests[2].exactly.count: 2: want 1-32, as many devices as a claim can have, and no count with allocationMode All",
		"requests[2].exactly.selectors: an object: want a list", "requests[3]: want exactly or firstAvailable",
		"requests[4]: a list: want an object", "requests[3].name: an object: want a string",
		"config[0].requests[1]: 5: want a string", `config[0].opaque: "x": want an object`,
		"parameters.vlann: unknown key", "m.yaml: a: duplicate key", "resourceClaims[0].name: 5: want a string",
		"resourceClaims[0]: want resourceClaimName or resourceClaimTemplateName",
		"spec.containers: 7: want a list", "m.yaml: yaml: did not find expected node content",
	} {
		if !strings.Contains(stderr, says) {
			t.Errorf("got %s\nwant %s", stderr, says)
		}
	}
	for manifest, says := range map[string]string{
		"kind: ConfigMap\n": "m.yaml: nothing to check: want a ResourceClaim, ResourceClaimTemplate, DeviceClass, or a Pod with claims",
		"":                  "m.yaml: nothing to check",
	} {
		if status, _, stderr := runCheck(t, manifest); status != exitFailed || !strings.Contains(stderr, says) {
			t.Errorf("%q: status %d, %s", manifest, status, stderr)
		}
	}
}

// TestCheckClaimClass checks that a class from a file takes precedence over a printed one.
func TestCheckClaimClass(t *testing.T) {
	class := pcitest.WriteFiles(t, map[string]string{"class.yaml": `apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: fast.example.com}
spec:
  selectors:
  - cel:
      expression: device.driver == "sriov.podlace.io" && device.attributes["sriov.podlace.io"].resource == "example.com/fast"
  config: [{opaque: {driver: sriov.podlace.io, parameters: {apiVersion: sriov.podlace.io/v1alpha1, kind: VFConfig, vlan: 7}}}]
`, "empty.yaml": claimOf(oneVF)}) + "/class.yaml"
	status, stdout, stderr := runCheck(t, claimOf(oneVF), "--class", class)
	if status != 0 || !strings.HasSuffix(stdout, "class fast.example.com\n  vlan 7 (class)\n") {
		t.Errorf("status %d, %s%s", status, stdout, stderr)
	}
	status, _, stderr = runCheck(t, claimOf(oneVF), "--class", filepath.Dir(class)+"/empty.yaml")
	if status != exitFailed || !strings.Contains(stderr, "empty.yaml: no DeviceClass\n") {
		t.Errorf("status %d, %s", status, stderr)
	}
}

// TestCheckClaimPlaces checks that a message has the line and column of its key, also for an object of a list.
func TestCheckClaimPlaces(t *testing.T) {
	const claim = "apiVersion: resource.k8s.io/v1\n  kind: ResourceClaim\n  metadata: {name: c}\n  spec:\n    devices:\n      requests:\n" +
		"      - name: vf\n        exactly: {deviceClassName: fast.example.com, cuont: 2}\n" +
		"      config:\n      - opaque:\n          driver: sriov.podlace.io\n          parameters:\n" +
		"            apiVersion: sriov.podlace.io/v1alpha1\n            kind: VFConfig\n            vlann: 1\n            mtu: 1\n            ключ: 1\n    tail: 1\n    tail: 2\n"
	dir := pcitest.WriteFiles(t, map[string]string{"config.json": draConfig, "m.yaml": "kind: List\nitems:\n- " + claim,
		"twice.yaml": "kind: Pod\nkind: Pod\n"})
	t.Chdir(dir)
	_, _, stderr := run("check-claim", "m.yaml", "--config-file", "config.json", "--resource-prefix", "example.com")
	for _, want := range []string{
		"m.yaml:10:54: ResourceClaim default/c: spec.devices.requests[0].exactly.cuont: unknown key; did you mean count?\n",
		"m.yaml:17:13: ResourceClaim default/c: spec.devices.config[0].opaque.parameters.vlann: unknown key; did you mean vlan?\n",
		"m.yaml:18:13: ResourceClaim default/c: spec.devices.config[0].opaque.parameters.mtu: 1: want 68-65535\n",
		`m.yaml:19:13: ResourceClaim default/c: spec.devices.config[0].opaque.parameters."\u043a\u043b\u044e\u0447": unknown key; known keys: `,
		"m.yaml:21:5: items[0].spec.tail: duplicate key, first in line 20\n",
	} {
		if !strings.Contains(stderr, want) {
			t.Errorf("got %s\nwant %s", stderr, want)
		}
	}
	if strings.Count(stderr, "duplicate key") != 1 {
		t.Errorf("got %s\nwant one duplicate key", stderr)
	}
	_, _, stderr = run("check-claim", "twice.yaml", "--config-file", "config.json", "--resource-prefix", "example.com")
	if !strings.Contains(stderr, "twice.yaml:2:1: kind: duplicate key") {
		t.Error(stderr)
	}
}
