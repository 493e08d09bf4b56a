// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/pci"
)

// explainDevice returns the explanation for a device: the reason, then the result and the conditions of each resource.
func explainDevice(c *Config, name string, env Env) []string {
	var out []string
	for _, e := range Explain(c, workerMachine(), env) {
		if shortNames()[e.Device.String()] != name {
			continue
		}
		out = append(out, strings.TrimSpace(e.Resource+" "+e.Reason))
		for _, a := range e.Answers {
			out = append(out, a.Resource+": "+a.Reason)
			for _, s := range a.Selectors {
				if s.Met {
					out = append(out, "  "+s.Key+" is met")
				}
				for _, c := range s.Checks {
					out = append(out, "  "+c.Key+" want "+c.Want+", found "+c.Found+": "+map[bool]string{true: "yes", false: "no"}[c.Met])
				}
			}
		}
	}
	return out
}

func TestExplain(t *testing.T) {
	c := mustParse(t, `{"resourceList":[
		{"resourceName":"x","selectors":[{"pfNames":["ens1f0#0-1"],"drivers":["iavf"]},{"numaNodes":[1],"isRdma":true}]},
		{"resourceName":"y","unknownNuma":"exclude","selectors":{"vendors":["8086"],"linkTypes":["ether"]}},
		{"resourceName":"z","splitByNuma":true,"hosts":["gpu-*"],"selectors":{"acpiIndexes":["101"]}},
		{"resourceName":"lone","selectors":{"pciAddresses":["0000:40:00.0"]}}]}`)
	const first, second = "  resourceList[0].selectors[0].", "  resourceList[0].selectors[1]."
	const third, fourth = "  resourceList[1].selectors.", "  resourceList[2].selectors."
	for name, want := range map[string][]string{
		"a1": {"intel.com/x offered: meets resourceList[0].selectors[0]",
			"intel.com/x: meets resourceList[0].selectors[0]",
			"  resourceList[0].selectors[0] is met", first + "pfNames want ens1f0#0-1, found ens1f0#1: yes",
			first + "drivers want iavf, found iavf: yes",
			second + "numaNodes want 1, found 0: no", second + "isRdma want true, found false: no",
			"intel.com/y: already taken by intel.com/x in line 2",
			"  resourceList[1].selectors is met", third + "vendors want 8086, found 8086: yes", third + "linkTypes want ether, found ether: yes",
			"intel.com/z: acpiIndexes is \"\", not 101", fourth + "acpiIndexes want 101, found : no",
			"intel.com/lone: pciAddresses is 0000:10:01.1, not 0000:40:00.0",
			"  resourceList[3].selectors.pciAddresses want 0000:40:00.0, found 0000:10:01.1: no"},
		"u0": {"not offered: its NUMA node is unknown, and unknownNuma is exclude",
			"intel.com/x: meets no selector",
			first + "pfNames want ens1f0#0-1, found ens5f0#0: no", first + "drivers want iavf, found vfio-pci: no",
			second + "numaNodes want 1, found -1: no", second + "isRdma want true, found false: no",
			"intel.com/y: its NUMA node is unknown, and unknownNuma is exclude",
			"  resourceList[1].selectors is met", third + "vendors want 8086, found 8086: yes", third + "linkTypes want ether, found ether: yes",
			"intel.com/z: acpiIndexes is \"\", not 101", fourth + "acpiIndexes want 101, found : no",
			"intel.com/lone: pciAddresses is 0000:50:01.0, not 0000:40:00.0",
			"  resourceList[3].selectors.pciAddresses want 0000:40:00.0, found 0000:50:01.0: no"},
		"A": {"not offered: a PF with VFs",
			"intel.com/x: meets no selector",
			first + "pfNames want ens1f0#0-1, found ens1f0: no", first + "drivers want iavf, found ice: no",
			second + "numaNodes want 1, found 0: no", second + "isRdma want true, found false: no",
			"intel.com/y: a PF with VFs",
			"  resourceList[1].selectors is met", third + "vendors want 8086, found 8086: yes", third + "linkTypes want ether, found ether: yes",
			"intel.com/z: acpiIndexes is \"\", not 101", fourth + "acpiIndexes want 101, found : no",
			"intel.com/lone: pciAddresses is 0000:10:00.0, not 0000:40:00.0",
			"  resourceList[3].selectors.pciAddresses want 0000:40:00.0, found 0000:10:00.0: no"},
	} {
		if diff := cmp.Diff(want, explainDevice(c, name, Env{})); diff != "" {
			t.Errorf("%s: %s", name, diff)
		}
	}
	if got := explainDevice(c, "n", Env{}); got[0] != "intel.com/lone offered: meets resourceList[3].selectors" ||
		!slices.Contains(got, "intel.com/z: it has no PF, which requires a selector that names it by vendors and devices, or by pciAddresses") {
		t.Error(got)
	}
	busy := Env{InUse: map[string]string{"eno0": "has the address 10.0.0.1/24"}}
	if got := explainDevice(c, "n", busy)[0]; got != "not offered: its interface eno0 has the address 10.0.0.1/24" {
		t.Error(got)
	}
	if got := explainDevice(c, "n", Env{DefaultRoute: []string{"eno0"}})[0]; got != "not offered: its interface eno0 carries a default route" {
		t.Error(got)
	}
	c = mustParse(t, `{"resourceList":[{"resourceName":"x"}],"pfs":[{"pfName":"ens3f0","numVfs":2}]}`)
	if got := explainDevice(c, "p", Env{}); got[0] != "not offered: a PF that will get VFs, as configured in pfs[0]" {
		t.Error(got)
	}
	c = mustParse(t, `{"resourceList":[{"resourceName":"x"}]}`)
	if got := explainDevice(c, "p", Env{}); got[0] != "not offered: a PF without VFs (it supports 64); to offer the PF itself, set offerPf in its entry of pfs" {
		t.Error(got)
	}
	if got := explainDevice(c, "a0", Env{}); got[0] != "intel.com/x offered: has no selectors" {
		t.Error(got)
	}
	c = mustParse(t, resource(`"driver":"vfio-pci","selectors":{"drivers":["iavf"]}`))
	if diff := cmp.Diff([]string{"intel.com/a_nonuma offered: meets resourceList[0].selectors", "intel.com/a: meets resourceList[0].selectors",
		"  resourceList[0].selectors is met",
		"  resourceList[0].selectors.drivers want iavf, found vfio-pci: yes"}, explainDevice(c, "u0", Env{})); diff != "" {
		t.Error(diff)
	}
	c = mustParse(t, `{"resourceList":[{"resourceName":"x"}]}`)
	data, err := json.Marshal(Explain(c, workerMachine(), Env{})[1])
	if want := `{"device":"0000:10:00.1","reason":"not offered: a PF with VFs","answers":[{"file":"config.json","line":1,"column":18,"key":"resourceList[0]",` +
		`"resource":"intel.com/x","matches":true,"reason":"a PF with VFs"}]}`; string(data) != want || err != nil {
		t.Errorf("%s, %v", data, err)
	}
}

