// SPDX-License-Identifier: Apache-2.0

package pool

import (
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/pci"
)

// workerMachine returns a machine with network devices of every type. The tests use the following short names for the devices:
//
//	a0-a3, b0-b3  VFs of ens1f0 and ens1f1, node 0
//	m0, m1        VFs of ib2f0, node 1, RDMA, InfiniBand
//	u0            VF of ens5f0, node unknown, vfio-pci
//	p             a PF that can have VFs and has none, ens3f0, node 1
//	n             a card without SR-IOV, eno1, node 1
//	and the PFs with VFs: A, B, M, U
func workerMachine() *pci.Snapshot {
	s := newMachine(2,
		card{bus: 0x10, node: 0, root: "pci0000:10", ports: 2, vfs: 4, vendor: "8086", driver: "iavf", name: "ens1f"},
		card{bus: 0x20, node: 1, root: "pci0000:20", ports: 1, vfs: 2, vendor: "15b3", driver: "mlx5_core", name: "ib2f"},
		card{bus: 0x30, node: 1, root: "pci0000:20", ports: 1, vendor: "8086", name: "ens3f"},
		card{bus: 0x40, node: 1, root: "pci0000:20", ports: 1, vendor: "14e4", name: "eno"},
		card{bus: 0x50, node: -1, root: "pci0000:50", ports: 1, vfs: 1, vendor: "8086", driver: "vfio-pci", name: "ens5f"})
	for i := range s.Devices {
		switch d := &s.Devices[i]; shortNames()[d.Address.String()] {
		case "m0", "m1":
			d.LinkType, d.RDMA = pci.InfiniBand, []string{"mlx5_" + d.Address.String()}
		case "n":
			d.TotalVFs, d.ACPIIndex = 0, "101"
		}
	}
	return s
}

// shortNames maps PCI addresses to the short names of workerMachine.
func shortNames() map[string]string {
	return map[string]string{
		"0000:10:00.0": "A", "0000:10:01.0": "a0", "0000:10:01.1": "a1", "0000:10:01.2": "a2", "0000:10:01.3": "a3",
		"0000:10:00.1": "B", "0000:10:11.0": "b0", "0000:10:11.1": "b1", "0000:10:11.2": "b2", "0000:10:11.3": "b3",
		"0000:20:00.0": "M", "0000:20:01.0": "m0", "0000:20:01.1": "m1", "0000:30:00.0": "p", "0000:40:00.0": "n",
		"0000:50:00.0": "U", "0000:50:01.0": "u0",
	}
}

// formatPools formats pools as text, such as "name: devices; name: devices".
func formatPools(pools []Pool) string {
	var out []string
	for _, p := range pools {
		devices := ""
		for _, d := range p.Devices {
			devices += " " + shortNames()[d.Address.String()]
		}
		out = append(out, strings.TrimPrefix(p.Name, "intel.com/")+":"+devices)
	}
	return strings.Join(out, "; ")
}

