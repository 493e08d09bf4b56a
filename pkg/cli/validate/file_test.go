// SPDX-License-Identifier: Apache-2.0

package validate

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/yamlfile"
)

// lines returns the problems of files, one per line.
func lines(files ...yamlfile.File) (all []string) {
	for _, p := range Files(files, Node{}) {
		all = append(all, p.String())
	}
	return all
}

const bridgeNet = `{
  "cniVersion": "1.0.0",
  "name": "a",
  "plugins": [
    {"type": "bridge", "bridge": "cni0",
      "ipam": {"type": "host-local", "ranges": [[{"subnet": "10.7.0.0/16"}]]}}
  ]
}`

const podNet = `{
  "cniVersion": "1.0.0", "name": "a",
  "plugins": [{
    "type": "podlace-pod",
    "isGatway": true,
    "ipam": {"type": "podlace-pod"},
    "capabilities": {"portMappings": true, "bandwidth": true},
    "portmap": {"backnd": "nftables", "name": "y"},
    "bandwidth": {"latency": "99x"}
  }]
}`

// TestNetworkFiles: each error and warning has the file, line and key.
func TestNetworkFiles(t *testing.T) {
	for name, c := range map[string]struct {
		data string
		want []string
	}{
		"fine":       {bridgeNet, nil},
		"empty":      {" \n", []string{"f:1:2: error: the file is empty"}},
		"half":       {bridgeNet[:60], []string{"f:5:4: error: the text ends here"}},
		"no JSON":    {"{\n\n  name: 1}", []string{"f:3:3: error: no JSON: invalid character 'n' looking for beginning of object key string"}},
		"other":      {`{"a": 1}`, []string{"f:1:1: error: the object is no network configuration"}},
		"name":       {strings.Replace(bridgeNet, `"a"`, `"a b"`, 1), []string{"f:3:3: name: error: invalid characters found in network name"}},
		"version":    {strings.Replace(bridgeNet, "1.0.0", "9.0.0", 1), []string{`f:2:3: cniVersion: error: "9.0.0": want one of 0.1.0, `}},
		"no version": {strings.Replace(bridgeNet, "1.0.0", "", 1), []string{`f:2:3: cniVersion: warning: "": want one of 0.1.0, `}},
		"parts": {podNet, []string{
			"f:5:5: plugins[0].isGatway: warning: unknown key is ignored; did you mean isGateway?",
			"f:8:17: plugins[0].portmap.backnd: warning: unknown key is ignored; did you mean backend?",
			"f:8:39: plugins[0].portmap.name: error: portmap.name: this key belongs to the whole entry: move it out of portmap",
			`f:6:14: plugins[0].ipam.type: error: ipam type "podlace-pod": want an IPAM plugin`,
			"f:9:19: plugins[0].bandwidth.latency: error: latency",
		}},
		"keys of a section": {strings.NewReplacer(`"bridge": "cni0"`, `"capabilities": {"portMappings": true, "bandwidth": true}, "snat": true, "bandwith": {}`, `"type": "bridge"`, `"type": "podlace-pod"`).Replace(bridgeNet),
			[]string{"f:5:102: plugins[0].bandwith: warning: unknown key is ignored; did you mean bandwidth?",
				"f:5:88: plugins[0].snat: warning: unknown key is ignored here: write it as portmap.snat"}},
		"no limits": {strings.Replace(bridgeNet, `"type": "bridge"`, `"type": "podlace-pod", "capabilities": {"portMappings": true}`, 1), nil},
		"limits without their capability": {strings.Replace(bridgeNet, `"type": "bridge"`, `"type": "podlace-pod", "portmap": {}, "bandwidth": {}`, 1),
			[]string{`f:5:5: plugins[0].capabilities: warning: without {"portMappings": true}`, `f:5:5: plugins[0].capabilities: warning: without {"bandwidth": true}`}},
		"wrong log keys": {strings.Replace(bridgeNet, `"type": "bridge"`, `"type": "podlace-pod", "logLevel": "loud"`, 1),
			[]string{`f:5:29: plugins[0].logLevel: error: logLevel "loud"`}},
		"a part twice": {`{"cniVersion":"1.0.0","name":"a","plugins":[{"type":"podlace-pod","capabilities":{"portMappings":true,"bandwidth":true}},
{"type":"podlace-portmap","capabilities":{"portMappings":true}}]}`,
			[]string{"f:2:1: plugins[1]: error: another entry of this network runs portmap already, and both would write the same record [plugin-twice]"}},
		"old version": {`{"cniVersion":"0.2.0","name":"a","plugins":[{"type":"tuning"},{"type":"bandwidth","capabilities":{"bandwidth":true}}]}`,
			[]string{`f:1:2: cniVersion: error: bandwidth: cniVersion "0.2.0" is not supported; supported are 0.3.0`}},
		"misspelt podlace-pod": {strings.Replace(bridgeNet, `"type": "bridge"`, `"type": "podlace-prod"`, 1),
			[]string{`f:5:6: plugins[0].type: error: "podlace-prod" is no plugin of Podlace: did you mean podlace-pod?`}},
		"no plugin": {`{"cniVersion": "1.0.0", "name": "a", "plugins": []}`, []string{"f:1:38: plugins: error: runtimes refuse the configuration: error parsing configuration list: no plugins in list"}},
		"misspelt type": {strings.NewReplacer(`"type": "bridge"`, `"type": "brigde"`, "host-local", "host-locl").Replace(bridgeNet),
			[]string{`f:5:6: plugins[0].type: error: "brigde" is no plugin of Podlace: did you mean bridge? [misspelt-plugin]`,
				`f:6:16: plugins[0].ipam.type: error: "host-locl" is no plugin of Podlace: did you mean host-local?`}},
		"other plugins": {`{"cniVersion": "1.0.0", "name": "a", "plugins": [{"type": "host-device", "ipam": {"type": "static"}}, {"type": "tuning"}]}`, nil},
		"no name":       {strings.Replace(bridgeNet, `"name": "a",`, "", 1), []string{"f:1:1: name: error: missing network name: want letters"}},
		"no type":       {`{"cniVersion": "1.0.0", "name": "a", "plugins": [{}]}`, []string{"f:1:50: plugins[0]: error: type is missing"}},
		"wrong kind":    {`{"cniVersion": "1.0.0", "name": "a", "plugins": 7}`, []string{"f:1:38: plugins: error: network configuration: plugins is a number: want a list of values [6]"}},
		"bad value":     {strings.Replace(bridgeNet, `"cni0"`, `"cni0", "mtu": "x"`, 1), []string{`f:5:42: plugins[0].mtu: error: mtu "x": want a number`}},
		"bad subnet":    {strings.Replace(bridgeNet, "/16", "/33", 1), []string{`f:6:51: plugins[0].ipam.ranges[0][0].subnet: error: ipam subnet "10.7.0.0/33": want`}},
		"wrong type in ipam": {strings.Replace(bridgeNet, `"10.7.0.0/16"`, `7`, 1),
			[]string{"f:6:38: plugins[0].ipam.ranges.subnet: error: network configuration: ipam.ranges.subnet is a number: want a string"}},
		"misspelt": {strings.Replace(bridgeNet, `"bridge":`, `"brige":`, 1), []string{"f:5:24: plugins[0].brige: warning: unknown key is ignored; did you mean bridge? [unknown-key]"}},
		"log level": {strings.Replace(bridgeNet, `"cni0"`, `"cni0", "logLevel": "loud"`, 1),
			[]string{`f:5:42: plugins[0].logLevel: error: logLevel "loud": want debug`}},
		"log file": {strings.Replace(bridgeNet, `"cni0"`, `"cni0", "logFile": "x.log"`, 1),
			[]string{`f:5:42: plugins[0].logFile: error: logFile "x.log": want an absolute path, or journal`}},
		"backend": {`{"cniVersion":"1.0.0","name":"a","plugins":[{"type":"x"},{"type":"portmap","backend":"pf","capabilities":{"portMappings":true}}]}`, []string{`f:1:76: plugins[1].backend: error: backend "pf"`}},
		"one plugin": {`{"cniVersion":"1.0.0","name":"a","type":"bandwidth","ingressRate":"x","ingressBurst":1}`, []string{
			"f:1:1: error: bandwidth is a chained plugin: name it after a main plugin, such as bridge [7]", "f:1:53: ingressRate: error: "}},
		"podCIDR": {strings.Replace(bridgeNet, "10.7.0.0/16", "usePodCidr", 1), nil},
		"sriov": {`{"cniVersion":"1.0.0","name":"a","plugins":[{"type":"sriov","ifName":"x"}]}`,
			[]string{"f:1:45: plugins[0].resources: error: resources: want the resources whose VFs a pod gets, or deviceID; such as", "f:1:61: plugins[0].ifName"}},
		"node.json": {`{"podCIDRs": ["10.0.0.0/24"]}`, nil},
		"pool":      {`{"resourceList": [{"resourceName": "a b"}]}`, []string{`f:1:20: resourceList[0].resourceName: error: "a b": want letters`}},
		"same devices": {`{"resourceList": [{"resourceName": "a", "selectors": {"pfNames": ["p"]}}, {"resourceName": "b", "selectors": {"pfNames": ["p"]}}]}`,
			[]string{"f:1:75: resourceList[1]: warning: resource b gets no device: resource a (resourceList[0]) has the same selectors [device-pool-effect]"}},
		"other nodes": {`{"resourceList": [{"resourceName": "a", "hosts": ["x"]}, {"resourceName": "b", "hosts": ["y"]}]}`,
			[]string{"f:1:19: resourceList[0]: warning: resource a: only for hosts x", "f:1:58: resourceList[1]: warning: resource b: only for"}},
		"unknown prefix": {`{"resourceList": [{"resourceName": "a"}, {"resourceName": "A", "resourcePrefix": ""}, {"resourceName": "a"}, {"resourceName": "a_nonuma"},` +
			`{"resourceName": "` + strings.Repeat("x", 63) + `", "api": "dra"}]}`, []string{
			`f:1:42: resourceList[1]: error: resource A: its environment variable PCIDEVICE_*_A is also that of a, resourceList[0] in line 1; rename one [device-pool]`,
			"f:1:87: resourceList[2]: error: resource a: resourceList[0] in line 1 has the same name [device-pool]",
			"f:1:110: resourceList[3]: error: resource a_nonuma: resourceList[0] in line 1 may offer devices under this name [device-pool]"}},
		"InfiniBand": {`{"resourceList": [{"resourceName": "a", "hosts": ["x"], "selectors": {"linkTypes": ["ether", "infiniband"]}}]}`, []string{
			"f:1:71: resourceList[0].selectors.linkTypes: warning: the plugin sriov refuses these VFs: setting the GUID and the partition keys of an InfiniBand VF is not supported: attach such VFs with ib-sriov under Multus",
			"f:1:19: resourceList[0]: warning: resource a: only for hosts x"}},
		"pool's note": {`{"resourceList": []}`, []string{"f:1:2: resourceList: warning: no resource is configured: no device is offered"}},
	} {
		checkLines(t, name, c.data, c.want)
	}
}

