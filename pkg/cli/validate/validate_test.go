// SPDX-License-Identifier: Apache-2.0

package validate

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/conf"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/plugin"
)

func keysOf(findings []plugin.Finding) (keys []string) {
	for _, f := range findings {
		keys = append(keys, f.Key)
	}
	return keys
}

// text returns the keys of a configuration's findings, and all findings as one text.
func text(config string, node Node) (keys []string, all string) {
	found := Config([]byte(config), node)
	return keysOf(found), fmt.Sprint(found)
}

// TestTrapsAreNamedByTheirKeys: each misleading setting causes exactly one finding with the path of its key.
func TestTrapsAreNamedByTheirKeys(t *testing.T) {
	const bridge = `{"type":"bridge","isGateway":true,"ipam":{"type":"host-local","ranges":[[{"subnet":"10.7.0.0/16"}],[{"subnet":"usePodCidrIPv6"}]]}}`
	list := func(plugins ...string) string {
		return `{"cniVersion":"1.0.0","cniVersions":["1.0.0"],"name":"n","disableCheck":true,"plugins":[` + strings.Join(plugins, ",") + "]}"
	}
	node := Node{PodCIDRs: []netip.Prefix{netip.MustParsePrefix("10.9.0.0/24"), netip.MustParsePrefix("fd07::/64")}, Subnets: []kernel.Subnet{
		{Prefix: netip.MustParsePrefix("10.7.0.0/16"), Link: "cni0"}, {Prefix: netip.MustParsePrefix("10.8.0.0/16"), Link: "podman0"},
		{Prefix: netip.MustParsePrefix("fd08::/32"), Link: "eth0"}}}
	for name, c := range map[string]struct {
		config string
		want   []string
	}{
		"none": {list(bridge, `{"type":"portmap","capabilities":{"portMappings":true}}`,
			`{"type":"bandwidth","capabilities":{"bandwidth":true}}`, `{"type":"firewall","anything":1}`), nil},
		"capability": {list(bridge, `{"type":"portmap"}`, `{"type":"bandwidth","capabilities":{"bandwith":true}}`),
			[]string{"plugins[1].capabilities", "plugins[2].capabilities.bandwith", "plugins[2].capabilities"}},
		"limits of all pods": {list(bridge, `{"type":"bandwidth","ingressRate":1000000,"ingressBurst":80000}`), nil},
		"no ipam":            {list(`{"type":"bridge","isGateway":true,"ipMasq":true}`), []string{"plugins[0].isGateway, ipMasq"}},
		"clash":              {list(strings.Replace(bridge, "10.7.", "10.8.", 1)), []string{"plugins[0].ipam"}},
		"clash of podCIDR": {list(`{"type":"bridge","isDefaultGateway":true,"ipam":{"type":"host-local","subnet":"usePodCidrIPv6"}}`, bridge),
			nil},
		"twice": {list(bridge, `{"type":"portmap","snat":true,"snat":false,"capabilities":{"portMappings":true}}`),
			[]string{"plugins[1].snat"}},
		"unknown": {list(strings.Replace(bridge, "isGateway", "isGatewy", 1), `{"type":"sriov","vlam":1}`),
			[]string{"plugins[0].isGatewy", "plugins[1].vlam"}},
		"unknown in ipam": {list(strings.Replace(bridge, `"ranges"`, `"range":[],"ranges"`, 1)), []string{"plugins[0].ipam.range"}},
		"unknown below": {list(`{"type":"bridge","vlanTrunk":[{"id":1},{"minId":2,"maxID":3,"idd":4}],"ipam":{"type":"host-local","routes":[{"dst":"::/0"},` +
			`{"gww":"::"}],"ranges":[[{"subnet":"10.7.0.0/16"},{"gatway":"x"}],{"subnet":1}]}}`), []string{"plugins[0].vlanTrunk[1].idd",
			"plugins[0].ipam.routes[1].gww", "plugins[0].ipam.ranges[0][1].gatway"}},
		"unknown in the list": {strings.Replace(list(bridge), "disableCheck", "disableChek", 1), []string{"disableChek"}},
		"foreign capability":  {list(bridge, `{"type":"tuning","capabilities":{"macs":true}}`), []string{"plugins[1].capabilities.macs"}},
		"loopback":            {list(`{"type":"loopback","mtuu":1}`), []string{"plugins[0].mtuu"}},
		"one plugin":          {`{"type":"portmap","name":"n"}`, []string{"capabilities"}},
		"no JSON":             {`{"plugins":[`, nil},
		"plugin of no kind":   {`{"plugins":[7,{"type":7}]}`, nil},
	} {
		if keys, all := text(c.config, node); cmp.Diff(c.want, keys) != "" {
			t.Errorf("%s: %s, want %q", name, all, c.want)
		}
	}
	node.PodCIDRs[1] = netip.MustParsePrefix("fd08:0:1::/64")
	if keys, all := text(list(bridge), node); cmp.Diff([]string{"plugins[0].ipam"}, keys) != "" ||
		!strings.Contains(all, "fd08:0:1::/64 overlaps fd08::/32 dev eth0") {
		t.Errorf("the node's podCIDR is on the LAN: %s", all)
	}
}

