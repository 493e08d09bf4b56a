// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/strict"
)

// TestParseOperator checks that Parse accepts files of the SR-IOV network operator without a warning, and still rejects misspelt keys.
func TestParseOperator(t *testing.T) {
	for _, key := range []string{"SelectorObj", "SelectorObjs"} {
		config := `{"resourceList":[{"resourceName":"nics","excludeTopology":true,"selectors":{"vendors":["8086"],"devices":["1889"],"pfNames":["ens1f0#0-1"],` +
			`"rootDevices":["0000:10:00.0"],"IsRdma":false,"NeedVhostNet":false},"` + key + `":null},` +
			`{"resourceName":"rdma","selectors":{"pfNames":["ib2f0"],"IsRdma":true,"NeedVhostNet":false},"` + key + `":null}]}`
		c := mustParse(t, config)
		if got := formatPools(Assign(c, workerMachine(), Env{})); got != "nics: a0 a1; rdma: m0 m1" || len(c.Notes) > 0 {
			t.Errorf("%s: %s, %v", key, got, c.Notes)
		}
		_, err := Parse(source(), []byte(strings.Replace(config, `"`+key+`":null`, `"`+key+`":{}`, 1)))
		if err == nil || column.ReplaceAllString(err.Error(), "$1") != "config.json:1: resourceList[0]."+key+": want null, as the SR-IOV network operator writes it" {
			t.Errorf("%s: %v", key, err)
		}
		_, err = Parse(source(), []byte(strings.Replace(config, key, "SelectorOb", 1)))
		if err == nil || !strings.Contains(err.Error(), "SelectorOb: unknown key; did you mean selectors?") {
			t.Errorf("%s: %v", key, err)
		}
	}
}

// TestUnserved checks that a resource with an unsupported key is not offered, that later resources do not get its devices, and that all
// others are offered.
func TestUnserved(t *testing.T) {
	const fast = `{"resourceName":"fast","selectors":{"drivers":["iavf"]}}`
	for _, test := range []struct{ entry, why, pools string }{
		{`"deviceType":"accelerator","selectors":{"vendors":["8086"]}`, "deviceType: unsupported: accelerator; want netDevice",
			"fast: a0 a1 a2 a3 b0 b1 b2 b3"},
		{`"deviceType":"auxNetDevice","selectors":{"pfNames":["ens1f0"],"auxTypes":["sf"]}`,
			"deviceType: unsupported: auxNetDevice; want netDevice", "fast: a0 a1 a2 a3 b0 b1 b2 b3"},
		{`"selectors":{"pfNames":["ens1f0"],"vdpaType":"vhost"}`, "selectors.vdpaType: unsupported: vdpaType", "fast: b0 b1 b2 b3"},
		{`"selectors":[{"pfNames":["ens1f1#0"]},{"pfNames":["ens1f0"],"ddpProfiles":["GTP"]}]`,
			"selectors[1].ddpProfiles: unsupported: ddpProfiles", "fast: b1 b2 b3"},
		{`"selectors":{"pfNames":["ib2f0"],"pKeys":["0x1"]}`, "selectors.pKeys: unsupported: pKeys", "fast: a0 a1 a2 a3 b0 b1 b2 b3"},
	} {
		config := `{"resourceList":[{"resourceName":"odd",` + test.entry + `},` + fast + `]}`
		c := mustParse(t, config)
		if got := formatPools(Assign(c, workerMachine(), Env{})); got != test.pools {
			t.Errorf("%s: %s", test.entry, got)
		}
		unserved := c.Unserved()
		if len(unserved) == 0 || column.ReplaceAllString(unserved[0].Error(), "$1") != "config.json:1: resourceList[0]."+test.why+
			": resource intel.com/odd is not served" {
			t.Errorf("%s: %v", test.entry, unserved)
		}
		for _, f := range Findings(c, workerMachine(), Env{}) {
			if strings.Contains(f.Error(), "odd") && f.Key == "resourceList[0]" {
				t.Errorf("%s: %v", test.entry, f)
			}
		}
		all := source()
		all.Strict = true
		var p strict.Problems
		if _, err := Parse(all, []byte(config)); !errors.As(err, &p) || p[0].Key+": "+p[0].Text != "resourceList[0]."+test.why {
			t.Errorf("%s: strictly: %v", test.entry, err)
		}
		all.Host = "cpu-1"
		elsewhere := strings.Replace(config, `"odd"`, `"odd","hosts":["gpu-*"]`, 1)
		if c, err := Parse(all, []byte(elsewhere)); err != nil || len(c.Unserved()) > 0 {
			t.Errorf("%s: on another node: %v", test.entry, err)
		}
	}
	c := mustParse(t, `{"resourceList":[{"resourceName":"odd","selectors":{"pfNames":["ens1f0"],"vdpaType":"vhost"}},`+fast+`]}`)
	if diff := cmp.Diff([]string{"not offered: intel.com/odd in line 1 matches it but is not served: unsupported: vdpaType",
		"intel.com/odd: unsupported: vdpaType", "  resourceList[0].selectors is met",
		"  resourceList[0].selectors.pfNames want ens1f0, found ens1f0#0: yes",
		"intel.com/fast: already taken by intel.com/odd in line 1", "  resourceList[1].selectors is met",
		"  resourceList[1].selectors.drivers want iavf, found iavf: yes",
	}, explainDevice(c, "a0", Env{})); diff != "" {
		t.Error(diff)
	}
}
