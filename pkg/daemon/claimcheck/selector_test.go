// SPDX-License-Identifier: Apache-2.0

package claimcheck

import (
	"encoding/json"
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/pcitest"
)

func selecting(expression string) string {
	text, _ := json.Marshal(expression)
	return claimOf(fmt.Sprintf("    requests: [{name: vf, exactly: {deviceClassName: fast.example.com, selectors: [{cel: {expression: %s}}]}}]\n", text))
}

// TestSelectors checks the reports about selectors of a class, and of a request whose class selects VFs.
func TestSelectors(t *testing.T) {
	const own, standard = `device.attributes["sriov.podlace.io"]`, `device.attributes["resource.kubernetes.io"]`
	for _, c := range []struct{ expression, says string }{
		{own + `.numa == 0`, ""},
		{standard + `.numaNode == 1`, "it fails on a device without resource.kubernetes.io/numaNode"},
		{standard + `["numaNode"] == 1`, `write "numaNode" in device.attributes["resource.kubernetes.io"] && first`},
		{`device.attributes['dra.net'].numaNode == 1`, "it fails on a device without dra.net/numaNode"},
		{`!("numaNode" in ` + standard + `) || ` + standard + `.numaNode == 0`, ""},
		{`"numaNode" in device.attributes["dra.net"] || ` + standard + `.numaNode == 1`, "it fails on a device without resource.kubernetes.io/numaNode"},
		{`!has(` + standard + `.numaNode) || ` + standard + `.numaNode == 0`, ""},
		{standard + `.?numaNode.orValue(-1) == 0`, ""},
		{`cel.bind(k, ` + standard + `, k.numaNode == 1)`, "it fails on a device without resource.kubernetes.io/numaNode"},
		{`cel.bind(k, ` + own + `, k.vf < 4 && k.numa == 0)`, ""},
		{`cel.bind(k, ` + own + `, k.vf < 4 && k.vendor == "15b3")`, `it compares sriov.podlace.io/vendor with "15b3", which no device here has: they have "8086"`},
		{own + `.numaNode == 1`, `it reads sriov.podlace.io/numaNode: no VF has this attribute: write device.attributes["sriov.podlace.io"].numa, with values such as 0, 1`},
		{own + `.numaa == 1`, "did you mean sriov.podlace.io/numa?"},
		{own + `.x == 1`, "attributes of sriov.podlace.io: card, driver, kind, linkType, numa, pf, pfAddress, product, rdma, resource, vendor, vf"},
		{own + `.?numaa.orValue(1) == 1`, "notice: it tests for sriov.podlace.io/numaa: no VF has this attribute; did you mean"},
		{`"numaa" in ` + own + ` || true`, "notice: it tests for sriov.podlace.io/numaa: no VF has this attribute; did you mean"},
		{`device.attributes["sriov.podlace.io"].pciAddress == "0000:03:00.1"`, `write device.attributes["resource.kubernetes.io"].pciBusID, with values such as`},
		{`device.attributes["dra.net"].pciAddress == "0000:03:00.1"`, `write device.attributes["resource.kubernetes.io"].pciBusID, with values such as`},
		{standard + `.numanode == 1`, "did you mean resource.kubernetes.io/numaNode?"},
		{`device.attributes["dra.net"].numaNod == 1`, "no VF has this attribute; did you mean dra.net/numaNode?"},
		{standard + `.cpuSocketID == 1`, "it reads resource.kubernetes.io/cpuSocketID: no VF has this attribute"},
		{`device.attributes["sriov.podlace.com"].pf == "a"`, "no driver has this name; did you mean sriov.podlace.io?"},
		{`device.driver == "cpu.example.com" && ` + standard + `.cpuSocketID == 1 || device.driver == "sriov.podlace.io"`, ""},
		{own + `.exists(k, k == "pf")`, ""},
		{own + `.pf == 3`, "it compares sriov.podlace.io/pf with 3, but the type of the attribute is string"},
		{own + `.vf < "4"`, `compares sriov.podlace.io/vf with "4", but the type of the attribute is int`},
		{`4u > ` + own + `.vf`, `compares sriov.podlace.io/vf with 4, but the type of the attribute is int`},
		{own + `.rdma == "true"`, "the type of the attribute is bool"},
		{own + `.pf in ["ens1f0", "ens2f0"]`, ""},
		{own + `.pf in ["ens4f0", "ens3f0"]`, `it compares sriov.podlace.io/pf with "ens4f0", which no device here has: they have "ens1f0", "ens2f0"; did you mean`},
		{own + `.vf == 0 || ` + own + `.vf == 99`, `notice: it compares sriov.podlace.io/vf with 99, which no device here has: they have 0, 1, `},
		{own + `.vf > 3 && ` + own + `.vf < 3`, "requests[0].exactly: the selectors of class and request match no device"},
		{own + `.vendor == "0x8086"`, `it compares sriov.podlace.io/vendor with "0x8086", which no VF can have: want a value such as "8086"`},
		{own + `.linkType == "ethernet"`, `which no VF can have: want a value such as "ether"`},
		{standard + `.pciBusID == "03:00.1"`, "which no VF can have: want a value such as "},
		{own + `.pf != 3 && ` + own + `.rdma == true && ` + own + `.vf >= -1`, ""},
		{own + `.pf == "a" && (`, "line 1, character "},
		{own + `.vf`, ""}, // its type is unknown to the compiler
		{own + `.size()`, "must evaluate to bool"},
		{"pf == 1", "line 1, character 1: undeclared reference to 'pf'"},
		{"  ", "spec.devices.requests[0].exactly.selectors[0].cel.expression is missing"},
		// Other drivers.
		{`device.attributes["dra.net"].ifName == "eth1"`,
			`it is an attribute of dranet: for VFs of Podlace write device.attributes["sriov.podlace.io"].pf, with values such as "ens1f0", "ens2f0"`},
		{`device.attributes["dra.net"].pciVendor == "Mellanox Technologies"`, `write device.attributes["sriov.podlace.io"].vendor, with values such as "8086"`},
		{`has(device.attributes["dra.net"].ifName) && device.attributes["dra.net"].ifName == "eth1"`, "it reads dra.net/ifName: it is an attribute of dranet"},
		{`device.attributes["dra.net"]["rdmaDevice"] == "mlx5_0"`, `write device.attributes["sriov.podlace.io"].rdma`},
		{`device.capacity["sriov.podlace.io"].bandwidth.compareTo(quantity("4Gi")) >= 0`, "it fails on VFs, which have no capacity"},
		{`device.attributes["dra.net"].mtu > 1500`, "dra.net/mtu: it is an attribute of dranet without a counterpart: attributes of sriov.podlace.io: card"},
		{`device.attributes["sriovnetwork.k8snetworkplumbingwg.io"].PFName == "eth0"`,
			`it is an attribute of dra-driver-sriov: for VFs of Podlace write device.attributes["sriov.podlace.io"].pf`},
		{`device.attributes["sriovnetwork.openshift.io"].rootDevices == "0000:3b:00.0"`,
			`it is an attribute of sriov-network-operator: for VFs of Podlace write device.attributes["sriov.podlace.io"].pfAddress`},
		{own + `.resourceName == "a"`, `no VF has this attribute: write device.attributes["sriov.podlace.io"].resource`},
		{`device.driver == "dra.net"`, "class and selectors want devices of dra.net (dranet), which has none here"},
	} {
		status, _, stderr := runCheck(t, selecting(c.expression))
		text, notice := strings.CutPrefix(c.says, "notice: ")
		if c.says == "" && c.expression != own+".vf" && stderr != "" || strings.Contains(stderr, "it tests for") && !notice || !strings.Contains(stderr, text) || (status == 0) != (c.says == "" || notice) &&
			c.expression != own+".vf" {
			t.Errorf("%s: status %d, %q, want %q", c.expression, status, stderr, c.says)
		}
	}
	const class = "apiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {name: own}\nspec: {selectors: [{cel: {expression: '%s'}}]}\n"
	for expression, says := range map[string]string{
		own + `.resource == "example.com/fast"`: `it fails on devices of other drivers (no such key: resource), and the scheduler then starts the pod ` +
			`on no node: begin with device.driver == "sriov.podlace.io" &&`,
		own + `.resource == "example.com/fast" && device.driver == "sriov.podlace.io"`: "", // CEL's && takes operands in any order
		`device.driver == "cpu.example.com" && ` + standard + `.cpuSocketID == 1`:      "",
		`device.attributes["gpu.example.com"].model == "a"`:                            "it reads gpu.example.com/model: no VF has this attribute",
	} {
		if _, _, stderr := runCheck(t, fmt.Sprintf(class, expression)); says == "" && stderr != "" || !strings.Contains(stderr, says) {
			t.Errorf("%s: %q, want %q", expression, stderr, says)
		}
	}
}

