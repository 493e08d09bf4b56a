// SPDX-License-Identifier: Apache-2.0

package validate

import (
	"fmt"
	"strings"
	"testing"

	"github.com/podlace/podlace/pkg/yamlfile"
)

// TestOneBridge: two networks of a bridge cannot have two gateways, and its MTU and promiscuous mode are those of both.
func TestOneBridge(t *testing.T) {
	net := func(name, keys, subnet string) yamlfile.File {
		return yamlfile.File{Name: name, Data: fmt.Appendf(nil, `{"cniVersion": "1.0.0", "name": %q, "plugins": [{"type": "bridge", %s,
"ipam": {"type": "host-local", "subnet": %q}}]}`, name, keys, subnet)}
	}
	const gateway = `"isGateway": true`
	for name, c := range map[string]struct {
		later yamlfile.File
		want  string
	}{
		"another subnet":   {net("b", gateway, "10.8.0.0/24"), `b:2:32: plugins[0].ipam.subnet: error: cni0 has the gateway of 10.7.0.0/24 of network "a" in a: give this network a bridge`},
		"without gateway":  {net("b", `"isGateway": false`, "10.8.0.0/24"), ""},
		"another family":   {net("b", gateway, "fd08::/64"), ""},
		"another bridge":   {net("b", gateway+`, "bridge": "cni1"`, "10.8.0.0/24"), ""},
		"replaces address": {net("b", gateway+`, "forceAddress": true`, "10.8.0.0/24"), ""},
		"MTU":              {net("b", `"mtu": 1400`, "10.8.0.0/24"), `b:1:50: plugins[0]: warning: mtu or promiscMode differs from network "a" in a`},
		"promiscuous":      {net("b", `"promiscMode": true`, "10.8.0.0/24"), `b:1:50: plugins[0]: warning: mtu or promiscMode differs`},
	} {
		got := strings.Join(lines(net("a", gateway, "10.7.0.0/24"), c.later), "\n")
		if (got == "") != (c.want == "") || !strings.HasPrefix(got, c.want) || strings.Contains(got, "\n") {
			t.Errorf("%s: got %q, want %q", name, got, c.want)
		}
	}
}

// TestSilentLosses: settings that ADD accepts without the effect that they suggest.
func TestSilentLosses(t *testing.T) {
	list := func(plugins string) string {
		return "{\"cniVersion\":\"1.0.0\",\"name\":\"a\",\"plugins\":[\n" + plugins + "]}"
	}
	const portmap = `{"type":"portmap","capabilities":{"portMappings":true}}`
	ranged := func(first, last string) string {
		return list(`{"type":"bridge","ipam":{"type":"host-local","ranges":[[{"subnet":"10.7.0.0/24","rangeStart":"` + first + `","rangeEnd":"` + last + `"}]]}}`)
	}
	for name, c := range map[string]struct {
		data string
		want []string
	}{
		"key as capability": {list(`{"type":"tuning"},{"type":"portmap","capabilities":{"snat":false,"portMappings":true}}`),
			[]string{"f:2:53: plugins[1].capabilities.snat: warning: this is a key of portmap and no capability: write it beside capabilities [unknown-capability]"}},
		"capability and key": {list(`{"type":"sriov","resources":["a.b/c"],"capabilities":{"mac":true}}`), nil},
		"network address":    {ranged("10.7.0.0", "10.7.0.9"), []string{"f:2:18: plugins[0].ipam: warning: a pod may get 10.7.0.0, the network or broadcast address of 10.7.0.0/24"}},
		"broadcast address":  {ranged("10.7.0.1", "10.7.0.255"), []string{"f:2:18: plugins[0].ipam: warning: a pod may get 10.7.0.255"}},
		"two addresses":      {list(`{"type":"bridge","ipam":{"type":"host-local","subnet":"10.7.0.0/31"}}`), nil},
		"the rest":           {ranged("10.7.0.1", "10.7.0.254"), nil},
		"own hostPort":       {list(`{"type":"bridge","hairpinMode":false},` + portmap), []string{`f:2:18: plugins[0].hairpinMode: warning: a pod does not reach its own hostPort: write true [own-host-port]`}},
		"hairpin":            {list(`{"type":"bridge","hairpinMode":true},` + portmap), nil},
		"promiscuous":        {list(`{"type":"bridge","hairpinMode":false,"promiscMode":true},` + portmap), nil},
		"kind as driver": {`{"resourceList":[{"resourceName":"a","selectors":{"drivers":["netdevice"]}}]}`,
			[]string{`f:1:51: resourceList[0].selectors.drivers: warning: "netdevice" is a kind of device and the name of no driver`}},
		"each wrong type": {list(`{"type":"bridge","bridge":7,"mtu":[],"isGateway":"true","vlan":"7","promiscMode":1}`), []string{"f:2:18: plugins[0].bridge: error",
			"f:2:38: plugins[0].isGateway: error", "f:2:68: plugins[0].promiscMode: error", "f:2:57: plugins[0].vlan: error",
			"f:2:29: plugins[0].mtu: error"}},
		"other projects": {list(`{"type":"ib-sriov"},{"type":"cnv-bridge"},{"type":"ovs"},{"type":"host-device"},{"type":"ptp"}`), nil},
	} {
		checkLines(t, name, c.data, c.want)
	}
}

