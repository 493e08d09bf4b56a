// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/strict"
)

func source() Source { return Source{File: "config.json", Prefix: "intel.com", Host: "gpu-7"} }

func at(line, column int, key string) strict.Place {
	return strict.Place{File: "config.json", Line: line, Column: column, Key: key}
}

func mustParse(t testing.TB, config string) *Config {
	t.Helper()
	c, err := Parse(source(), []byte(config))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// TestParse checks that Parse reads every key of the SR-IOV network device plugin and every additional key.
func TestParse(t *testing.T) {
	c := mustParse(t, `{
  "cdi": "annotation",
  "resourceList": [
    {"resourceName": "plain"},
    {
      "resourceName": "full_1",
      "resourcePrefix": "example.org",
      "deviceType": "netDevice",
      "excludeTopology": true,
      "additionalInfo": {"*": {"token": "x"}, "0000:3B:10.2": {"mac": "y"}},
      "selectors": [{"vendors": ["8086"]}, {"isRdma": true, "needVhostNet": true}],
      "splitByNuma": true,
      "unknownNuma": "all",
      "policy": "distinct-pf",
      "driver": "mlx5_core",
      "cdi": "off",
      "hosts": ["cpu-*", "gpu-?"]
    },
    {"resourceName": "elsewhere", "hosts": ["cpu-*"]},
    {"resourceName": "null", "resourcePrefix": "", "deviceType": null, "selectors": null, "policy": null, "additionalInfo": null}
  ],
  "pfs": [
    {"pfName": "ens1f0", "numVfs": 4},
    {"pciAddress": "0000:3b:00.1", "numVfs": 0, "offerPf": true, "hosts": ["gpu-7"]},
    {"pfName": "ens1f0", "numVfs": 9, "hosts": ["other"]}
  ]
}`)
	want := &Config{
		Resources: []Resource{
			{Place: at(4, 5, "resourceList[0]"), Prefix: "intel.com", Name: "plain", API: DevicePlugin,
				UnknownNUMA: unknownOmit, Policy: NUMABestFit,
				CDI: CDIAnnotation},
			{Place: at(5, 5, "resourceList[1]"), Prefix: "example.org", Name: "full_1", API: DevicePlugin, ExcludeTopology: true,
				AdditionalInfo: map[string]map[string]string{"*": {"token": "x"}, "0000:3b:10.2": {"mac": "y"}},
				Selectors: []selector{
					{Place: at(11, 21, "resourceList[1].selectors[0]"),
						Conditions: []condition{{Place: at(11, 22, "resourceList[1].selectors[0].vendors"), Name: "vendors"}}},
					{Place: at(11, 44, "resourceList[1].selectors[1]"), RDMA: true, VhostNet: true,
						Conditions: []condition{{Place: at(11, 45, "resourceList[1].selectors[1].isRdma"), Name: "isRdma"}}},
				},
				SplitByNUMA: true, UnknownNUMA: unknownAll, Policy: DistinctPF, Driver: "mlx5_core", CDI: CDIOff},
			{Place: at(20, 5, "resourceList[3]"), Prefix: "intel.com", Name: "null", API: DevicePlugin,
				UnknownNUMA: unknownOmit, Policy: NUMABestFit,
				CDI: CDIAnnotation},
		},
		PFs: []pfEntry{
			{Place: at(23, 5, "pfs[0]"), Name: "ens1f0", NumVFs: 4},
			{Place: at(24, 5, "pfs[1]"), Address: pciAddr(0x3b, 0, 1), Offer: true},
		},
		Taints: Taints{"NoSchedule", "NoSchedule", "NoExecute"},
		Notes: []strict.Problem{{Place: at(19, 5, "resourceList[2]"),
			Text: "resource intel.com/elsewhere: only for hosts cpu-*; this host is gpu-7"}},
	}
	if diff := cmp.Diff(want, c, cmpopts.IgnoreUnexported(Resource{}, pfEntry{}, condition{}),
		cmp.Comparer(func(a, b pci.Address) bool { return a == b })); diff != "" {
		t.Error(diff)
	}
	if r := c.Resources[1]; r.FullName() != "example.org/full_1" {
		t.Errorf("named %s", r.FullName())
	}
}

// TestParseLenient checks that, as in the SR-IOV network device plugin, empty values and keys in another case are accepted.
func TestParseLenient(t *testing.T) {
	c := mustParse(t, `{"resourcelist":[{"ResourceName":"a","selectors":{"isrdma":false,"ddpProfiles":[],"vdpaType":"","pKeys":null,"vendors":[]}}]}`)
	if len(c.Resources) != 1 || c.Resources[0].Name != "a" || len(c.Resources[0].Selectors[0].Conditions) != 0 {
		t.Errorf("%+v", c)
	}
	var notes []string
	for _, n := range c.Notes {
		notes = append(notes, n.Error())
	}
	if diff := cmp.Diff([]string{
		"config.json:1:2: resourcelist: read as resourceList",
		"config.json:1:51: resourcelist[0].selectors.isrdma: read as isRdma",
	}, notes); diff != "" {
		t.Error(diff)
	}
}

// TestHosts checks that a resource applies only to hosts that match one of its patterns. Two entries for the same resource are an error
// only if both apply to a host.
func TestHosts(t *testing.T) {
	config := `{"resourceList":[{"resourceName":"a","policy":"pack","hosts":["gpu-*"]},{"resourceName":"a","hosts":["cpu-*","x"]}]}`
	for host, want := range map[string]Policy{"gpu-7": Pack, "cpu-1": NUMABestFit, "x": NUMABestFit, "gpu": "", "": ""} {
		c, err := Parse(Source{File: "f", Prefix: "intel.com", Host: host}, []byte(config))
		if err != nil {
			t.Fatal(err)
		}
		if got := append(c.Resources, Resource{})[0].Policy; got != want || len(c.Resources) > 1 {
			t.Errorf("%q: %+v", host, c.Resources)
		}
	}
	if _, err := Parse(source(), []byte(strings.ReplaceAll(config, "cpu", "gpu"))); err == nil {
		t.Error("two resources of the same name were accepted")
	}
}

// FuzzParse checks that Parse returns a usable configuration, or an error with a line number, for any file.
func FuzzParse(f *testing.F) {
	s := newMachine(2, card{bus: 16, node: 0, ports: 2, vfs: 2, vendor: "8086", name: "ens"}, card{bus: 17, node: -1, ports: 1, vfs: 1})
	for _, seed := range []string{"", "{}", "[", `{"resourceList":[{"resourceName":"a"}]}`, pfs(`{"pfName":"ens0","numVfs":4}`),
		resource(`"splitByNuma":true`),
		resource(`"selectors":[{"pfNames":["ens0#0-1,7"],"numaNodes":[0,-1],"linkTypes":["ether"]},{"rootDevices":["0000:10:00.1"]}]`),
		`{"resourceList":[{"resourceName":"a","deviceType":"accelerator"},{"resourceName":"b","SelectorObj":null,"selectors":{"vdpaType":"vhost"}}]}`,
		`{"resourceList":[{"resourceName":"a","api":"dra","vf":{"vlan":1},"claimMay":["mac",{"vlan":"1-9,30"}]}],"dra":{"taints":{"gone":"off"}}}`,
		resource(`"additionalInfo":{"*":{"a":"b"}},"driver":"vfio-pci","cdi":"off","policy":"pack","hosts":["*"]`)} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := Parse(source(), data)
		if err != nil {
			if p := (strict.Problems{}); c != nil || !errors.As(err, &p) || p[0].Line < 1 || p[0].Line > strings.Count(string(data), "\n")+1 ||
				strings.Count(err.Error(), "\n") > 100 {
				t.Errorf("%q: %+v, %v", data, c, err)
			}
			return
		}
		seen := offeredDevices(t, data, c, s)
		for i, e := range Explain(c, s, Env{}) {
			if (e.Resource != "") != seen[s.Devices[i].Address] {
				t.Errorf("%q: %+v", data, e)
			}
		}
		Findings(c, s, Env{})
	})
}

// offeredDevices returns the devices of all pools. It checks that each is in only one, that the pools' names are valid, and that Prefer
// works with each.
func offeredDevices(t *testing.T, data []byte, c *Config, s *pci.Snapshot) map[pci.Address]bool {
	t.Helper()
	seen := map[pci.Address]bool{}
	for _, p := range Assign(c, s, Env{}) {
		for _, d := range p.Devices {
			if seen[d.Address] || len(p.Name)-strings.IndexByte(p.Name, '/')-1 > maxName {
				t.Errorf("%q: %s in %s", data, d.Address, p.Name)
			}
			seen[d.Address] = true
		}
		if got := Prefer(p.Resource.Policy, NewTopology(p, s), ids(p.Devices), nil, 2); len(got) != min(2, len(p.Devices)) {
			t.Errorf("%q: %v", data, got)
		}
	}
	return seen
}
