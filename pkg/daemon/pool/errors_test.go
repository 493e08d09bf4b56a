// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"errors"
	"regexp"
	"strings"
	"testing"

	"github.com/podlace/podlace/pkg/strict"
)

var long = strings.Repeat("x", 64) // one character more than the limit of names

// parseErrors maps invalid configurations to their errors. TestParseErrors adds the line and the key of the resource where the line
// number is missing.
var parseErrors = []struct{ config, want string }{
	// Errors of the whole file.
	{``, "1: the text is empty: want JSON"},
	{"{\n\n]", "3: no JSON: invalid character ']' looking for beginning of object key string" + hint},
	{"{\"resourceList\":[]}\n{", "2: no JSON: invalid character '{' after top-level value"},
	{strings.Repeat("[", 120) + strings.Repeat("]", 120), "1: nested more than 100 levels deep"},
	{strings.Repeat("[", 20000) + strings.Repeat("]", 20000), "1: no JSON: invalid character '[' exceeded max depth" + hint},
	{`{"resourceList":[]` + strings.Repeat(" ", 1<<20) + "}", "1: too large: want at most 1048576 bytes"},
	{`[]`, "1: a list: want an object"},
	{`{}`, "1: resourceList is missing"},
	{`{"resourceList":{}}`, "1: resourceList: an object: want a list"},
	{`{"resourceList":[],"resourceList":[]}`, "1: resourceList: duplicate key, first in line 1"},
	{"{\"resourceList\":\n[],\"ResourceLIST\":[]}", "2: ResourceLIST: duplicate key, first in line 1"},
	{`{"resourceList":[],"resourcelists":1}`, "1: resourcelists: unknown key; did you mean resourceList?"},
	{`{"resourceList":[],"x":1}`, "1: x: unknown key; known keys: cdi, dra, pfs, resourceList"},
	{`{"resourceList":[],"a\nb":1}`, `1: "a\nb": unknown key; known keys: cdi, dra, pfs, resourceList`},
	{`{"resourceList":[],"cdi":"on"}`, `1: cdi: "on": want auto, field, annotation, off`},
	// Errors in resources.
	{`{"resourceList":[7]}`, "1: resourceList[0]: 7: want an object"},
	{`{"resourceList":[null]}`, "1: resourceList[0]: null: want an object"},
	{`{"resourceList":[{}]}`, "1: resourceList[0]: resourceName is missing"},
	{`{"resourceList":[{"resourceName":7}]}`, "1: resourceList[0].resourceName: 7: want a string"},
	{`{"resourceList":[{"resourceName":""}]}`, `1: resourceList[0].resourceName: "": want letters, digits, - and _`},
	{`{"resourceList":[{"resourceName":"a.b"}]}`, `1: resourceList[0].resourceName: "a.b": want letters, digits, - and _`},
	{`{"resourceList":[{"resourceName":"_a"}]}`,
		`1: resourceList[0].resourceName: "_a": want a letter or digit as first and last character`},
	{`{"resourceList":[{"resourceName":"` + long + `"}]}`, `1: resourceList[0].resourceName: "` + long + `": want at most 63 characters`},
	{`{"resourceList":[{"resourceName":"` + long[:55] + `","splitByNuma":true}]}`,
		`1: resourceList[0].resourceName: "` + long[:55] + `": want at most 54 characters with splitByNuma`},
	{"{\"resourceList\":[{\"resourceName\":\"a\"},\n{\"resourceName\":\"a\",\"resourcePrefix\":\"\"}]}",
		"2: resourceList[1]: resource intel.com/a: resourceList[0] in line 1 has the same name"},
	{`{"resourceList":[{"resourceName":"a_b"},{"resourceName":"b","resourcePrefix":"intel.com.a"}]}`,
		"1: resourceList[1]: resource intel.com.a/b: its environment variable PCIDEVICE_INTEL_COM_A_B is also that of intel.com/a_b, resourceList[0] in line 1; rename one"},
	{`{"resourceList":[{"resourceName":"a_numa1"},{"resourceName":"a","splitByNuma":true}]}`,
		"1: resourceList[0]: resource intel.com/a_numa1: resourceList[1] in line 1 may offer devices under this name"},
	{`{"resourceList":[{"resourceName":"a_nonuma"},{"resourceName":"a"}]}`,
		"1: resourceList[0]: resource intel.com/a_nonuma: resourceList[1] in line 1 may offer devices under this name"},
	{resource(`"resourcePrefix":"Intel.com"`), `resourcePrefix: "Intel.com": want a DNS subdomain, such as intel.com`},
	{resource(`"resourcePrefix":"` + long + `"`), `resourcePrefix: "` + long + `": want a DNS subdomain, such as intel.com`},
	{resource(`"resourcePrefix":"` + strings.Repeat("a.", 122) + `a"`),
		`resourcePrefix: "` + strings.Repeat("a.", 40) + `": want a DNS subdomain, such as intel.com`},
	{resource(`"resourcePrefix":"x.kubernetes.io"`), `resourcePrefix: "x.kubernetes.io": this prefix is reserved for Kubernetes`},
	{resource(`"resourcePrefix":"requests.x"`), `resourcePrefix: "requests.x": this prefix is reserved for Kubernetes`},
	{resource(`"deviceType":"x"`), `deviceType: "x": want netDevice`},
	{resource(`"excludeTopology":"yes"`), `excludeTopology: "yes": want true or false`},
	{resource(`"splitByNuma":1`), `splitByNuma: 1: want true or false`},
	{resource(`"unknownNuma":"none"`), `unknownNuma: "none": want omit, all, exclude`},
	{resource(`"policy":"packed"`), `policy: "packed": want numa-best-fit, pack, balance, distinct-pf`},
	{resource(`"policy":true`), `policy: true: want a string in quotes, because YAML takes on, off, yes and no for booleans`},
	{resource(`"cdi":""`), `cdi: "": want auto, field, annotation, off`},
	{resource(`"driver":"../x"`), `driver: "../x": want the name of a driver, such as vfio-pci`},
	{resource(`"driver":"vfio-pci","selectors":{"isRdma":true}`),
		`driver: vfio-pci: devices bound to it have no RDMA, but resourceList[0].selectors.isRdma requires it`},
	{resource(`"hosts":["["]`), `hosts[0]: "[": want a pattern for host names, such as worker-*`},
	{resource(`"hosts":[""]`), `hosts[0]: "": want a pattern for host names, such as worker-*`},
	{resource(`"additionalInfo":[]`), "additionalInfo: a list: want an object"},
	{resource(`"additionalInfo":{"x":{}}`), `additionalInfo.x: want a PCI address, such as 0000:3b:10.2, or "*"`},
	{resource(`"additionalInfo":{"*":7}`), "additionalInfo.*: 7: want an object"},
	{resource(`"additionalInfo":{"*":{"a":7}}`), "additionalInfo.*.a: 7: want a string"},
	{resource(`"additionalInfo":{"*":{"a":"x","a":"y"}}`), "additionalInfo.*.a: duplicate key, first in line 1"},
	{resource(`"additionalInfo":{"0000:3b:00.0":{},"0000:3B:00.0":{}}`), "additionalInfo.0000:3B:00.0: duplicate key"},
	{resource(`"isRdma":true`), "isRdma: unknown key; it belongs in selectors"},
	// Errors in the keys for Dynamic Resource Allocation.
	{resource(`"api":"both"`), `api: "both": want device-plugin, dra`},
	{resource(`"api":1`), `api: 1: want a string`},
	{resource(`"vf":{}`), `vf: has no effect: want "api": "dra" beside it`},
	{resource(`"api":"device-plugin","claimMay":[]`), `claimMay: has no effect: want "api": "dra" beside it`},
	{resource(`"api":"dra","policy":"numa-best-fit"`), `policy: has no effect with "api": "dra": remove it; ` +
		`claims select devices by selectors and constraints, such as matchAttribute resource.kubernetes.io/numaNode`},
	{resource(`"splitByNuma":false,"api":"dra"`), `splitByNuma: has no effect with "api": "dra": remove it; ` +
		`claims select devices by selectors and constraints, such as matchAttribute resource.kubernetes.io/numaNode`},
	{resource(`"api":"dra","ExcludeTopology":true`), `ExcludeTopology: has no effect with "api": "dra": remove it; ` +
		`claims select devices by selectors and constraints, such as matchAttribute resource.kubernetes.io/numaNode`},
	{resource(`"linkDown":"NoSchedule"`), `linkDown: "NoSchedule": want unhealthy, off`},
	{resource(`"api":"dra","linkDown":"off"`), `linkDown: has no effect with "api": "dra": remove it; dra.taints.linkDown is for all resources`},
	{resource(`"api":"dra","cdi":"annotation"`), `cdi: has no effect with "api": "dra": remove it; claims always get device files by CDI`},
	{resource(`"api":"dra","unknownNuma":"all"`), `unknownNuma: "all" has no effect with "api": "dra": want omit, exclude`},
	{`{"resourceList":[{"api":"dra","resourceName":"` + long[:55] + `"}]}`,
		`1: resourceList[0]: resource intel.com/` + long[:55] + `: 65 bytes: want at most 64 with "api": "dra", prefix included`},
	{resource(`"api":"dra","vf":[]`), `vf: a list: want an object`},
	{resource(`"api":"dra","vf":{"vlann":1}`), `vf.vlann: unknown key; did you mean vlan?`},
	{resource(`"api":"dra","vf":{"vlan":1,"vlan":1}`), `vf.vlan: duplicate key, first in line 1`},
	{resource(`"api":"dra","vf":{"vlan":"1"}`), `vf.vlan: "1": want a number`},
	{resource(`"api":"dra","vf":{"vlan":4095}`), `vf.vlan: 4095: want 0-4094, 0 for none`},
	{resource(`"api":"dra","vf":{"trust":true}`), `vf.trust: true: want a string in quotes, because YAML takes on, off, yes and no for booleans`},
	{resource(`"api":"dra","vf":{"rebind":"yes"}`), `vf.rebind: "yes": want true or false`},
	{resource(`"api":"dra","vf":{"mac":"02:00:00:00:00:01"}`), `vf.mac: all VFs of the class would share it: set it in claims`},
	{resource(`"api":"dra","vf":{"ips":["10.0.0.1"]}`), `vf.ips: all VFs of the class would share it: set it in claims`},
	{resource(`"api":"dra","vf":{"minTxRate":2,"maxTxRate":1}`), `vf: minTxRate 2: more than maxTxRate 1`},
	{resource(`"api":"dra","claimMay":{}`), `claimMay: an object: want a list`},
	{resource(`"api":"dra","claimMay":[1]`), `claimMay[0]: 1: want a key, or an object of keys with their limits`},
	{resource(`"api":"dra","claimMay":["vlann"]`), `claimMay[0]: "vlann": unknown key; did you mean vlan?`},
	{resource(`"api":"dra","claimMay":["vlan",{"vlan":"1-2"}]`), `claimMay[1].vlan: duplicate key`},
	{resource(`"api":"dra","claimMay":[{"vlan":5}]`), `claimMay[0].vlan: 5: want ranges in quotes, such as "100-199,300"`},
	{resource(`"api":"dra","claimMay":[{"vlan":null}]`),
		`claimMay[0].vlan: null: want ranges such as "100-199,300", or a number for the maximum`},
	{resource(`"api":"dra","claimMay":[{"vlan":"7-5"}]`), `claimMay[0].vlan: "7-5": 7-5: want the smaller number first`},
	{resource(`"api":"dra","claimMay":[{"trust":"on"}]`),
		`claimMay[0].trust: "on": only numbers can have a limit: list "trust" itself, which allows any valid value`},
	{`{"resourceList":[],"dra":{"driver":"x"}}`, `1: dra.driver: unknown key; known keys: taints`},
	{`{"resourceList":[],"dra":{"taints":{"linkdwn":"off"}}}`, `1: dra.taints.linkdwn: unknown key; did you mean linkDown?`},
	{`{"resourceList":[],"dra":{"taints":{"gone":"noexecute"}}}`,
		`1: dra.taints.gone: "noexecute": want NoSchedule, NoExecute, None, off`},
	// Errors in selectors.
	{resource(`"selectors":"x"`), `selectors: "x": want an object`},
	{resource(`"selectors":[[]]`), `selectors[0]: a list: want an object`},
	{resource(`"selectors":{"pfName":[]}`), "selectors.pfName: unknown key; did you mean pfNames?"},
	{resource(`"selectors":{"vendors":"8086"}`), `selectors.vendors: "8086": want a list`},
	{resource(`"selectors":{"vendors":[8086]}`), `selectors.vendors[0]: 8086: want a string`},
	{resource(`"selectors":{"vendors":["0x8086"]}`), `selectors.vendors[0]: "0x8086": want four hexadecimal digits, such as 8086`},
	{resource(`"selectors":{"devices":["154c","154"]}`), `selectors.devices[1]: "154": want four hexadecimal digits, such as 8086`},
	{resource(`"selectors":{"drivers":["a b"]}`), `selectors.drivers[0]: "a b": want the name of a driver, such as vfio-pci`},
	{resource(`"selectors":{"pciAddresses":["3b:10.2"]}`),
		`selectors.pciAddresses[0]: PCI address "3b:10.2": want domain:bus:device.function, such as 0000:3b:10.2`},
	{resource(`"selectors":{"acpiIndexes":["x"]}`), `selectors.acpiIndexes[0]: "x": want a number in quotes, such as "101"`},
	{resource(`"selectors":{"pfNames":[""]}`), `selectors.pfNames[0]: "": want the name of an interface, such as ens1f0`},
	{resource(`"selectors":{"pfNames":["a/b#0"]}`), `selectors.pfNames[0]: "a/b": want the name of an interface, such as ens1f0`},
	{resource(`"selectors":{"pfNames":["a#"]}`), `selectors.pfNames[0]: "a#": VFs after #: want numbers and ranges, such as 100-199,300`},
	{resource(`"selectors":{"pfNames":["a#0,"]}`), `selectors.pfNames[0]: "a#0,": VFs after #: want numbers and ranges, such as 100-199,300`},
	{resource(`"selectors":{"pfNames":["a#1-2-3"]}`),
		`selectors.pfNames[0]: "a#1-2-3": VFs after #: want numbers and ranges, such as 100-199,300`},
	{resource(`"selectors":{"pfNames":["a#-1"]}`), `selectors.pfNames[0]: "a#-1": VFs after #: want numbers and ranges, such as 100-199,300`},
	{resource(`"selectors":{"pfNames":["a#65536"]}`),
		`selectors.pfNames[0]: "a#65536": VFs after #: want VFs up to 65535`},
	{resource(`"selectors":{"pfNames":["a#3-1"]}`), `selectors.pfNames[0]: "a#3-1": VFs after #: 3-1: want the smaller number first`},
	{resource(`"selectors":{"rootDevices":["a#3"]}`),
		`selectors.rootDevices[0]: PCI address "a": want domain:bus:device.function, such as 0000:3b:10.2`},
	{resource(`"selectors":{"linkTypes":["infini"]}`), `selectors.linkTypes[0]: "infini": want ether or infiniband`},
	{resource(`"selectors":{"isRdma":"true"}`), `selectors.isRdma: "true": want true or false`},
	{resource(`"selectors":{"needVhostNet":1}`), `selectors.needVhostNet: 1: want true or false`},
	{resource(`"selectors":{"numaNodes":[-2]}`), `selectors.numaNodes[0]: -2: want a whole number between -1 and 1023`},
	{resource(`"selectors":{"numaNodes":["0"]}`), `selectors.numaNodes[0]: "0": want a number`},
	{resource(`"selectors":{"numaNodes":[1e0]}`), `selectors.numaNodes[0]: 1e0: want a whole number between -1 and 1023`},
	{resource(`"selectors":{"numaNodes":[` + strings.Repeat("9", 99) + `]}`),
		`selectors.numaNodes[0]: ` + strings.Repeat("9", 40) + `: want a whole number between -1 and 1023`},
	// Errors in the list pfs.
	{pfs(`{"numVfs":1}`), "pfs[0]: want either pfName or pciAddress"},
	{pfs(`{"pfName":"a","pciAddress":"0000:3b:00.0","numVfs":1}`), "pfs[0]: want either pfName or pciAddress"},
	{pfs(`{"pfName":"a"}`), "pfs[0]: numVfs is missing"},
	{pfs(`{"pfName":"a#0","numVfs":1}`), `pfs[0].pfName: "a#0": want the name of an interface, such as ens1f0`},
	{pfs(`{"pciAddress":"x","numVfs":1}`), `pfs[0].pciAddress: PCI address "x": want domain:bus:device.function, such as 0000:3b:10.2`},
	{pfs(`{"pfName":"a","numVfs":-1}`), "pfs[0].numVfs: -1: want a whole number between 0 and 65535"},
	{pfs(`{"pfName":"a","numVfs":1},{"pfName":"a","numVfs":2}`), "pfs[1]: pfs[0] in line 1 is for the same PF"},
	{pfs(`{"pfName":"a","numVfs":0,"offerPf":1}`), "pfs[0].offerPf: 1: want true or false"},
	{pfs(`{"pfName":"a","numVfs":1,"offerPf":true}`), `pfs[0].offerPf: a PF with VFs cannot be offered itself: want "numVfs": 0`},
	{pfs(`{"pfName":"a","numVfs":0,"offerWhole":true}`),
		`pfs[0].offerWhole: the PF has no VFs: want numVfs above 0, or offerPf instead`},
	{pfs(`{"pfName":"a","numVfs":1,"offerWhole":0}`), "pfs[0].offerWhole: 0: want true or false"},
	{pfs(`{"pfName":"a","numVf":1}`), "pfs[0].numVf: unknown key; did you mean numVfs?\nconfig.json:1: pfs[0]: numVfs is missing"},
	{pfs(`[]`), "pfs[0]: a list: want an object"},
}

