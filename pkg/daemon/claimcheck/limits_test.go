// SPDX-License-Identifier: Apache-2.0

package claimcheck

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/pcitest"
)

// claimNamed returns a ResourceClaim with one VF and the given settings.
func claimNamed(name, settings string) string {
	return strings.Replace(claimOf(oneVF+"    config:\n"+parameters("", settings)), "name: c", "name: "+name, 1)
}

// podOf returns an object of the given kind with a pod that has the claims.
func podOf(kind, claims string) string {
	spec := "{containers: [], resourceClaims: [" + claims + "]}"
	switch kind {
	case "Pod":
	case "CronJob":
		spec = "{jobTemplate: {spec: {template: {spec: " + spec + "}}}}"
	default:
		spec = "{template: {spec: " + spec + "}}"
	}
	return "---\napiVersion: any/v1\nkind: " + kind + "\nmetadata: {name: web, namespace: shop}\nspec: " + spec + "\n"
}

// TestCheckClaimLimits checks that check-claim reports what Prepare, ADD and the scheduler refuse.
func TestCheckClaimLimits(t *testing.T) {
	const at = "m.yaml: ResourceClaim shop/c: spec.devices."
	requests := func(text string) string { return claimOf("    requests: [" + text + "]\n") }
	const class = "deviceClassName: fast.example.com"
	for _, c := range []struct{ name, manifest, says string }{
		{"eth0", claimNamed("c", "ifName: eth0"), at + `config[0].opaque.parameters.ifName: "eth0": every pod already has an interface of this name`},
		{"lo", claimNamed("c", "ifName: lo"), `ifName: "lo": every pod`},
		{"33 VFs", requests("{name: vf, exactly: {" + class + ", count: 33}}"), at + "requests[0].exactly.count: 33: want 1-32, as many devices as a claim can have"},
		{"many VFs", requests("{name: vf, exactly: {" + class + ", count: 99999999999}}"), "count: 99999999999: want 1-32"},
		{"no name", strings.Replace(claimOf(oneVF), "name: c, ", "", 1), "ResourceClaim shop/: metadata.name is missing"},
		{"pod without a name", claimOf(oneVF) + strings.Replace(podOf("Pod", "{name: one, resourceClaimName: c}"), "name: web, ", "", 1),
			"Pod shop/: metadata.name is missing"},
		{"31 and 2 VFs", requests("{name: a, exactly: {" + class + ", count: 31}}, {name: b, firstAvailable: [{name: big, " + class +
			", count: 9}, {name: small, " + class + ", count: 2}]}"), at + "requests: request b: adding 2 devices exceeds the claim limit of 32, with 31 already"},
		{"one MAC for two requests", requests("{name: a, exactly: {"+class+"}}, {name: b, exactly: {"+class+"}}") + "    config:\n" +
			parameters("", `mac: "02:00:00:00:00:01"`), `config[0].opaque.parameters.mac: "02:00:00:00:00:01": only one device can have it`},
		{"settings for admin access", claimOf("    requests: [{name: vf, exactly: {" + class + ", adminAccess: true}}]\n    config:\n" +
			parameters("", "mtu: 1400")), at + "config[0].opaque.parameters: applies only to devices with adminAccess"},
		{"driver", strings.Replace(claimNamed("c", "mtu: 1400"), "driver: sriov.podlace.io", "driver: sriov.podlace.com", 1),
			at + `config[0].opaque.driver: "sriov.podlace.com": did you mean sriov.podlace.io?`},
		{"driver without apiVersion", claimOf(oneVF + "    config: [{opaque: {driver: sriov.podlace.oi, parameters: {mtu: 1400}}}]\n"),
			at + `config[0].opaque.driver: "sriov.podlace.oi": did you mean sriov.podlace.io?`},
		{"empty entry", claimOf(oneVF + "    config: [{}]\n"), at + "config[0].opaque is missing"},
		{"kind", claimOf(oneVF) + "---\n" + strings.Replace(claimOf(oneVF), "ResourceClaim", "ResourceClam", 1),
			`ResourceClam shop/c: kind: "ResourceClam": did you mean ResourceClaim?`},
		{"one name twice", claimOf(oneVF) + "---\n" + claimOf(oneVF), "shop/c: metadata.name: another ResourceClaim has this name"},
		{"claim of a container", claimNamed("a", "mtu: 1400") + strings.Replace(podOf("Pod", "{name: one, resourceClaimName: a}"),
			"containers: []", "containers: [{name: x, resources: {claims: [{name: one}, {name: two}]}}], "+
				"initContainers: [{name: y, resources: {claims: [{name: three}]}}]", 1),
			"shop/web: spec.initContainers[0].resources.claims[0].name: the pod has no claim \"three\"\n" +
				"m.yaml: Pod shop/web: spec.containers[0].resources.claims[1].name: the pod has no claim \"two\"\n"},
		{"a wrong type and forbidden values",
			strings.Replace(claimNamed("c", `mtu: "x", trust: "on", ips: [10.0.0.1]`), "}}]", ", count: 2}}]", 1),
			at + `config[0].opaque.parameters.mtu: "x": want a number` + "\n" + at +
				`config[0].opaque.parameters.trust: "on": claims may not set it; they may set: vlan 100-199, mac, mtu 68-9000, ifName, ips of resource example.com/fast` +
				"\n" + at + `config[0].opaque.parameters.ips: ["10.0.0.1"]: only one device can have it`},
		{"constraint", claimOf(oneVF + "    constraints: [{requests: [b], matchAttribute: resource.kubernetes.io/numaNode}]\n"),
			at + `constraints[0].requests[0]: no request "b"`},
		{"attribute", claimOf(oneVF + "    constraints: [{matchAttribute: sriov.podlace.io/numma}]\n"),
			at + "constraints[0].matchAttribute: sriov.podlace.io/numma: no VF has this attribute; did you mean sriov.podlace.io/numa?"},
		{"attribute by another name", claimOf(oneVF + "    constraints: [{matchAttribute: sriov.podlace.io/numaNode}]\n"),
			at + "constraints[0].matchAttribute: sriov.podlace.io/numaNode: no VF has this attribute: write sriov.podlace.io/numa, with values"},
		{"attribute that only VFs would need", claimOf(oneVF + "    constraints: [{matchAttribute: dra.net/foo}]\n"),
			at + "constraints[0].matchAttribute: dra.net/foo: it is an attribute of dranet without a counterpart"},
		{"attribute without domain", claimOf(oneVF + "    constraints: [{distinctAttribute: pf}]\n"),
			at + "constraints[0].distinctAttribute: pf: want a domain and a name"},
		{"two attributes", claimOf(oneVF + "    constraints: [{matchAttribute: sriov.podlace.io/numa, distinctAttribute: sriov.podlace.io/pf}]\n"),
			at + "constraints[0]: want either matchAttribute or distinctAttribute\n"},
		{"no attribute", claimOf(oneVF + "    constraints: [{requests: [vf]}]\n"), at + "constraints[0]: want either matchAttribute or distinctAttribute\n"},
		{"two claims, one MAC", claimNamed("a", `mac: "02:00:00:00:00:0a"`) + "---\n" + claimNamed("b", `mac: "02:00:00:00:00:0A"`) +
			podOf("Pod", "{name: one, resourceClaimName: a}, {name: two, resourceClaimName: b}"),
			`Pod shop/web: spec.resourceClaims[1]: claim two: mac "02:00:00:00:00:0A": one of the pod sets the same value`},
		{"two claims, one name", claimNamed("a", "ifName: data") + "---\n" + claimNamed("b", "ifName: data") +
			podOf("StatefulSet", "{name: one, resourceClaimName: a}, {name: two, resourceClaimName: b}"),
			`StatefulSet shop/web: spec.template.spec.resourceClaims[1]: claim two: ifName "data": one of the pod`},
		{"Deployment", podOf("Deployment", "{name: vf, resourceClaimTemplateName: none}"),
			"Deployment shop/web: spec.template.spec.resourceClaims[0]: ResourceClaimTemplate none is in none of the files"},
		{"CronJob", podOf("CronJob", "{name: vf, resourceClaimName: none}"),
			"CronJob shop/web: spec.jobTemplate.spec.template.spec.resourceClaims[0]: ResourceClaim none is in none of the files"},
		{"derived attribute", claimOf(strings.Replace(oneVF, "fast.example.com", "fast.example.com, derivedAttributes: [{name: sriov.podlace.io/x, "+
			"expression: 'true'}]", 1) + "    constraints: [{matchAttribute: sriov.podlace.io/x}, {matchAttribute: resource.kubernetes.io/pcieRoot}]\n"), "cannot handle request with derived attributes, the feature is disabled"},
		{"a wrong selector and a forbidden setting", strings.Replace(selecting(`device.attributes["sriov.podlace.io"].PFName == "a"`),
			"exactly: {", "exactly: {count: 1, ", 1) + "    config:\n" + parameters("", "vlan: 7"), at + "config[0].opaque.parameters.vlan: 7: claims may set 100-199"},
		{"settings for another driver", strings.Replace(claimOf("    requests: [{name: vf, exactly: {deviceClassName: fast.example.com}}, {name: cpu, exactly: "+
			"{deviceClassName: fast.example.com, selectors: [{cel: {expression: 'device.driver == \"cpu\"'}}]}}]\n    config:\n")+parameters("cpu", "mtu: 1400"),
			"name: c,", "name: c,", 1), at + "config[0].opaque.parameters: it applies to no request with VFs"},
		{"wrong place", claimOf(oneVF) + "  config: []\n", "ResourceClaim shop/c: spec.config: unknown key; the key config belongs to spec.devices"},
		{"misspelt", claimOf(oneVF + "    config: [{request: [vf]}]\n"), at + "config[0].request: unknown key; did you mean requests?"},
	} {
		status, _, stderr := runCheck(t, c.manifest)
		if status != exitProblems || !strings.Contains(stderr, c.says) {
			t.Errorf("%s: status %d, %s\nwant %s", c.name, status, stderr, c.says)
		}
	}
}