// TestUnheld checks that a request or constraint that no node can hold is found, and only it.
func TestUnheld(t *testing.T) {
	const class = "exactly: {deviceClassName: fast.example.com"
	first := func(a, b string) string {
		return claimOf("    requests: [{name: vf, firstAvailable: [{name: a, deviceClassName: fast.example.com, " + a +
			"}, {name: b, deviceClassName: open-1.example.org, " + b + "}]}]\n")
	}
	for _, c := range []struct {
		name, manifest, says string
		status               int
	}{
		{"count", claimOf("    requests: [{name: a, " + class + "}}, {name: b, " + class + ", count: 17, selectors: [{cel: {expression: " +
			`'device.attributes["sriov.podlace.io"].vf < 8'}}]}}]` + "\n"),
			"requests[1].exactly: no node can hold the request: it wants 17 VFs, and at most 16 of a node match its class and selectors\n", 1},
		{"sum", claimOf("    requests: [{name: a, " + class + ", count: 3, selectors: &s [{cel: {expression: " +
			`'device.attributes["sriov.podlace.io"].vf < 2'}}]}}, {name: b, ` + class + ", count: 2, selectors: *s}}]\n"),
			"spec.devices.requests: a node can hold each request, but no node all of them\n", 1},
		{"matchAttribute", claimOf("    requests: [{name: a, " + class + ", count: 3}}]\n    constraints: [{matchAttribute: sriov.podlace.io/vendor}, " +
			"{matchAttribute: sriov.podlace.io/vf}]\n"), "constraints[1]: no node can hold the requests with this constraint", 1},
		{"all", claimOf("    requests: [{name: a, " + class + ", allocationMode: All, adminAccess: true, selectors: [{cel: {expression: " +
			`'device.attributes["sriov.podlace.io"].vf < 2'}}]}}]` + "\n"), "namespace with the label", 0},
		{"one alternative", first("count: 2", "selectors: [{cel: {expression: 'device.attributes[\"sriov.podlace.io\"].vf == -7'}}]"),
			"notice: m.yaml: ResourceClaim shop/c: spec.devices.requests[0].firstAvailable[1].selectors[0].cel.expression: it compares sriov.podlace.io/vf with -7", 0},
		{"no value of an alternative", first("count: 2", "selectors: [{cel: {expression: 'device.attributes[\"sriov.podlace.io\"].vf > 99'}}]"),
			"notice: m.yaml: ResourceClaim shop/c: spec.devices.requests[0].firstAvailable[1]: the selectors of class and request match no device", 0},
		{"capacity", claimOf("    requests: [{name: a, " + class + ", capacity: {requests: {ingressBandwidth: 10G}}}}]\n"),
			"requests[0].exactly: no node can hold the request: VFs have no capacity: remove the key capacity", 1},
		{"limit", strings.Replace(podOf("Pod", ""), "containers: []", "containers: [{name: x, resources: {limits: {example.com/fast: 33}}}]", 1),
			"Pod shop/web, container x: spec.containers[0].resources.limits.example.com/fast: 33: want 1-32", 1},
		{"limit of an unknown class", strings.Replace(podOf("Pod", ""), "containers: []",
			"containers: [{name: x, resources: {limits: {example.com/fast: 1, deviceclass.resource.kubernetes.io/gpu: 1}}}]", 1),
			`spec.containers[0].resources.limits.deviceclass.resource.kubernetes.io/gpu: class "gpu" is not known and was not checked`, 0},
	} {
		status, _, stderr := runCheck(t, c.manifest)
		if status != c.status || !strings.Contains(stderr, c.says) || strings.Count(stderr, "\n") != 1 {
			t.Errorf("%s: status %d, %s\nwant %s", c.name, status, stderr, c.says)
		}
	}
}