// TestMultusObjects: what Multus needs from the pod and from the NetworkAttachmentDefinition together.
func TestMultusObjects(t *testing.T) {
	nad := func(annotations, config string) string {
		return "kind: NetworkAttachmentDefinition\nmetadata: {name: fast" + annotations + "}\nspec: {config: '{\"cniVersion\": \"1.0.0\", " + config + "}'}\n"
	}
	pod := func(networks, limit string) string {
		return "---\nkind: Pod\nmetadata: {name: p, annotations: {k8s.v1.cni.cncf.io/networks: '" + networks + "'}}\n" +
			"spec: {containers: [{resources: {limits: {" + limit + ": 1}}}]}\n"
	}
	const resource = ", annotations: {k8s.v1.cni.cncf.io/resourceName: a.b/fast}"
	const sriov = `"type": "sriov"`
	for name, c := range map[string]struct {
		data string
		want []string
	}{
		"fine": {nad(resource, sriov) + pod("fast", "a.b/fast"), nil},
		"JSON": {nad(resource, sriov) + pod(`[{"name": "fast", "namespace": "default"}]`, "a.b/fast"), nil},
		"no resource": {nad("", sriov), []string{"f:3:17: NetworkAttachmentDefinition fast: spec.config: error: Multus passes no VF: " +
			"add the annotation k8s.v1.cni.cncf.io/resourceName, such as example.com/fast [7]"}},
		"device named": {nad("", sriov+`, "deviceID": "0000:01:00.0"`), nil},
		"misspelt limit": {nad(resource, sriov) + pod("default/fast@net5", "a.b/fats"), []string{"f:6:35: Pod p: metadata.annotations.k8s.v1.cni.cncf.io/networks: " +
			"warning: network default/fast needs a.b/fast in the limits of a container, which have none, but a.b/fats [pod-network]"}},
		"unknown network": {nad("", `"type": "bridge"`) + pod("fast, slow", "cpu"), []string{"f:6:35: Pod p: metadata.annotations.k8s.v1.cni.cncf.io/networks: " +
			"warning: no NetworkAttachmentDefinition default/slow is in these files [pod-network]"}},
		"only a pod": {strings.TrimPrefix(pod("fast", "cpu"), "---\n"), nil},
		"one network twice": {nad("", `"type": "bridge", "name": "x"`) + "---\n" +
			strings.Replace(nad("", `"type": "bridge", "name": "x"`), "fast", "slow", 1), nil},
	} {
		checkLines(t, name, c.data, c.want)
	}
}