// TestClassOfAnyDriver checks that a request is examined if its class selects devices of any driver and only its selector, or an entry
// of the claim, names this one.
func TestClassOfAnyDriver(t *testing.T) {
	const class = "apiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {name: any}\nspec: {}\n---\n"
	request := func(selectors string) string {
		return strings.Replace(claimOf("    requests: [{name: a, exactly: {deviceClassName: any"+selectors+"}}]\n"), "name: c", "name: any", 1)
	}
	for manifest, says := range map[string]string{
		class + request(`, selectors: [{cel: {expression: 'device.driver == "sriov.podlace.io" && device.attributes["sriov.podlace.io"].numaa == 1'}}]`): "numaa",
		class + request("") + "    config:\n" + parameters("", "vlan: 7"):                                                                                "vlan: 7: claims may not set it",
	} {
		if status, stdout, stderr := runCheck(t, manifest); status != exitProblems || !strings.Contains(stderr, says) {
			t.Errorf("%s\nstatus %d, %s%s\nwant %s", manifest, status, stdout, stderr, says)
		}
	}
}

// TestUnknownClassOnce checks that an unknown class is reported once, without the config entries that apply to the request.
func TestUnknownClassOnce(t *testing.T) {
	_, _, stderr := runCheck(t, claimOf("    requests: [{name: a, exactly: {deviceClassName: own}}, {name: vf, exactly: {deviceClassName: fast.example.com}}]\n"+
		"    config:\n"+parameters("a", "mtu: 1400")+parameters("a", "ifName: data")))
	if strings.Count(stderr, "\n") != 1 || !strings.Contains(stderr, `class "own" is not known, so the settings`) {
		t.Error(stderr)
	}
}