// TestNode checks claims against the devices of this node, and against examples on a node without VFs.
func TestNode(t *testing.T) {
	dir := pcitest.WriteFiles(t, map[string]string{"config.json": draConfig, "empty.yaml": "# nothing\n",
		"fits.yaml": selecting(`device.attributes["sriov.podlace.io"].pf == "ens0f0"`), "other.yaml": selecting(`device.attributes["sriov.podlace.io"].pf == "ens9f0"`)})
	check := func(file, sysfs string, more ...string) (int, string, string) {
		return run(append([]string{"check-claim", filepath.Join(dir, file), "--config-file", filepath.Join(dir, "config.json"),
			"--resource-prefix", "example.com", "--sysfs", sysfs, "--node-name", "node-1"}, more...)...)
	}
	cards := pcitest.Generate(t, pcitest.Machine{Nodes: 2, PFs: 1, VFs: 2})
	inSwitchdev := pcitest.Generate(t, pcitest.Machine{PFs: 1, VFs: 2})
	pcitest.Set(t, inSwitchdev, "0000:11:00.0", "net/eth7/phys_port_name", "pf0vf0")
	for _, c := range []struct {
		file, sysfs, says string
		status            int
	}{
		{"fits.yaml", cards, "", 0},
		{"other.yaml", cards, `with "ens9f0", which no device here has: they have "ens0f0", "ens1f0"; did you mean "ens0f0"?` + "\n", 1},
		{"fits.yaml", inSwitchdev, "exactly: resource example.com/fast: the plugin sriov refuses 2 devices, first 0000:11:02.0: PF 0000:11:00.0 is in switchdev mode", 0},
		{"other.yaml", t.TempDir(), "notice: no VF with \"api\": \"dra\" is on this node, so it was not checked how many VFs match: give --slices", 0},
	} {
		status, stdout, stderr := check(c.file, c.sysfs)
		if status != c.status || !strings.Contains(stderr, c.says) || strings.Contains(stdout, "1 VF of example.com/fast") != (status == 0) {
			t.Errorf("%s: status %d, %s%s", c.file, status, stdout, stderr)
		}
	}
	for says, args := range map[string][]string{
		"--sysfs: stat /nope: no such file or directory: want the folder where sysfs is mounted": {"--sysfs", "/nope"},
		`--node-name "x y": want the name of a Node object`:                                      {"--node-name", "x y"},
	} {
		if status, _, stderr := check("fits.yaml", cards, args...); status != exitFailed || !strings.Contains(stderr, says) {
			t.Errorf("%s: status %d, %s", args, status, stderr)
		}
	}
	const class = "apiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {name: fast.example.com}\nspec: {selectors: [{cel: {expression: 'device.driver == " +
		`"sriov.podlace.io" && device.attributes["sriov.podlace.io"].pf == "ens7f0"'}}]}` + "\n---\n"
	m := pcitest.WriteFiles(t, map[string]string{"m.yaml": class + selecting(`device.attributes["sriov.podlace.io"].resource == "example.org/Open_1"`)})
	if status, stdout, stderr := check("fits.yaml", t.TempDir(), m+"/m.yaml"); status != exitProblems || strings.Count(stdout, "of example.org/Open_1") != 2 ||
		strings.Count(stdout, "of example.com/fast") != 1 {
		t.Errorf("a class with values of its own: status %d, %s%s", status, stdout, stderr)
	}
	status, _, stderr := check("fits.yaml", cards, filepath.Join(dir, "empty.yaml"))
	if status != 0 || !strings.Contains(stderr, "empty.yaml contains no object") {
		t.Errorf("an empty file: status %d, %s", status, stderr)
	}
}