// TestExclusiveRDMA: isRdma is reported on a node whose RDMA subsystem is in exclusive mode, and nowhere else.
func TestExclusiveRDMA(t *testing.T) {
	file := yamlfile.File{Name: "f", Data: []byte(`{"resourceList": [{"resourceName": "a", "selectors": {"isRdma": true}}]}`)}
	const want = "f:1:55: resourceList[0].selectors.isRdma: warning: pods cannot use the RDMA devices, which stay on the node in exclusive mode"
	for _, exclusive := range []bool{false, true} {
		node := Node{Devices: &pci.Snapshot{ExclusiveRDMA: exclusive}}
		if got := fmt.Sprint(Files([]yamlfile.File{file}, node)); strings.Contains(got, want) != exclusive {
			t.Errorf("%t: %s", exclusive, got)
		}
	}
}

func checkLines(t *testing.T, name, data string, want []string) {
	t.Helper()
	got := lines(yamlfile.File{Name: "f", Data: []byte(data)})
	if len(got) > len(want) && len(want) > 0 {
		got = got[:len(want)+1]
	}
	if !prefixes(got, want) {
		t.Errorf("%s: got %q, want %q", name, got, want)
	}
}

// TestEveryFault: no fault of a file hides another, and what runtimes or ADD refuse stands at its key.
func TestEveryFault(t *testing.T) {
	for name, c := range map[string]struct {
		data string
		want []string
	}{
		"type of another type": {`{"cniVersion":"1.0.0","name":"a","plugins":[{"type":5}]}`, []string{"f:1:46: plugins[0].type: error: network configuration: type is a number"}},
		"path as type":         {`{"cniVersion":"1.0.0","name":"a","plugins":[{"type":"../bridge"}]}`, []string{`f:1:46: plugins[0].type: error: runtimes refuse the configuration: type "../bridge": want the name of a file`}},
		"bad subnet alone": {`{"cniVersion":"1.0.0","name":"a","type":"bridge","ipam":{"type":"host-local","subnet":"10.7.0.0/33"}}`,
			[]string{`f:1:78: ipam.subnet: error: ipam subnet "10.7.0.0/33": want`}},
		"keys of the list": {`{"cniVersions":["x"],"name":5,"disableCheck":"yes","disableGC":3,"plugins":[{"type":"x","capabilities":{"x":"true"}}]}`, []string{
			"f:1:22: name: error: network configuration: name is a number", `f:1:1: cniVersion: warning: "": want`, `f:1:2: cniVersions: error: a list: runtimes refuse`,
			`f:1:31: disableCheck: error: "yes": runtimes refuse the configuration: want true or false`, "f:1:52: disableGC: error: 3: runtimes refuse",
			"f:1:89: plugins[0].capabilities"}},
		"texts as booleans": {strings.Replace(bridgeNet, `"name"`, `"disableGC": "False", "disableCheck": "true", "name"`, 1), nil},
		"bad node": {"{\n\"podCIDRs\": [\"10.0.0.1/24x\"], \"clusterCIDRs\": [\"x\"], \"mtu\": 1}", []string{"f:2:1: podCIDRs: error: podCIDRs",
			"f:2:31: clusterCIDRs: error: clusterCIDRs", "f:2:54: mtu: error: mtu 1"}},
		"no address for the bridge": {`{"cniVersion":"1.0.0","name":"a","type":"bridge","isGateway":true,"vlan":-1,"ipam":{"type":"host-local","ranges":[[{"subnet":"10.7.0.0/32"}],[{"subnet":"10.8.0.0/31","gateway":"10.8.0.0"}]]}}`,
			[]string{"f:1:67: vlan: error: vlan -1", "f:1:77: ipam: error: isGateway: address 10.7.0.0/32 has no gateway"}},
		"agent": {`{"offLink": "vxlan"}`, []string{"f:1:1: warning: podlace-node checks its configuration"}},
		"trunk": {`{"cniVersion":"1.0.0","name":"a","type":"bridge","vlanTrunk":[{"id":5000},{"id":1},{}]}`, []string{
			"f:1:63: vlanTrunk[0]: error: vlanTrunk[0] 5000: want 1-4094", "f:1:84: vlanTrunk[2]: error: vlanTrunk[2]: want id"}},
		"keys in other letters": {`{"cniVersion":"1.0.0","name":"a","plugins":[{"type":"x"},` + "\n" +
			`{"type":"portmap","capabilities":{"portMappings":true},"é":1,"é":2},{"type":"bridge","vlanTrunk":[{"id":1,"ключ":3}]}]}`, []string{
			`f:2:62: plugins[1]."\u00e9": warning: duplicate key: only the last value counts [duplicate-key]`,
			`f:2:62: plugins[1]."\u00e9": warning: unknown key is ignored [unknown-key]`,
			`f:2:107: plugins[2].vlanTrunk[0]."\u043a\u043b\u044e\u0447": warning: unknown key is ignored [unknown-key]`}},
	} {
		checkLines(t, name, c.data, c.want)
	}
}