// TestCheckClaimAccepted checks that valid objects have no problem, and that a part that cannot be checked causes a notice.
func TestCheckClaimAccepted(t *testing.T) {
	const twice = "{name: one, resourceClaimName: a}, {name: two, resourceClaimName: a}"
	qos := `---
apiVersion: resource.k8s.io/v1
kind: DeviceClass
metadata: {name: qos}
spec:
  selectors: [{cel: {expression: 'device.driver == "sriov.podlace.io"'}}]
  config: [{opaque: {driver: sriov.podlace.io, parameters: {apiVersion: sriov.podlace.io/v1alpha1, kind: VFConfig, vlanQoS: 3}}}]
---
` + claimOf(strings.Replace(oneVF, "fast.example.com", "qos", 1))
	for _, c := range []struct{ name, manifest, notice string }{
		{"class of another driver", claimOf("    requests: [{name: cpu, exactly: {deviceClassName: dra.cpu}}, {name: vf, exactly: " +
			"{deviceClassName: fast.example.com}}]\n    constraints: [{requests: [cpu], matchAttribute: dra.net/foo}]\n    config:\n" + parameters("vf", "mtu: 1400")),
			`requests[0].exactly.deviceClassName: class "dra.cpu" is not known and was not checked`},
		{"class of another driver, settings for all requests", claimOf("    requests: [{name: cpu, exactly: {deviceClassName: dra.cpu}}, " +
			"{name: vf, exactly: {deviceClassName: fast.example.com}}]\n    config:\n" + parameters("", "mtu: 1400")), `class "dra.cpu"`},
		{"alternative of another driver", claimOf("    requests: [{name: a, firstAvailable: [{name: cpu, deviceClassName: dra.cpu}, " +
			"{name: fast, deviceClassName: fast.example.com}]}]\n"), `firstAvailable[0].deviceClassName: class "dra.cpu" is not known`},
		{"class of another driver in the same domain", claimOf(strings.Replace(oneVF, "fast", "gpu", 1)), `class "gpu.example.com" is not known`},
		{"vlanQoS without vlan", strings.TrimPrefix(qos, "---\n"), "vlanQoS and vlanProto need a vlan that is not 0; ADD fails unless the conflist"},
		{"one claim twice", claimNamed("a", "ifName: data") + podOf("Pod", twice), ""},
		{"name with index", claimNamed("a", "ifName: 'data{index}'") + "---\n" + claimNamed("b", "ifName: 'data{index}'") +
			podOf("Deployment", strings.Replace(twice, "two, resourceClaimName: a", "two, resourceClaimName: b", 1)), ""},
		{"alternatives", claimOf("    requests: [{name: a, firstAvailable: [{name: fast, deviceClassName: fast.example.com}, " +
			"{name: open, deviceClassName: open-1.example.org}]}]\n    config:\n" + parameters("", `mac: "02:00:00:00:00:01"`)), ""},
		{"generated name", strings.Replace(claimOf(oneVF), "name: c", "generateName: c", 1), ""},
		{"32 VFs", claimOf("    requests: [{name: vf, exactly: {deviceClassName: fast.example.com, count: 32}}]\n"), ""},
		{"key of a newer version", claimOf(oneVF) + "  zzzzzzzzzzzzzzzz: 1\n", "spec.zzzzzzzzzzzzzzzz: this version of sriov-device-plugin does not know the key"},
		{"only a class", qos[:strings.Index(qos, "---\napiVersion: resource.k8s.io/v1\nkind: ResourceClaim\n")], ""},
		{"other objects of these kinds", claimOf(oneVF) + "---\nkind: Job\nspec: {tasks: []}\n---\nkind: Deployment\n", ""},
	} {
		status, _, stderr := runCheck(t, c.manifest)
		if status != 0 || c.notice == "" && stderr != "" || !strings.Contains(stderr, c.notice) {
			t.Errorf("%s: status %d, %s\nwant %s", c.name, status, stderr, c.notice)
		}
		_, stdout, _ := runCheck(t, c.manifest, "-o", "json")
		var got map[string][]any
		if err := json.Unmarshal([]byte(stdout), &got); err != nil || got["problems"] == nil || (len(got["notices"]) > 0) != (c.notice != "") {
			t.Errorf("%s: %v, %s", c.name, err, stdout)
		}
	}
}