// TestOtherDriver checks that claims for another driver are accepted if the cluster has its devices, even for a driver that Podlace
// replaces.
func TestOtherDriver(t *testing.T) {
	const slice = `kind: ResourceSlice
apiVersion: resource.k8s.io/v1
metadata: {name: s}
spec:
  {driver: dra.net, nodeName: host, pool: {name: host, generation: 1, resourceSliceCount: 1},
   devices: [{name: a, attributes: {ifName: {string: eth1}}}]}
`
	const class = "apiVersion: resource.k8s.io/v1\nkind: DeviceClass\nmetadata: {name: nic}\nspec: {selectors: [{cel: {expression: 'device.driver == " +
		`"dra.net" && device.attributes["dra.net"].ifName == "eth1"'}}]}` + "\n---\n"
	for config, want := range map[string]int{"dra.net": 0, "sriovnetwork.k8snetworkplumbingwg.io": exitProblems} {
		dir := pcitest.WriteFiles(t, map[string]string{"s.yaml": slice, "config.json": draConfig, "m.yaml": class +
			claimOf("    requests: [{name: a, exactly: {deviceClassName: nic}}]\n    config: [{opaque: {driver: "+config+", parameters: {}}}]\n")})
		status, _, stderr := run("check-claim", dir+"/m.yaml", "--slices", dir+"/s.yaml", "--config-file", dir+"/config.json")
		if status != want || (stderr == "") != (want == 0) {
			t.Errorf("%s: status %d, %s", config, status, stderr)
		}
	}
}