// TestDuplicateKeysAreFound: repeated keys, of which encoding/json silently uses the last, are found at any depth.
func TestDuplicateKeysAreFound(t *testing.T) {
	for config, want := range map[string][]string{
		`{"a":1,"b":{"a":1},"c":[{"a":1},{"a":2}]}`: nil,
		`{"a":1,"a":1}`:             {"a"},
		`{"a":1,"b":2,"a":3,"a":4}`: {"a", "a"},
		`{"plugins":[{},{"ipam":{"ranges":[[{"subnet":1,"subnet":2}]]}}]}`: {"plugins[1].ipam.ranges[0][0].subnet"},
		`{"a":{"x":[1,{},"}"],"y":"{"},"b":{"y":1,"y":[{"z":1,"z":2}]}}`:   {"b.y", "b.y[0].z"},
		`{"isGateway":true,"isgateway":false}`:                             nil, // different keys, except for encoding/json
		`{"a":1,"a":`:                                                      nil, // invalid JSON is another problem
		`[{"a":1,"a":2}]`:                                                  {"[0].a"},
		`7`:                                                                nil,
		``:                                                                 nil,
		strings.Repeat(`{"a":`, 20000) + "1" + strings.Repeat("}", 20000): nil,
	} {
		if diff := cmp.Diff(want, keysOf(duplicateKeys([]byte(config)))); diff != "" {
			t.Errorf("%.80s: %s", config, diff)
		}
	}
}

func TestShippedConfigurationsHaveNoTraps(t *testing.T) {
	for _, name := range shipped(t) {
		data, err := conf.Conflist(name)
		if err != nil {
			t.Fatal(err)
		}
		if keys, all := text(string(data), Node{}); len(keys) > 0 {
			t.Errorf("%s: %s", name, all)
		}
	}
}

// TestShippedConfigurationsStopSpoofing: a pod on a bridge of Podlace can send only from its own MAC and addresses.
func TestShippedConfigurationsStopSpoofing(t *testing.T) {
	for _, name := range shipped(t) {
		data, err := conf.Conflist(name)
		var list struct {
			Plugins []struct {
				Type      string
				IPAM      map[string]any
				AntiSpoof bool
			}
		}
		if err := errors.Join(err, json.Unmarshal(data, &list)); err != nil {
			t.Fatal(name, err)
		}
		if first := list.Plugins[0]; first.AntiSpoof != (plugin.Runs(first.Type, "bridge") && first.IPAM != nil) {
			t.Errorf("%s: antiSpoof %t of %s", name, first.AntiSpoof, first.Type)
		}
	}
}

func shipped(t *testing.T) (names []string) {
	t.Helper()
	paths, err := filepath.Glob("../../../conf/*.conflist")
	if err != nil || len(paths) == 0 {
		t.Fatal(paths, err)
	}
	for _, path := range paths {
		names = append(names, filepath.Base(path))
	}
	return names
}

// defaults holds the subnets that other software uses by default.
var defaults = map[string]string{
	"podman":                 "10.88.0.0/16",
	"podman, more networks":  "10.89.0.0/16",
	"docker":                 "172.16.0.0/12",
	"CRI-O":                  "10.85.0.0/16",
	"nerdctl":                "10.4.0.0/16",
	"flannel, kubeadm, kind": "10.244.0.0/16",
	"k3s and RKE2, pods":     "10.42.0.0/16",
	"k3s and RKE2, Services": "10.43.0.0/16",
	"kubeadm, Services":      "10.96.0.0/12",
	"Calico, libvirt":        "192.168.0.0/16",
	"Weave Net":              "10.32.0.0/12",
	"MicroK8s":               "10.1.0.0/16",
	"OpenShift":              "10.128.0.0/14",
	"Docker Swarm, QEMU":     "10.0.0.0/14",
	"kind, IPv6":             "fd00:10:244::/56",
	"k3s, IPv6":              "fd00:42::/56",
	"kubeadm, Services IPv6": "fd00:10:96::/112",
	"docker, IPv6":           "fd00:dead:beef::/48",
}

// TestShippedSubnetsAreFree: examples that must work on any node use no default subnet of other software. One that replaces another program
// in an existing network keeps that program's subnet.
func TestShippedSubnetsAreFree(t *testing.T) {
	var node Node
	for name, subnet := range defaults {
		node.Subnets = append(node.Subnets, kernel.Subnet{Prefix: netip.MustParsePrefix(subnet), Link: name})
	}
	for _, name := range shipped(t) {
		if name == "10-containerd-net.conflist" || name == "10-podlace-k3s.conflist" {
			continue
		}
		data, err := conf.Conflist(name)
		if err != nil {
			t.Fatal(err)
		}
		if keys, all := text(string(data), node); len(keys) > 0 {
			t.Errorf("%s: %s", name, all)
		}
	}
}