// TestExamples checks claims without known devices: each request gets examples of its own resource, and one example stands for all.
func TestExamples(t *testing.T) {
	const class = "{deviceClassName: fast.example.com"
	for name, devices := range map[string]string{
		"settings that another resource forbids": "    requests: [{name: a, exactly: {deviceClassName: open-1.example.org}}, {name: b, exactly: " + class +
			", count: 2}}]\n    config:\n" + parameters("a", "mtu: 9200"),
		"all devices":  "    requests: [{name: a, exactly: " + class + ", allocationMode: All}}, {name: b, exactly: " + class + ", count: 2}}]\n",
		"alternatives": "    requests: [{name: a, firstAvailable: [{name: all, " + class[1:] + ", allocationMode: All}, {name: one, " + class[1:] + "}]}]\n",
	} {
		dir := pcitest.WriteFiles(t, map[string]string{"config.json": draConfig, "m.yaml": claimOf(devices)})
		status, stdout, stderr := run("check-claim", filepath.Join(dir, "m.yaml"), "--config-file", filepath.Join(dir, "config.json"),
			"--resource-prefix", "example.com")
		if status != 0 || strings.Count(stderr, "\n") != 1 || strings.Count(stdout, " by class ") != 2 {
			t.Errorf("%s: status %d, %s\n%s", name, status, stdout, stderr)
		}
	}
}