// TestSelectors checks which devices each key of a selector matches.
func TestSelectors(t *testing.T) {
	for selectors, want := range map[string]string{
		`{}`:                          "a0 a1 a2 a3 b0 b1 b2 b3 m0 m1 u0",
		`{"vendors":["15B3","14e4"]}`: "m0 m1",
		`{"devices":["1592"]}`:        "",
		`{"vendors":["14E4"],"devices":["1592"]}`:                                        "n",
		`{"drivers":["mlx5_core"]}`:                                                      "m0 m1",
		`{"drivers":["vfio-pci","ice"]}`:                                                 "u0",
		`{"pciAddresses":["0000:10:11.3","0000:40:00.0","0000:10:00.0","0000:30:00.0"]}`: "b3 n", // a PF is never offered, with VFs or without
		`{"acpiIndexes":["101"]}`:                                                        "",
		`{"pfNames":["ens1f1","ENS3F0"]}`:                                                "b0 b1 b2 b3",
		`{"pfNames":["ens1f0#0,2-3","ens3f0#0"]}`:                                        "a0 a2 a3",
		`{"pfNames":["ens1f0#0","ens1f0#3"]}`:                                            "a0 a3",
		`{"pfNames":["ens1f"]}`:                                                          "",
		`{"rootDevices":["0000:10:00.1#1-2","0000:40:00.0"]}`:                            "b1 b2",
		`{"linkTypes":["infiniband"]}`:                                                   "m0 m1",
		`{"linkTypes":["infiniband","ether"],"vendors":["15b3"]}`:                        "m0 m1",
		`{"isRdma":true}`:                                                                "m0 m1",
		`{"isRdma":false,"vendors":["14e4"],"devices":["1592"]}`:                         "n",
		`{"numaNodes":[1]}`:                                                              "m0 m1",
		`{"numaNodes":[-1]}`:                                                             "u0",
		`{"needVhostNet":true,"pciAddresses":["0000:40:00.0"]}`:                          "n",
		`{"vendors":["15b3"],"numaNodes":[1]}`:                                           "m0 m1",
		`[{"vendors":["14e4"]},{"pfNames":["ens1f0#1"]}]`:                                "a1",
		`[{"vendors":["14e4"]},{"pciAddresses":["0000:40:00.0"]}]`:                       "n",
		`[]`: "a0 a1 a2 a3 b0 b1 b2 b3 m0 m1 u0",
	} {
		c := mustParse(t, `{"resourceList":[{"resourceName":"r","unknownNuma":"all","selectors":`+selectors+`}]}`)
		if got := formatPools(Assign(c, workerMachine(), Env{})); got != strings.TrimSuffix("r: "+want, " ") {
			t.Errorf("%s\n got %s\nwant r: %s", selectors, got, want)
		}
	}
}

// TestAssign checks configurations with several resources. It also checks all keys of a resource except "selectors".
func TestAssign(t *testing.T) {
	intel := `"selectors":{"vendors":["8086","15b3"]}`
	for _, test := range []struct{ config, want string }{
		{`{"resourceName":"x","selectors":{"pfNames":["ens1f0#0-1"]}},{"resourceName":"y","selectors":{"pfNames":["ens1f0","ib2f0"]}},{"resourceName":"z","selectors":{"linkTypes":["infiniband"]}}`,
			"x: a0 a1; y: a2 a3 m0 m1; z:"},
		{`{"resourceName":"x",` + intel + `}`, "x: a0 a1 a2 a3 b0 b1 b2 b3 m0 m1; x_nonuma: u0"},
		{`{"resourceName":"x",` + intel + `,"unknownNuma":"omit"}`, "x: a0 a1 a2 a3 b0 b1 b2 b3 m0 m1; x_nonuma: u0"},
		{`{"resourceName":"x",` + intel + `,"unknownNuma":"all"}`, "x: a0 a1 a2 a3 b0 b1 b2 b3 m0 m1 u0"},
		{`{"resourceName":"x",` + intel + `,"unknownNuma":"exclude"},{"resourceName":"y","selectors":[{"drivers":["vfio-pci"]},{"vendors":["14e4"],"devices":["1592"]}]}`,
			"x: a0 a1 a2 a3 b0 b1 b2 b3 m0 m1; y: n; y_nonuma: u0"},
		{`{"resourceName":"x",` + intel + `,"excludeTopology":true}`, "x: a0 a1 a2 a3 b0 b1 b2 b3 m0 m1 u0"},
		{`{"resourceName":"x","selectors":{"drivers":["vfio-pci"]}}`, "x: u0"}, // no other device to separate from
		{`{"resourceName":"` + strings.Repeat("x", 57) + `",` + intel + `}`, strings.Repeat("x", 57) + ": a0 a1 a2 a3 b0 b1 b2 b3 m0 m1 u0"},
		{`{"resourceName":"x","splitByNuma":true,` + intel + `}`, "x_numa0: a0 a1 a2 a3 b0 b1 b2 b3; x_numa1: m0 m1; x_nonuma: u0"},
		{`{"resourceName":"x","splitByNuma":true,"excludeTopology":true,` + intel + `}`,
			"x_numa0: a0 a1 a2 a3 b0 b1 b2 b3; x_numa1: m0 m1; x_nonuma: u0"},
		{`{"resourceName":"x","splitByNuma":true,"unknownNuma":"all","selectors":{"drivers":["vfio-pci","iavf"]}}`,
			"x_numa0: a0 a1 a2 a3 b0 b1 b2 b3; x_nonuma: u0"},
		{`{"resourceName":"x","splitByNuma":true,"unknownNuma":"exclude","selectors":[{"drivers":["vfio-pci"]},{"pciAddresses":["0000:40:00.0"]}]}`, "x_numa1: n"},
		{`{"resourceName":"x","splitByNuma":true,"selectors":{"vendors":["ffff"]}}`, ""},
		// The device u0 already has the driver to which the resource binds its devices.
		{`{"resourceName":"x","driver":"vfio-pci","unknownNuma":"all","selectors":{"drivers":["iavf"]}}`, "x: a0 a1 a2 a3 b0 b1 b2 b3 u0"},
	} {
		c := mustParse(t, `{"resourceList":[`+test.config+`]}`)
		if got := formatPools(Assign(c, workerMachine(), Env{})); got != test.want {
			t.Errorf("%s\n got %s\nwant %s", test.config, got, test.want)
		}
	}
}

