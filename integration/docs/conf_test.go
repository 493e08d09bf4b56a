// SPDX-License-Identifier: Apache-2.0

package docs

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/podlace/podlace/conf"
	"github.com/podlace/podlace/integration/harness/card"
)

func conflists(t testing.TB) []string {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(treeRoot, "conf", "*"))
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, path := range paths {
		switch name := filepath.Base(path); filepath.Ext(name) {
		case ".go", ".md":
		case "": // the folder cluster: tests of scripts/image
		case ".service", ".timer": // TestUnits
		case ".json", ".yaml": // TestPools, TestManifest, and TestManifests of integration/e2e/kubelet
		case ".conf": // TestStory of integration/e2e/kubelet
		case ".conflist":
			names = append(names, name)
		default:
			t.Errorf("conf/%s: no test checks files with this suffix: add the suffix, and the test that checks it, to conflists in %s", name,
				"integration/docs/conf_test.go")
		}
	}
	return names
}

// TestConflists runs each shipped configuration with each of its cniVersions.
func TestConflists(t *testing.T) {
	names, skipped := conflists(t), []string{}
	for _, name := range names {
		data, err := conf.Conflist(name)
		if err != nil {
			t.Error(err)
		}
		if string(data) != readFile(t, "conf/"+name) {
			t.Errorf("conf/%s was changed after this test was built: run the test again", name)
		}
		for _, version := range []string{"1.1.0", "1.0.0"} {
			ran := t.Run(name+"/"+version, func(t *testing.T) {
				t.Cleanup(func() {
					if t.Skipped() {
						skipped = append(skipped, name)
					}
				})
				if strings.Contains(string(data), "usePodCidr") {
					writeNodeFile(t, `{"podCIDRs": ["10.244.1.0/24", "fd00:10:244:1::/64"], "clusterCIDRs": ["10.244.0.0/16"]}`)
				}
				caps := wantedCapabilities()
				if name == "10-podlace-sriov-main.conflist" {
					delete(caps, "bandwidth") // the test's card has a PF without this feature
				}
				runVerbs(t, selectVersion(t, data, version), caps)
			})
			if !ran {
				break
			}
		}
	}
	if len(skipped) > 0 {
		fmt.Fprintf(os.Stderr, "docs: SKIPPED %d of %d runs of conflists, because iptables is missing: %s\n", len(skipped), 2*len(names),
			strings.Join(skipped, " "))
	}
}

// TestNetworkAttachment runs the shipped configuration for Multus, which adds the VF's PCI address to each plugin.
func TestNetworkAttachment(t *testing.T) {
	_, text, ok := strings.Cut(readFile(t, "conf/sriov-network.yaml"), "  config: |\n")
	var conf struct {
		Plugins []map[string]any `json:"plugins"`
	}
	if err := json.Unmarshal([]byte(text), &conf); err != nil || !ok || len(conf.Plugins) != 1 {
		t.Fatalf("%v in %s", err, text)
	}
	plugin := conf.Plugins[0]
	if plugin["vlan"] != 100.0 {
		t.Errorf("vlan %v", plugin["vlan"])
	}
	delete(plugin, "vlan") // the test's card has a PF without this feature
	plugin["deviceID"], plugin["pciBusID"] = card.Address(0), card.Address(0)
	result := runVerbs(t, string(encode(t, map[string]any{"cniVersion": "1.1.0", "name": "fast", "plugins": conf.Plugins})),
		map[string]any{"mac": "02:00:00:00:00:07", "ips": []string{"198.51.100.9"}})
	for _, says := range []string{`"pciID":"` + card.Address(0), `"mac":"02:00:00:00:00:07"`, `"address":"198.51.100.9/24"`} {
		if !strings.Contains(string(result), says) {
			t.Errorf("%s is not in %s", says, result)
		}
	}
}

// selectVersion returns a conflist with only one cniVersion. Old runtimes read this key alone; new ones select from cniVersions.
func selectVersion(t testing.TB, data []byte, version string) string {
	t.Helper()
	text := string(data)
	const offer = `"cniVersions": ["1.0.0", "1.1.0"],`
	if !strings.Contains(text, offer) || !strings.Contains(text, `"cniVersion": "1.0.0"`) {
		t.Fatal("want cniVersion 1.0.0 and " + offer)
	}
	if version == "1.1.0" {
		return text
	}
	return strings.Replace(text, offer, "", 1)
}

// wantedCapabilities returns those of a pod with a hostPort and limits, with the burst that containerd passes.
func wantedCapabilities() map[string]any {
	return map[string]any{
		"portMappings": []map[string]any{{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}},
		"bandwidth": map[string]any{"ingressRate": 20_000_000, "ingressBurst": 1<<32 - 1,
			"egressRate": 20_000_000, "egressBurst": 1<<32 - 1},
	}
}

// TestConflistsAreDescribed checks that conf/README.md describes exactly the folder's files.
func TestConflistsAreDescribed(t *testing.T) {
	listed := map[string]bool{}
	for _, table := range parse(t, "conf/README.md").tables {
		for _, row := range table.rows {
			for _, name := range backquoted(row[0]) {
				listed[name] = true
			}
		}
	}
	for _, name := range slices.Concat(conflists(t), units(t, "*.service"), units(t, "*.timer"), units(t, "*.json"), units(t, "*.yaml"),
		units(t, "*.conf")) {
		if !listed[name] {
			t.Errorf("conf/README.md does not describe conf/%s: add the row \"| `%s` | USE |\" to its first table", name, name)
		}
		delete(listed, name)
	}
	for name := range listed {
		t.Errorf("conf/README.md describes conf/%s, which does not exist: remove its row", name)
	}
}