// hint follows the text of a syntax error.
const hint = "; put commas between keys but not after the last, and quotes around keys and strings"

var column = regexp.MustCompile(`(?m)^(config\.json:\d+):\d+`)

// TestParseErrors checks that the error for each invalid configuration contains the line and the key.
func TestParseErrors(t *testing.T) {
	for _, test := range parseErrors {
		want := "config.json:" + test.want
		if !strings.Contains(test.want[:2], ":") && !strings.Contains(test.want[:2], " ") && test.want[0] > '9' {
			key := "resourceList[0]."
			if strings.HasPrefix(test.want, "pfs") {
				key = ""
			}
			want = "config.json:1: " + key + test.want
		}
		c, err := Parse(source(), []byte(test.config))
		if c != nil || err == nil || column.ReplaceAllString(err.Error(), "$1") != want {
			t.Errorf("%.200s\n got %v\nwant %s", test.config, err, want)
		}
	}
}

func resource(keys string) string { return `{"resourceList":[{"resourceName":"a",` + keys + `}]}` }

func pfs(items string) string { return `{"resourceList":[],"pfs":[` + items + `]}` }

// TestParseAllErrors checks that Parse returns all errors of a file, each as a strict.Problem.
func TestParseAllErrors(t *testing.T) {
	_, err := Parse(source(), []byte(`{
  "resourceList": [
    {"resourceName": "a b",
     "polcy": "pack",
     "selectors": [{"vendors": ["1", "8086", "2"]},
                   {"pfNames": ["x#2-1"]}]},
    {"resourceName": "c"}, {"resourceName": "c"}
  ],
  "cdi": 1
}`))
	want := `config.json:3:6: resourceList[0].resourceName: "a b": want letters, digits, - and _
config.json:4:6: resourceList[0].polcy: unknown key; did you mean policy?
config.json:5:33: resourceList[0].selectors[0].vendors[0]: "1": want four hexadecimal digits, such as 8086
config.json:5:46: resourceList[0].selectors[0].vendors[2]: "2": want four hexadecimal digits, such as 8086
config.json:6:33: resourceList[0].selectors[1].pfNames[0]: "x#2-1": VFs after #: 2-1: want the smaller number first
config.json:7:28: resourceList[2]: resource intel.com/c: resourceList[1] in line 7 has the same name
config.json:9:3: cdi: 1: want a string`
	if err == nil || err.Error() != want {
		t.Errorf("got\n%v\nwant\n%s", err, want)
	}
	var p strict.Problems
	if !errors.As(err, &p) || p[0].Line != 3 || p[0].Key != "resourceList[0].resourceName" {
		t.Errorf("%+v", p)
	}
	_, err = Parse(source(), []byte(resource(`"hosts":[`+strings.Repeat("1,", 150)+`1]`)))
	if lines := strings.Split(err.Error(), "\n"); len(lines) != 101 || lines[100] != "config.json: 51 more errors" {
		t.Errorf("%d lines: %s", len(lines), lines[len(lines)-1])
	}
	if _, err = Parse(Source{File: "f"}, []byte(`{"resourceList":[]}`)); err == nil ||
		err.Error() != `f:1:1: default resourcePrefix: "": want a DNS subdomain, such as intel.com` {
		t.Error(err)
	}
}