// TestOneNode checks that on machines with at most one NUMA node, or without information about it, devices have no topology and
// unknownNuma has no effect.
func TestOneNode(t *testing.T) {
	for nodes := range 2 {
		s := workerMachine()
		s.Nodes = s.Nodes[:nodes]
		for _, unknown := range []string{"omit", "all", "exclude"} {
			c := mustParse(t, `{"resourceList":[{"resourceName":"x","unknownNuma":"`+unknown+`","selectors":{"pfNames":["ens1f0","ens5f0"]}},
				{"resourceName":"y","splitByNuma":true,"unknownNuma":"`+unknown+`","selectors":{"pfNames":["ib2f0"]}}]}`)
			pools := Assign(c, s, Env{})
			if got := formatPools(pools); got != "x: a0 a1 a2 a3 u0; y_numa0: m0 m1" {
				t.Errorf("%d, %s: %s", nodes, unknown, got)
			}
			for _, d := range pools[0].Devices {
				if d.Topology != nil {
					t.Errorf("%d, %s: %s is on %v", nodes, unknown, d.Address, d.Topology)
				}
			}
		}
	}
	s := workerMachine()
	s.Nodes = []pci.Node{{ID: 3}}
	if got := formatPools(Assign(mustParse(t, resource(`"splitByNuma":true,"selectors":{"pfNames":["ib2f0"]}`)), s,
		Env{})); got != "a_numa3: m0 m1" {
		t.Error(got)
	}
}

// TestSplitOrder checks that the pools of a resource are sorted by NUMA node.
func TestSplitOrder(t *testing.T) {
	s := workerMachine()
	for i := range s.Devices {
		s.Devices[i].NUMANode = map[int]int{0: 1, 1: pci.Unknown, pci.Unknown: 0}[s.Devices[i].NUMANode]
	}
	if got := formatPools(Assign(mustParse(t, resource(`"splitByNuma":true,"selectors":{"pfNames":["ens1f1","ib2f0","ens5f0"]}`)), s,
		Env{})); got != "a_numa0: u0; a_numa1: b0 b1 b2 b3; a_nonuma: m0 m1" {
		t.Error(got)
	}
}

