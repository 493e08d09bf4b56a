// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/vfconfig"
)

// TestParseDRA checks that Parse reads the keys of Dynamic Resource Allocation and sets their defaults.
func TestParseDRA(t *testing.T) {
	c := mustParse(t, `{
  "dra": {"taints": {"linkDown": "None", "gone": "off"}},
  "cdi": "off",
  "resourceList": [
    {"resourceName": "old", "api": "device-plugin", "policy": "pack"},
    {"resourceName": "plain", "api": "dra", "policy": null, "cdi": null, "unknownNuma": "exclude", "driver": "vfio-pci"},
    {"resourceName": "none", "api": "dra", "claimMay": []},
    {"resourceName": "full", "api": "dra", "vf": {"vlan": 0, "trust": "on", "ifName": "fast{index}", "rebind": false, "mtu": null},
     "claimMay": ["mac", {"vlan": "100-199,300", "maxTxRate": 1000}, "trust"]}
  ]
}`)
	type shown struct {
		API   API
		VF    *vfconfig.Config
		Claim vfconfig.Allowance
	}
	var got []shown
	for _, r := range c.Resources {
		got = append(got, shown{r.API, r.VF, r.ClaimMay})
	}
	want := []shown{{API: DevicePlugin},
		{API: DRA, Claim: vfconfig.Allowance{"mac": nil, "ips": nil, "ifName": nil, "mtu": nil}},
		{API: DRA, Claim: vfconfig.Allowance{}},
		{DRA, &vfconfig.Config{VLAN: new(0), Trust: "on", IfName: "fast{index}", Rebind: new(false)},
			vfconfig.Allowance{"mac": nil, "vlan": {{From: 100, To: 199}, {From: 300, To: 300}}, "maxTxRate": {{From: 1, To: 1000}}, "trust": nil}}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if want := (Taints{"None", "NoSchedule", NoTaint}); c.Taints != want {
		t.Errorf("%+v", c.Taints)
	}
}

// TestOneName checks that a resource with the API dra has one pool. It needs none for each NUMA node, which ResourceSlices have for
// each device.
func TestOneName(t *testing.T) {
	s := newMachine(2, card{bus: 0x10, node: 0, ports: 1, vfs: 1, name: "a"}, card{bus: 0x20, node: -1, ports: 1, vfs: 1, name: "b"})
	for keys, want := range map[string]int{``: 2, `,"api":"dra"`: 1} {
		c := mustParse(t, `{"resourceList":[{"resourceName":"vf"`+keys+`}]}`)
		if got := Assign(c, s, Env{}); len(got) != want {
			t.Errorf("%s: %+v", keys, got)
		}
	}
	mustParse(t, `{"resourceList":[{"resourceName":"a_nonuma"},{"resourceName":"a","api":"dra"}]}`)
}

// TestOfferWhole checks that a PF with VFs is offered only in a resource whose selector contains the address of the PF.
func TestOfferWhole(t *testing.T) {
	s := workerMachine()
	A, p := pciAddr(0x10, 0, 0), pciAddr(0x30, 0, 0) // A has VFs; p will get VFs
	for _, test := range []struct {
		resources, pfs string
		want           string
		finding        string
		whole          map[pci.Address]int
	}{
		{`{"resourceName":"whole","api":"dra","selectors":{"pciAddresses":["0000:10:00.0","0000:30:00.0"]}},
			{"resourceName":"vf","api":"dra","selectors":{"pfNames":["ens1f0"]}}`,
			`{"pfName":"ens1f0","numVfs":3,"offerWhole":true},{"pfName":"ens3f0","numVfs":8,"offerWhole":true}`,
			"whole: A p; vf: a0 a1 a2 a3", "", map[pci.Address]int{A: 4, p: 8}},
		{`{"resourceName":"vf","api":"dra","selectors":{"pfNames":["ens1f0"]}}`, `{"pfName":"ens1f0","numVfs":4,"offerWhole":true}`,
			"vf: a0 a1 a2 a3",
			`config.json:1: pfs[0]: offerWhole: no resource matches 0000:10:00.0: it is offered as a whole (offerWhole), which requires a selector that names it by pciAddresses or acpiIndexes`, nil},
		{`{"resourceName":"whole","selectors":{"pciAddresses":["0000:10:00.0"]}}`, `{"pfName":"ens1f0","numVfs":4,"offerWhole":true}`,
			"whole:", `config.json:1: resourceList[0]: resource intel.com/whole: no device on this node matches; 0000:10:00.0: it is offered as a whole (offerWhole), which requires "api": "dra" in the resource`, nil},
		{`{"resourceName":"whole","api":"dra","selectors":{"pciAddresses":["0000:20:00.0"]}}`, `{"pfName":"ens1f0","numVfs":4,"offerWhole":true}`,
			"whole:", `config.json:1: pfs[0]: offerWhole: no resource matches 0000:10:00.0: want one with "api": "dra" and a selector with pciAddresses`, nil},
		{`{"resourceName":"whole","api":"dra","selectors":{"pciAddresses":["0000:10:00.0"]}}`, `{"pfName":"ens1f0","numVfs":4}`,
			"whole:", "", nil},
	} {
		c := mustParse(t, `{"resourceList":[`+test.resources+`],"pfs":[`+test.pfs+`]}`)
		pools := Assign(c, s, Env{})
		var whole map[pci.Address]int
		for _, pool := range pools {
			for _, d := range pool.Devices {
				if d.Whole > 0 {
					if whole == nil {
						whole = map[pci.Address]int{}
					}
					whole[d.Address] = d.Whole
				}
			}
		}
		same := cmp.Comparer(func(a, b pci.Address) bool { return a == b })
		if got := formatPools(pools); got != test.want || !cmp.Equal(test.whole, whole, same) {
			t.Errorf("%s\n got %s, %v\nwant %s, %v", test.resources, got, whole, test.want, test.whole)
		}
		found := test.finding == ""
		for _, f := range Findings(c, s, Env{}) {
			found = found || column.ReplaceAllString(f.Error(), "$1") == test.finding
		}
		if !found {
			t.Errorf("%s: %v", test.resources, Findings(c, s, Env{}))
		}
	}
	c := mustParse(t, `{"resourceList":[{"resourceName":"vf","api":"dra","selectors":{"pfNames":["ens1f0"]}}],
		"pfs":[{"pfName":"ens1f0","numVfs":4,"offerWhole":true}]}`)
	for _, e := range Explain(c, s, Env{}) {
		const want = "it is offered as a whole (offerWhole), which requires a selector that names it by pciAddresses or acpiIndexes"
		if e.Device == A && (e.Resource != "" || e.Answers[0].Matches || e.Answers[0].Reason != want) {
			t.Errorf("%+v", e)
		}
	}
}