// TestSlicesFile checks that a file without ResourceSlices is refused, and that a cluster can be checked without a configuration. Without
// both, the error names the command that writes a cluster's file for --slices and --class.
func TestSlicesFile(t *testing.T) {
	t.Chdir(pcitest.WriteFiles(t, map[string]string{"s.json": publishedSlices(t), "old.yaml": "kind: ResourceSlice\napiVersion: resource.k8s.io/v1beta1\n",
		"cluster.yaml": publishedSlices(t) + `
---
{apiVersion: resource.k8s.io/v1, kind: DeviceClass, metadata: {name: fast.example.com}, spec: {selectors: [{cel: {expression:
  'device.driver == "sriov.podlace.io" && device.attributes["sriov.podlace.io"].resource == "example.com/fast"'}}]}}
`,
		"m.yaml": claimOf(oneVF + "    config:\n" + parameters("", "vlan: 7")), "none.yaml": "kind: Pod\n"}))
	for file, says := range map[string]string{"none.yaml": "no ResourceSlice: write it with 'kubectl get resourceslices -o json'",
		"old.yaml": "want a ResourceSlice of resource.k8s.io/v1", "s.json": `class "fast.example.com" is not known, so the settings`} {
		if status, _, stderr := run("check-claim", "m.yaml", "--slices", file); status == 0 || !strings.Contains(stderr, says) || strings.Count(stderr, "\n") != 1 {
			t.Errorf("%s: status %d, %s", file, status, stderr)
		}
	}
	if status, _, stderr := run("check-claim", "m.yaml"); status != exitFailed || !strings.Contains(stderr, getCluster+"' and add --slices cluster.json") {
		t.Errorf("without a configuration and slices: status %d, %s", status, stderr)
	}
	if status, stdout, stderr := run("check-claim", "m.yaml", "--slices", "cluster.yaml", "--class", "cluster.yaml"); status != 0 ||
		!strings.Contains(stdout, "1 VF of example.com/fast by class fast.example.com") {
		t.Errorf("slices and classes in one file: status %d, %s%s", status, stdout, stderr)
	}
}