// TestNodeOffline checks that a NUMA node that is not online counts as unknown, as it does for the kubelet.
func TestNodeOffline(t *testing.T) {
	s := workerMachine()
	for i := range s.Devices {
		if s.Devices[i].NUMANode == 1 {
			s.Devices[i].NUMANode = 7
		}
	}
	if got := formatPools(Assign(mustParse(t, resource(`"selectors":{"pfNames":["ens1f0","ib2f0"]}`)), s,
		Env{})); got != "a: a0 a1 a2 a3; a_nonuma: m0 m1" {
		t.Error(got)
	}
}

// TestDevice checks the attributes of the devices in the pools.
func TestDevice(t *testing.T) {
	c := mustParse(t, `{"resourceList":[
		{"resourceName":"x","unknownNuma":"all","selectors":[{"pfNames":["ib2f0"],"isRdma":true},
			{"pfNames":["ens1f0#0","ens5f0"],"needVhostNet":true}],
		 "additionalInfo":{"*":{"k":"all","l":"all"},"0000:10:01.0":{"k":"own"}}},
		{"resourceName":"y","excludeTopology":true,"unknownNuma":"all","selectors":{"pfNames":["ens1f0","ens5f0"]}},
		{"resourceName":"z","selectors":{"pfNames":["ens1f1#0"]}}]}`)
	got := map[string]string{}
	for _, p := range Assign(c, workerMachine(), Env{}) {
		for _, d := range p.Devices {
			got[shortNames()[d.Address.String()]] = fmt.Sprint(d.Topology, d.RDMA, d.VhostNet, d.Info)
		}
	}
	if diff := cmp.Diff(map[string]string{
		"m0": "[1] true false map[k:all l:all]", "m1": "[1] true false map[k:all l:all]", "a0": "[0] false true map[k:own l:all]",
		"u0": "[0 1] false true map[k:all l:all]",
		"a1": "[] false false map[]", "a2": "[] false false map[]", "a3": "[] false false map[]", "b0": "[0] false false map[]",
	}, got); diff != "" {
		t.Error(diff)
	}
}

// TestBusy checks that no pool contains a device that the node itself uses.
func TestBusy(t *testing.T) {
	all := `"resourceList":[{"resourceName":"x","unknownNuma":"all","selectors":[{"pciAddresses":["0000:40:00.0"]},{}]}]`
	vfs := "a0 a1 a2 a3 b0 b1 b2 b3 m0 m1"
	for _, test := range []struct {
		config string
		env    Env
		want   string
	}{
		{`{` + all + `}`, Env{DefaultRoute: []string{"eno0", "ens1f0", "br0"}}, vfs + " u0"}, // its VFs stay
		{`{` + all + `}`, Env{DefaultRoute: []string{"eno9"}}, vfs + " n u0"},
		{`{` + all + `,"pfs":[{"pfName":"ens3f0","numVfs":4}]}`, Env{}, vfs + " n u0"}, // it will have VFs
		{`{` + all + `,"pfs":[{"pciAddress":"0000:30:00.0","numVfs":4}]}`, Env{}, vfs + " n u0"},
		{`{` + all + `,"pfs":[{"pfName":"ens3f0","numVfs":0}]}`, Env{}, vfs + " n u0"},
		{`{` + all + `,"pfs":[{"pfName":"ens3f0","numVfs":0,"offerPf":true}]}`, Env{}, vfs + " p n u0"},
		{`{` + all + `,"pfs":[{"pfName":"ens3f0","numVfs":0,"offerPf":true}]}`, Env{DefaultRoute: []string{"ens3f0"}}, vfs + " n u0"},
		{`{` + all + `,"pfs":[{"pciAddress":"0000:30:00.0","numVfs":4},{"pfName":"ens3f0","numVfs":0,"offerPf":true}]}`, Env{}, vfs + " n u0"},
		{`{` + all + `,"pfs":[{"pfName":"ens1f0","numVfs":0,"offerPf":true}]}`, Env{}, vfs + " n u0"}, // it has VFs
		{`{` + all + `}`, Env{InUse: map[string]string{"eno0": "has a route", "ens1f0": "has a route"}}, vfs + " u0"},
	} {
		if got := formatPools(Assign(mustParse(t, test.config), workerMachine(), test.env)); got != "x: "+test.want {
			t.Errorf("%s, %v\n got %s\nwant x: %s", test.config, test.env.DefaultRoute, got, test.want)
		}
	}
	s := workerMachine()
	for i := range s.Devices {
		if s.Devices[i].IsVF() && s.Devices[i].VFIndex == 0 {
			s.Devices[i].Interfaces = []string{"vf"}
		}
	}
	if got := formatPools(Assign(mustParse(t, `{`+all+`}`), s, Env{DefaultRoute: []string{"vf"}})); got != "x: a1 a2 a3 b1 b2 b3 m1 n" {
		t.Error(got)
	}
}