// TestFindings checks that each selector value that no device of the node has is reported, with the values that they have.
func TestFindings(t *testing.T) {
	quiet := `{"resourceName":"q","selectors":{"pfNames":["ens1f0"]}}`
	for _, test := range []struct{ config, want string }{
		{`{"resourceList":[` + quiet + `]}`, ""},
		{"{\"resourceList\":[{\"resourceName\":\"x\",\"selectors\":\n{\"pfNames\":[\"ens9f0\",\"ens1f0\"]}}]}",
			`2: resourceList[0].selectors.pfNames: no PF "ens9f0" on this node; PFs here: ens1f0, ens1f1, ib2f0, ens3f0, ens5f0`},
		{`{"resourceList":[{"resourceName":"x","selectors":{"pfNames":["ens1f0#1,62-64"]}}]}`,
			`1: resourceList[0].selectors.pfNames: ens1f0#1,62-64: no VF 64 on this node; ens1f0 supports at most 64`},
		{`{"resourceList":[{"resourceName":"x","selectors":[{"rootDevices":["0000:99:00.0#1"]},{"rootDevices":["0000:10:00.0"]}]}]}`,
			`1: resourceList[0].selectors[0].rootDevices: no root device "0000:99:00.0" on this node; PFs here: 0000:10:00.0, 0000:10:00.1, 0000:20:00.0, 0000:30:00.0, 0000:50:00.0`},
		{`{"resourceList":[{"resourceName":"x","selectors":{"pciAddresses":["0000:99:00.0","0000:10:01.0"]}}]}`,
			`1: resourceList[0].selectors.pciAddresses: no device 0000:99:00.0 on this node; 'podlace sriov ls' lists the devices`},
		{`{"resourceList":[{"resourceName":"x","selectors":{"numaNodes":[0,4,-1],"vendors":["8086"]}}]}`,
			"1: resourceList[0].selectors.numaNodes: no NUMA node 4 on this node; available: 0, 1\n" +
				`1: resourceList[0]: resource intel.com/x: the NUMA node of 1 device is unknown: offered as intel.com/x_nonuma; set "unknownNuma": "all" to keep them in the resource`},
		{`{"resourceList":[{"resourceName":"` + strings.Repeat("x", 57) + `","selectors":{"vendors":["8086"]}}]}`,
			`1: resourceList[0]: resource intel.com/` + strings.Repeat("x", 57) +
				`: the NUMA node of 1 device is unknown: the Topology Manager ignores them; shorten the name so that they get a separate resource`},
		{`{"resourceList":[{"resourceName":"x","splitByNuma":true,"selectors":{"vendors":["8086"]}}]}`, ""},
		{`{"resourceList":[{"resourceName":"x","unknownNuma":"all","selectors":{"vendors":["8086"]}}]}`, ""},
		{`{"resourceList":[{"resourceName":"x","unknownNuma":"all"}]}`,
			"1: resourceList[0]: resource intel.com/x: a selector is missing or empty: the resource takes every remaining network device\n" +
				"1: resourceList[0]: resource intel.com/x: the plugin sriov refuses 2 devices, first 0000:20:01.0: " +
				`setting the GUID and the partition keys of an InfiniBand VF is not supported: attach such VFs with ib-sriov under Multus, or offer only "linkTypes": ["ether"]`},
		{`{"resourceList":[{"resourceName":"x","selectors":{"vendors":["ffff"]}}]}`,
			"1: resourceList[0].selectors.vendors: no device on this node has ffff; values found: 14e4, 15b3, 8086\n" +
				"1: resourceList[0]: resource intel.com/x: no device on this node matches"},
		{`{"resourceList":[]}`, "1: resourceList: no resource is configured: no device is offered"},
		{`{"resourceList":[` + quiet + `,{"resourceName":"x","hosts":["worker-*","b"]}]}`,
			"1: resourceList[1]: resource intel.com/x: only for hosts worker-*, b; this host is gpu-7"},
		{`{"resourceList":[` + quiet + `,{"resourceName":"x","selectors":{"pfNames":["ens1f0#0-2"]}}]}`,
			"1: resourceList[1]: resource intel.com/x: 3 devices match on this node, but none is available; 0000:10:01.0: already taken by intel.com/q in line 1"},
		{`{"resourceList":[{"resourceName":"x","selectors":{"pciAddresses":["0000:10:00.0"]}}]}`,
			"1: resourceList[0]: resource intel.com/x: 1 device matches on this node, but none is available; 0000:10:00.0: a PF with VFs"},
		{`{"resourceList":[],"pfs":[{"pfName":"ens9","numVfs":1},{"pciAddress":"0000:99:00.0","numVfs":1}]}`,
			"1: pfs[0]: no PF \"ens9\" on this node; PFs here: ens1f0, ens1f1, ib2f0, ens3f0, ens5f0\n" +
				"1: pfs[1]: no PF 0000:99:00.0 on this node; PFs here: 0000:10:00.0, 0000:10:00.1, 0000:20:00.0, 0000:30:00.0, 0000:50:00.0"},
		{`{"resourceList":[],"pfs":[{"pfName":"ens1f0","numVfs":65},{"pciAddress":"0000:10:00.0","numVfs":1}]}`,
			"1: pfs[0]: numVfs 65: 0000:10:00.0 supports at most 64\n1: pfs[1]: ignored: pfs[0] in line 1 is for the same PF, 0000:10:00.0"},
		{"{\"RESOURCELIST\":[\n{\"resourceName\":\"x\",\"selectors\":{\"vendors\":[\"ffff\"]}}]}",
			"1: RESOURCELIST: read as resourceList\n2: RESOURCELIST[0].selectors.vendors: no device on this node has ffff; values found: 14e4, 15b3, 8086\n" +
				"2: RESOURCELIST[0]: resource intel.com/x: no device on this node matches"},
	} {
		var got []string
		for _, f := range Findings(mustParse(t, test.config), workerMachine(), Env{}) {
			got = append(got, strings.TrimPrefix(column.ReplaceAllString(f.Error(), "$1"), "config.json:"))
		}
		if diff := cmp.Diff(test.want, strings.Join(got, "\n")); diff != "" {
			t.Errorf("%s\n%s", test.config, diff)
		}
	}
	bare := Findings(mustParse(t, resource(`"selectors":{"pfNames":["e"],"numaNodes":[0]}`)), &pci.Snapshot{}, Env{})
	if len(bare) != 3 || bare[0].Text != `no PF "e" on this node; PFs here: none` ||
		bare[1].Text != "no NUMA node 0 on this node; available: none" {
		t.Errorf("%v", bare)
	}
}