// TestSharedPools checks claims against slices that are not of one node: a pool that several nodes share, devices with nodes of their
// own, and VFs in a pool with another name than their node.
func TestSharedPools(t *testing.T) {
	const slice = "---\nkind: ResourceSlice\napiVersion: resource.k8s.io/v1\nmetadata: {name: %[1]s}\nspec: {driver: %[1]s.example.com, %[2]s, " +
		"pool: {name: %[1]s, generation: 1, resourceSliceCount: 1}, devices: [%[3]s]}\n---\nkind: DeviceClass\napiVersion: resource.k8s.io/v1\n" +
		"metadata: {name: %[1]s}\nspec: {selectors: [{cel: {expression: 'device.driver == \"%[1]s.example.com\"'}}]}\n"
	const selected = "nodeSelector: {nodeSelectorTerms: [{matchExpressions: [{key: rack, operator: In, values: [a]}]}]}"
	shared := fmt.Sprintf(slice, "fabric", selected, "{name: p0}") +
		fmt.Sprintf(slice, "gpu", "perDeviceNodeSelection: true", "{name: g0, nodeName: node-1}, {name: g1, nodeName: node-2}, {name: g2, allNodes: true}, "+
			"{name: g3, nodeName: node-2}, {name: g4, nodeName: node-2}")
	dir := pcitest.WriteFiles(t, map[string]string{"config.json": draConfig, "shared.yaml": shared,
		"slices/a.json": strings.ReplaceAll(publishedSlices(t), `"pool":{"name":"node-1"`, `"pool":{"name":"rack-7"`), "slices/b.yaml": shared})
	const fabric = "the nodes of pool fabric are not known (nodeSelector), so the devices of fabric.example.com were taken to be within reach of each node"
	for _, c := range []struct {
		request, says string
		lines, status int
	}{
		{"{name: port, exactly: {deviceClassName: fabric}}", "notice: m.yaml: ResourceClaim shop/c: spec.devices.requests[1].exactly: " + fabric, 1, 0},
		{"{name: gpu, exactly: {deviceClassName: gpu, count: 2}}", "", 0, 0},
		{"{name: gpu, exactly: {deviceClassName: gpu, count: 5}}", "it wants 5 devices, and at most 4 of a node match its class and selectors", 1, 1},
		{"{name: gpu, exactly: {deviceClassName: gpu, count: 3}}", "spec.devices.requests: a node can hold each request, but no node all of them", 1, 1},
	} {
		m := pcitest.WriteFiles(t, map[string]string{"m.yaml": claimOf("    requests: [{name: vf, exactly: {deviceClassName: fast.example.com}}, " + c.request + "]\n")})
		status, stdout, stderr := run("check-claim", m+"/m.yaml", "--class", dir+"/shared.yaml", "--slices", dir+"/slices",
			"--config-file", dir+"/config.json", "--resource-prefix", "example.com")
		stderr = position.ReplaceAllString(strings.ReplaceAll(stderr, m+"/", ""), "m.yaml: ")
		if status != c.status || strings.Count(stderr, "\n") != c.lines || !strings.Contains(stderr, c.says) ||
			strings.Contains(stdout, "request vf: 1 VF of example.com/fast") != (status == 0) {
			t.Errorf("%s: status %d, %s%s", c.request, status, stdout, stderr)
		}
	}
}