// TestInterfaceInPod checks that a VF or PF stays in its resource while its interface is in a pod, or it is passed through to a virtual
// machine.
func TestInterfaceInPod(t *testing.T) {
	s := workerMachine()
	c := mustParse(t, `{"resourceList":[{"resourceName":"x","selectors":{"pfNames":["ens1f0","ens3f0"],"linkTypes":["ether"]}},{"resourceName":"y","selectors":{"isRdma":true}}],
		"pfs":[{"pfName":"ens3f0","numVfs":0,"offerPf":true}]}`)
	before, last := formatPools(Assign(c, s, Env{})), map[pci.Address]pci.Device{}
	if before != "x: a0 a1 a2 a3 p; y: m0 m1" {
		t.Fatal(before)
	}
	for i := range s.Devices {
		d := &s.Devices[i]
		switch last[d.Address] = *d; shortNames()[d.Address.String()] {
		case "p", "m0":
			d.Interfaces, d.LinkType, d.RDMA = nil, "", nil
		case "m1": // bound to another driver while the interface was in the pod
			d.Driver, d.RDMA = "vfio-pci", nil
		}
	}
	if got := formatPools(Assign(c, s, Env{Last: last})); got != "x: a0 a1 a2 a3 p; y: m0" {
		t.Error(got)
	}
	if got := formatPools(Assign(c, s, Env{})); got != "x: a0 a1 a2 a3; y:" {
		t.Error(got)
	}
}

// TestWithoutPF checks that rootDevices matches a VF by the address of its PF, even if the scan does not contain the PF.
func TestWithoutPF(t *testing.T) {
	s := workerMachine()
	s.Devices = s.Devices[1:]
	c := mustParse(t, `{"resourceList":[{"resourceName":"x","selectors":{"pfNames":["ens1f0"]}},{"resourceName":"y","selectors":{"rootDevices":["0000:10:00.0#1"]}}]}`)
	if got := formatPools(Assign(c, s, Env{})); got != "x:; y: a1" {
		t.Error(got)
	}
}

// TestNumVFs checks that the first entry of pfs that matches a PF, by name or address, applies.
func TestNumVFs(t *testing.T) {
	c := mustParse(t, `{"resourceList":[],"pfs":[{"pfName":"ens1f0","numVfs":4},{"pciAddress":"0000:10:00.0","numVfs":5},{"pciAddress":"0000:20:00.0","numVfs":0},
		{"pfName":"none","numVfs":1},{"pciAddress":"0000:10:01.0","numVfs":1}]}`)
	want := map[pci.Address]int{pciAddr(0x10, 0, 0): 4, pciAddr(0x20, 0, 0): 0}
	if got := c.NumVFs(workerMachine()); !reflect.DeepEqual(got, want) {
		t.Errorf("got %v", got)
	}
}