// TestEachFault: no error of a plugin hides another, and none is a consequence of another.
func TestEachFault(t *testing.T) {
	const data = "{\"cniVersion\":\"1.0.0\",\"name\":\"a\",\"plugins\":[\n" +
		`{"type":"bridge","isGateway":"x","mtu":1,"bridge":"a/b","ipMasq":5,"antiSpoof":true,"vlan":5000,"dns":{"search":3},` + "\n" +
		`"ipam":{"type":"host-local","dataDir":"x","ranges":[[{"subnet":"10.7.0.0/33"}],[{"subnet":"10.8.0.0/16","rangeStart":"1","gateway":"2"}]],"routes":[{"dst":"3"},{"dst":"4"}]}},` + "\n" +
		`{"type":"portmap","capabilities":{"portMappings":true},"backend":"x","markMasqBit":99,"snat":1},` + "\n" +
		`{"type":"bandwidth","ingressRate":"x","ingressBurst":9,"latency":"1","egressRate":1,"egressBurst":9},` + "\n" +
		`{"type":"sriov","deviceID":"x","ifName":"y","vlan":5000,"vlanQoS":3,"mac":"z"},{"type":"tuning","mtu":"x"}]}`
	want := []string{"f:2:104: plugins[0].dns.search: error", "f:2:57: plugins[0].ipMasq: error", "f:2:18: plugins[0].isGateway: error",
		"f:2:34: plugins[0].mtu: error", "f:2:42: plugins[0].bridge: error", "f:2:85: plugins[0].vlan: error",
		"f:3:29: plugins[0].ipam.dataDir: error", "f:3:55: plugins[0].ipam.ranges[0][0].subnet: error",
		"f:3:105: plugins[0].ipam.ranges[1][0].rangeStart: error", "f:3:149: plugins[0].ipam.routes[0]: error",
		"f:3:161: plugins[0].ipam.routes[1]: error", "f:3:122: plugins[0].ipam.ranges[1][0].gateway: error",
		"f:4:87: plugins[1].snat: error", "f:4:56: plugins[1].backend: error", "f:4:70: plugins[1].markMasqBit: error",
		"f:5:56: plugins[2].latency: error", "f:5:21: plugins[2].ingressRate: error", "f:5:70: plugins[2].egressRate: error",
		"f:6:17: plugins[3].deviceID: error", "f:6:32: plugins[3].ifName: error",
		"f:6:45: plugins[3].vlan: error", "f:6:69: plugins[3].mac: error"}
	if got := lines(yamlfile.File{Name: "f", Data: []byte(data)}); !prefixes(got, want) {
		t.Errorf("got %s\nwant %s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// prefixes reports whether each line begins with the one of the same index in want.
func prefixes(lines, want []string) bool {
	return cmp.Equal(want, lines, cmp.Comparer(func(a, b string) bool { return strings.HasPrefix(a, b) || strings.HasPrefix(b, a) }))
}

// TestClashes: networks with the same name or subnet are found, even in different files.
func TestClashes(t *testing.T) {
	other := strings.Replace(bridgeNet, `"a"`, `"b"`, 1)
	for name, c := range map[string]struct {
		second, want string
	}{
		"one name":   {strings.Replace(bridgeNet, "10.7.", "10.8.", 1), `g:3:3: name: warning: network "a" is in f already`},
		"one bridge": {other, `g:6:51: plugins[0].ipam.ranges[0][0].subnet: warning: subnet 10.7.0.0/16 overlaps 10.7.0.0/16 of network "a" in f: either`},
		"two bridges": {strings.Replace(other, "cni0", "cni1", 1),
			`g:6:51: plugins[0].ipam.ranges[0][0].subnet: error: subnet 10.7.0.0/16 overlaps 10.7.0.0/16 of network "a" in f: the leases`},
		"definitions": {"kind: NetworkAttachmentDefinition\nmetadata: {name: x}\nspec: {config: '" + strings.ReplaceAll(bridgeNet, "\n", " ") + "'}", ""},
		"apart":       {strings.Replace(other, "10.7.", "10.8.", 1), ""},
	} {
		got := strings.Join(lines(yamlfile.File{Name: "f", Data: []byte(bridgeNet)}, yamlfile.File{Name: "g", Data: []byte(c.second)}), "\n")
		if c.want == "" && got != "" || !strings.HasPrefix(got, c.want) || strings.Contains(got, "\n") {
			t.Errorf("%s: got %q, want %q", name, got, c.want)
		}
	}
}

// TestManifests: the line of each problem is one of the YAML file.
func TestManifests(t *testing.T) {
	deep := strings.Repeat("[", 101) + strings.Repeat("]", 101)
	data, err := os.ReadFile("testdata/manifests.yaml")
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"f:6:5: Pod web: metadata.annotations.kubernetes.io/ingress-bandwidth: error: 20m: want 1k to 100G bits per second, such as 20M; m means a " +
			"thousandth: did you mean 20M?",
		"f:7:5: Pod web: metadata.annotations.kubernetes.io/egres-bandwidth: warning: no program reads this annotation; did you mean " +
			"kubernetes.io/egress-bandwidth?",
		"f:15:7: Pod web: spec.containers[0].ports[1].hostPort: error: port 8080/TCP is taken in line 13 already [host-port-taken]",
		"f:25:7: NetworkAttachmentDefinition net: spec.config: isGatway: warning: unknown key is ignored",
		`f:27:22: NetworkAttachmentDefinition net: spec.config: ipam.ranges[0][0].subnet: error: ipam subnet "10.0.0.0/33"`,
		"f:37:9: Deployment limits: spec.template.metadata.annotations.kubernetes.io/egress-bandwidth: error: 64000: want a string",
		"f:37:9: Deployment limits: spec.template.metadata.annotations.kubernetes.io/egress-bandwidth: warning: the pod has hostNetwork",
		"f:49:8: ConfigMap vfs: data.config.json: resourceList[0].resourceName: error: ",
	}
	if got := lines(yamlfile.File{Name: "f", Data: data}); !prefixes(got, want) {
		t.Errorf("got %s\nwant %s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
	for text, want := range map[string]string{
		"a: [":            "f:1:1: error: yaml: did not find expected node content",
		"kind: Service\n": "f:1:1: warning: there is nothing here that this command checks",
		"kind: Pod\nspec: {containers: []}\n---\nkind: ResourceClaim":  "f:4:1: ResourceClaim: warning: use 'podlace sriov check-claim' for this object [other-checker]",
		"kind: Pod\n---\nkind: DeviceClass":                            "f:1:1: Pod: spec: error: spec is missing",
		"kind: DeviceClass":                                            "f:1:1: warning: there is nothing here that this command checks",
		"kind: ResourceClaim":                                          "f:1:1: ResourceClaim: warning: use 'podlace sriov check-claim' for this object [other-checker]",
		"kind: Pod\nspec: {containers: [{ports: [{hostPort: '80'}]}]}": `f:2:31: Pod: spec.containers[0].ports[0].hostPort: error: "80": want a number`,
		"kind: Pod\nmetadata: {labels: {kubernetes.io/ingress-bandwidth: 1M}}\nspec: {}": "f:2:21: Pod: metadata.labels.kubernetes.io/ingress-bandwidth: " +
			"warning: no program reads this label: write it as an annotation [unknown-annotation]",
		"kind: Pod\nspec: {x: [{a: 1, b: 2, a: 3}]}":                     "f:2:25: spec.x[0].a: error: duplicate key, first in line 2: only the last value counts [duplicate-key]",
		`{"kind": "Pod", "apiVersion": "v1", "spec": {}, "kind": "Pod"}`: "f:1:49: kind: error: duplicate key, first in line 1: only the last value counts [duplicate-key]",
		"kind: NetworkAttachmentDefinition\nmetadata: {name: a}\nspec: {config: '{\"cniVersion\": \"1.0.0\", \"plugins\": [{\"type\": \"bridge\", \"brige\": 1}]}'}": "f:3:72: NetworkAttachmentDefinition a: " +
			"spec.config: plugins[0].brige: warning: unknown key",
		"kind: NetworkAttachmentDefinition\nspec: {config: {type: bridge}}":          "f:2:8: NetworkAttachmentDefinition: spec.config: error: an object: want a string",
		"kind: NetworkAttachmentDefinition\nspec: {confg: ''}":                       "f:2:8: NetworkAttachmentDefinition: spec.confg: error: unknown key; did you",
		"kind: NetworkAttachmentDefinition\nspec: {conf: '{}'}":                      "f:2:8: NetworkAttachmentDefinition: spec.conf: warning: unknown key; did you mean config? [unknown-key]",
		"kind: NetworkAttachmentDefinition\nspec: {config: '', configuration: '{}'}": "f:2:20: NetworkAttachmentDefinition: spec.configuration: warning: unknown key; did you mean config?",
		"kind: NetworkAttachmentDefinition\nspec: x":                                 "f:2:1: NetworkAttachmentDefinition: spec: error: \"x\": want an object",
		"kind: ConfigMap\ndata: {node.json: '{\"podCIDRs\": [\"x\"]}'}":              "f:2:21: ConfigMap: data.node.json: podCIDRs: error",
		"kind: Pod": "f:1:1: Pod: spec: error: spec is missing",
		"kind: List\nitems:\n- kind: Deployment\n  spec: {tmplate: {}}": "f:4:3: Deployment: spec.template.spec: error: spec.template.spec is missing",
		"kind: Deployment\nmetadata: {annotations: {kubernetes.io/ingress-bandwidth: 1M}}\nspec: {template: {spec: {}}}": "f:2:26: Deployment: " +
			"metadata.annotations.kubernetes.io/ingress-bandwidth: warning: no program reads this annotation here: write it below spec.template",
		"kind: Pod\nspec: {containers: [{ports: [{hostport: 80}]}]}":                              "f:2:31: Pod: spec.containers[0].ports[0].hostport: error: unknown key; did you mean hostPort?",
		"kind: Pod\nspec:\n  hostNetwrk: true":                                                    "f:3:3: Pod: spec.hostNetwrk: error: unknown key; did you mean hostNetwork? [unknown-key]",
		"kind: Pod\nspec: {hostNetwork: maybe}":                                                   `f:2:8: Pod: spec.hostNetwork: error: "maybe": want true or false [wrong-type]`,
		"kind: Pod\nspec: {containers: 7}":                                                        "f:2:8: Pod: spec.containers: error: 7: want a list [wrong-type]",
		"kind: Pod\nspec: 7":                                                                      "f:2:1: Pod: spec: error: 7: want an object [wrong-type]",
		"kind: Pod\nspec: {containers: [{prts: []}]}":                                             "f:2:22: Pod: spec.containers[0].prts: error: unknown key; did you mean ports?",
		"kind: Pod\nmetadata: {annotations: {a: on}}\nspec: {}":                                   "f:2:26: Pod: metadata.annotations.a: error: true: want a string",
		"kind: Pod\nmetadata: {anotations: {}}\nspec: {}":                                         "f:2:12: Pod: metadata.anotations: error: unknown key; did you mean annotations?",
		"kind: List\nitems: 7":                                                                    "f:2:1: items: error: 7: want a list [wrong-type]",
		"kind: List\nitms: []":                                                                    "f:2:1: itms: error: unknown key; did you mean items?",
		"kind: List\nitems:\n- 7":                                                                 "f:3:3: items[0]: error: 7: want an object [wrong-type]",
		"kind: AllowList\nitems: [7]\n":                                                           "f:1:1: warning: there is nothing here that this command checks",
		"kind: ConfigMapList\nitems: [7]\n":                                                       "f:2:9: items[0]: error: 7: want an object",
		"kind: PodList\nitems:\n- {spec: {}}\n- metadata: {name: a}":                              "f:4:3: Pod a: spec: error: spec is missing",
		"kind: PodList\nitems:\n- spec: {containers: [{ports: {}}]}":                              "f:3:24: Pod: spec.containers[0].ports: error: an object: want a list",
		`{"kind": "List", "apiVersion": "v1", "items": [` + "\n" + `{"kind": "Pod", "spec": 7}]}`: "f:2:17: Pod: spec: error: 7: want an object",
		"just a text\n":       "f:1:1: warning: there is nothing here",
		"a: 1\n\nb: {\n\n]\n": "f:4:1: error: yaml: did not find expected node content",
		"a:\n  b: [1,\n  2]\n  c: {\n  d: 1}\nb:\n  c: 1\n d: 2\ne: 3\n": "f:8:1: error: yaml: did not find expected key",
		"a: [\n1,\n2]\nb: 1\nc: *x\nd: 1\n":                              "f:5:1: error: yaml: unknown anchor 'x' referenced",
		"a: 1\nb: 'it\nc: 1\n":                                           "f:2:1: error: yaml: found unexpected end of stream",
		"a: 1\n---\nb: 1\n\tc: 1\n":                                      "f:4:1: error: yaml: found a tab",
		"a: &a [*a]":                                                     "f:1:8: error: nested more than 100 levels deep",
		"kind: Pod\nspec: {x: " + deep + "}":                             "f:2:109: error: nested more than 100 levels deep [syntax]",
		"a: &a [1, 1, 1, 1]\nb: &b [*a, *a, *a, *a, *a, *a, *a, *a]\nc: &c [*b, *b, *b, *b, *b, *b, *b, *b]\nd: [*c, *c, *c, *c, *c, *c, *c, *c]": "f:1:1: error: aliases",
	} {
		if got := lines(yamlfile.File{Name: "f", Data: []byte(text)}); len(got) != 1 || !strings.HasPrefix(got[0], want) {
			t.Errorf("%q: got %q, want %q", text, got, want)
		}
	}
}

// TestPlaceInScalar: lines and columns of a configuration inside YAML are right for each style of scalar.
func TestPlaceInScalar(t *testing.T) {
	const head = "kind: NetworkAttachmentDefinition\nspec:\n  config: "
	for text, want := range map[string]string{
		`'{"cniVersion": "1.0.0", "name": "a", "type": "bridge", "brige": "é"}'`:                                  "f:3:67",
		`'{"name": "é", "cniVersion": "1.0.0", "type": "bridge", "nme": 1}'`:                                      "f:3:13",
		`"{\"cniVersion\": \"1.0.0\", \"name\": \"a\", \"type\": \"bridge\", \"brige\": 1}"`:                      "f:3:3",
		"|\n      {\"cniVersion\": \"1.0.0\",\n        \"name\": \"a\", \"type\": \"bridge\", \"brige\": 1}\n":    "f:5:40",
		">\n    {\"cniVersion\": \"1.0.0\",\n      \"name\": \"a\", \"type\": \"bridge\",\n      \"brige\": 1}\n": "f:6:7",
	} {
		got := lines(yamlfile.File{Name: "f", Data: []byte(head + text)})
		if len(got) == 0 || !strings.HasPrefix(got[0], want+": ") {
			t.Errorf("%s: got %q, want %s", text, got, want)
		}
	}
}

// TestShippedFiles: the configuration files of a release have no errors.
func TestShippedFiles(t *testing.T) {
	names, err := filepath.Glob("../../../conf/*.[cjy]*") // .conflist, .json and .yaml
	if err != nil || len(names) < 10 {
		t.Fatal(names, err)
	}
	for _, name := range names {
		data, err := os.ReadFile(name)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range Files([]yamlfile.File{{Name: name, Data: data}}, Node{}) {
			if p.Error {
				t.Error(p)
			}
		}
	}
}

// FuzzFiles: no text makes the checker panic, and each problem's line exists in the file.
func FuzzFiles(f *testing.F) {
	f.Add(bridgeNet)
	f.Add("kind: Pod\nspec: {containers: [{ports: [{hostPort: 1}]}]}\n")
	f.Add(`{"resourceList": [{"resourceName": "a"}]}`)
	f.Fuzz(func(t *testing.T, data string) {
		for _, p := range Files([]yamlfile.File{{Name: "f", Data: []byte(data)}}, Node{}) {
			if p.Line < 1 || p.Line > strings.Count(data, "\n")+2 || p.Text == "" || p.Column < 1 || p.Code == "" {
				t.Errorf("%+v in a file of %d lines", p, strings.Count(data, "\n")+1)
			}
		}
	})
}

// TestDividedSubnet: networks of one bridge may divide a subnet with rangeStart and rangeEnd, because no address belongs to two networks.
func TestDividedSubnet(t *testing.T) {
	file := func(name, first, last string) yamlfile.File {
		return yamlfile.File{Name: name, Data: []byte(`{"cniVersion": "1.0.0", "name": "` + name + `", "plugins": [{"type": "bridge", "bridge": "lan0", "ipam": {
			"type": "host-local", "ranges": [[{"subnet": "10.7.0.0/16", "rangeStart": "` + first + `", "rangeEnd": "` + last + `"}]]}}]}`)}
	}
	if got := lines(file("a", "10.7.1.1", "10.7.1.9"), file("b", "10.7.2.1", "10.7.2.9")); len(got) > 0 {
		t.Errorf("divided: %q", got)
	}
	if got := lines(file("a", "10.7.1.1", "10.7.2.1"), file("b", "10.7.2.1", "10.7.2.9")); len(got) != 1 {
		t.Errorf("one address in both: %q", got)
	}
}

// TestAliases: a YAML alias has the same problems as its value.
func TestAliases(t *testing.T) {
	const pod = "rate: &rate 20m\npod: &pod\n  containers:\n  - ports:\n    - hostPort: 70000\n" +
		"kind: Pod\nmetadata: {name: a, annotations: {kubernetes.io/ingress-bandwidth: *rate}}\nspec: *pod\n"
	const merged = "base: &base {hostNetwork: true, containers: []}\nkind: Pod\nmetadata: {name: a, annotations: {kubernetes.io/egress-bandwidth: 1M}}\n" +
		"spec: {<<: *base, containers: [{ports: [{hostPort: 70000}]}]}\n"
	if got := lines(yamlfile.File{Name: "f", Data: []byte(merged)}); len(got) != 2 || !strings.Contains(got[0], "the pod has hostNetwork") || !strings.Contains(got[1], "70000") {
		t.Errorf("merged: %q", got)
	}
	got := strings.Join(lines(yamlfile.File{Name: "f", Data: []byte(pod)}), "\n")
	for _, want := range []string{"20m: want 1k to 100G", "70000: want a number, 1 to 65535"} {
		if !strings.Contains(got, want) {
			t.Errorf("%q lacks %q", got, want)
		}
	}
}