// TestAssignIsPure checks that Assign does not change the snapshot or the configuration, and returns the same result for the same input.
func TestAssignIsPure(t *testing.T) {
	c, s := mustParse(t, resource(`"additionalInfo":{"*":{"k":"v"}},"splitByNuma":true`)), workerMachine()
	env := Env{DefaultRoute: []string{"eno0"}, Last: map[pci.Address]pci.Device{s.Devices[0].Address: s.Devices[0]}}
	first := Assign(c, s, env)
	Explain(c, s, env)
	Findings(c, s, env)
	if again := Assign(c, s, env); !reflect.DeepEqual(first, again) || !reflect.DeepEqual(s, workerMachine()) {
		t.Error("another answer")
	}
}

// TestPFIsNoDevice checks that no pool contains a device that may be a PF, even if sysfs reports a wrong number of VFs.
func TestPFIsNoDevice(t *testing.T) {
	c := mustParse(t, `{"resourceList":[{"resourceName":"x","driver":"vfio-pci","selectors":[{"pfNames":["ens3f0"]},{"pciAddresses":["0000:30:00.0"]},{"drivers":["vfio-pci"]}]}],
		"pfs":[{"pfName":"ens1f0","numVfs":0,"offerPf":true}]}`)
	for name, change := range map[string]func(p *pci.Device){
		"before its VFs exist":     func(*pci.Device) {},
		"VFs that are not counted": func(p *pci.Device) { p.TotalVFs, p.NumVFs = 0, 2 },
		"bound to another driver":  func(p *pci.Device) { p.Driver, p.Interfaces = "vfio-pci", nil },
		"not readable":             func(p *pci.Device) { p.TotalVFs, p.Unreadable = 0, "sriov_totalvfs: I/O error" },
	} {
		s := workerMachine()
		i := slices.IndexFunc(s.Devices, func(d pci.Device) bool { return shortNames()[d.Address.String()] == "p" })
		change(&s.Devices[i])
		last := map[pci.Address]pci.Device{s.Devices[i].Address: workerMachine().Devices[i]}
		if got := formatPools(Assign(c, s, Env{Last: last})); got != "x: u0" {
			t.Errorf("%s: %s", name, got)
		}
	}
}

// TestHeldDevice: a pod's device stays in its resource when the pod changes what the selectors compare: its driver, or the RDMA device,
// which moves into the pod. It leaves the resource if the configuration no longer has it there.
func TestHeldDevice(t *testing.T) {
	const config = `{"resourceList":[{"resourceName":"user","selectors":{"drivers":["vfio-pci"]}},
		{"resourceName":"net","splitByNuma":true,"selectors":{"pciAddresses":["%s"],"drivers":["iavf"],"isRdma":true}}]}`
	s := workerMachine()
	i := slices.IndexFunc(s.Devices, func(d pci.Device) bool { return d.IsVF() && d.NUMANode == 0 })
	d := &s.Devices[i]
	poolOf := func(address string, held map[pci.Address]string) string {
		for _, p := range Assign(mustParse(t, fmt.Sprintf(config, address)), s, Env{Held: held}) {
			if slices.ContainsFunc(p.Devices, func(o Device) bool { return o.Address == d.Address }) {
				return p.Name
			}
		}
		return ""
	}
	own := d.Address.String()
	d.Driver, d.RDMA = "vfio-pci", nil
	for _, c := range []struct {
		holder, address, want string
	}{
		{"intel.com/net_numa0", own, "intel.com/net_numa0"},
		{"intel.com/net_numa0", "0000:99:00.0", "intel.com/user"},
		{"intel.com/user", own, "intel.com/user"},
		{"other", own, "intel.com/user"},
		{"a claim", own, "intel.com/user"},
	} {
		if got := poolOf(c.address, map[pci.Address]string{d.Address: c.holder}); got != c.want {
			t.Errorf("%+v: %q", c, got)
		}
	}
	if got := poolOf(own, nil); got != "intel.com/user" {
		t.Errorf("held by no pod: %q", got)
	}
}
