// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/podlace/podlace/pkg/cli/kubelet"
	"github.com/podlace/podlace/pkg/poddevices"
)

// fakeDemand builds a demand from the numbers of all and of free devices near each NUMA node.
func fakeDemand(name string, count int, all, free []int) demand {
	var near []int
	for node := range all {
		for range all[node] {
			near = append(near, node)
		}
	}
	machine := kubelet.Mask(1)<<len(all) - 1
	left := append([]int{}, free...)
	return demand{name, count, newDevices(machine, len(near), func(i int) ([]int, bool, bool) {
		left[near[i]]--
		return near[i : i+1], left[near[i]] < 0, true
	})}
}

// decisions formats the decision of each policy, one per line.
func decisions(t *testing.T, machine kubelet.Mask, demands ...demand) string {
	t.Helper()
	a, err := newRequestAnswer(machine, demands, policies())
	if err != nil {
		t.Fatal(err)
	}
	var lines []string
	for _, p := range a.Policies {
		lines = append(lines, fmt.Sprintf("%s %s: %s", p.Policy, p.Merged, p.decisionText()))
	}
	return strings.Join(lines, "\n")
}

func TestRequestOfDevices(t *testing.T) {
	for _, c := range []struct {
		name      string
		count     int
		all, free []int
		want      string
	}{
		{"one node is enough", 2, []int{4, 4}, []int{1, 3},
			"none any: yes\nbest-effort {1}*: yes\nrestricted {1}*: yes\nsingle-numa-node {1}*: yes"},
		{"spread at present", 2, []int{2, 2}, []int{1, 1},
			"none any: yes\nbest-effort {0,1}: yes\n" +
				"restricted {0,1}: no, not at present: 2 vf need more NUMA nodes than if all were free\n" +
				"single-numa-node any: no, not at present: no NUMA node has 2 free vf"},
		{"more than a node has", 3, []int{2, 2}, []int{2, 1},
			"none any: yes\nbest-effort {0,1}*: yes\nrestricted {0,1}*: yes\n" +
				"single-numa-node any: no, never on a node like this: no NUMA node has 3 vf"},
		{"more than all nodes have", 5, []int{2, 2}, []int{2, 2},
			"none any: no, never on a node like this: 4 of 5 vf are free\n" +
				"best-effort {0,1}: no, never on a node like this: 4 of 5 vf are free\n" +
				"restricted {0,1}: no, never on a node like this: 4 of 5 vf are free\n" +
				"single-numa-node any: no, never on a node like this: 4 of 5 vf are free"},
		{"two nodes could have six", 6, []int{4, 4, 4, 4}, []int{2, 2, 2, 2},
			"none any: yes\nbest-effort {0,1,2}: yes\n" +
				"restricted {0,1,2}: no, not at present: 6 vf need more NUMA nodes than if all were free\n" +
				"single-numa-node any: no, never on a node like this: no NUMA node has 6 vf"},
	} {
		t.Run(c.name, func(t *testing.T) {
			machine := kubelet.Mask(1)<<len(c.all) - 1
			if diff := cmp.Diff(c.want, decisions(t, machine, fakeDemand("vf", c.count, c.all, c.free))); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// TestRequestOfSeveral requests several resources whose free devices are on different NUMA nodes. In some cases, an idle machine could
// serve the request from one.
func TestRequestOfSeveral(t *testing.T) {
	for _, c := range []struct {
		name    string
		demands []demand
		want    string
	}{
		{"the node that has both", []demand{fakeDemand("vf", 1, []int{4, 4}, []int{4, 4}), fakeDemand("cpu", 4, []int{8, 8}, []int{2, 8})},
			"none any: yes\nbest-effort {1}*: yes\nrestricted {1}*: yes\nsingle-numa-node {1}*: yes"},
		{"free on different nodes", []demand{fakeDemand("vf", 1, []int{4, 4}, []int{1, 0}), fakeDemand("cpu", 4, []int{8, 8}, []int{2, 8})},
			"none any: yes\nbest-effort {0}: yes\n" +
				"restricted {0}: no, not at present: the preferred NUMA nodes differ: vf {0}*, cpu {1}*\n" +
				"single-numa-node any: no, not at present: the preferred NUMA nodes differ: vf {0}*, cpu {1}*"},
		{"cards on different nodes", []demand{fakeDemand("vf", 1, []int{4, 0}, []int{4, 0}), fakeDemand("gpu", 1, []int{0, 1}, []int{0, 1})},
			"none any: yes\nbest-effort {0,1}: yes\n" +
				"restricted {0,1}: no, never on a node like this: the preferred NUMA nodes differ: vf {0}*, gpu {1}*\n" +
				"single-numa-node any: no, never on a node like this: the preferred NUMA nodes differ: vf {0}*, gpu {1}*"},
		{"CPUs of two nodes, one VF", []demand{fakeDemand("vf", 1, []int{4, 4}, []int{4, 4}), fakeDemand("cpu", 9, []int{8, 8}, []int{8, 8})},
			"none any: yes\nbest-effort {0,1}: yes\n" +
				"restricted {0,1}: no, never on a node like this: the preferred NUMA nodes differ: vf {0}* {1}*, cpu {0,1}*\n" +
				"single-numa-node any: no, never on a node like this: no NUMA node has 9 cpu"},
	} {
		t.Run(c.name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, decisions(t, 3, c.demands...)); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// TestRequestOfReserved: the preferred number of NUMA nodes is computed as if a CPU that the kubelet reserves were available.
func TestRequestOfReserved(t *testing.T) {
	d := fakeDemand("cpu", 8, []int{8, 8}, []int{8, 8})
	d.Healthy[0], d.Healthy[8] = false, false
	const want = "none any: yes\nbest-effort {0,1}: yes\n" +
		"restricted {0,1}: no, never on a node like this: 8 cpu need more NUMA nodes than if all were free\n" +
		"single-numa-node any: no, never on a node like this: no NUMA node has 8 cpu"
	if diff := cmp.Diff(want, decisions(t, 3, d)); diff != "" {
		t.Error(diff)
	}
}

// TestRequestWithoutNodes checks devices whose NUMA nodes the kubelet does not know.
func TestRequestWithoutNodes(t *testing.T) {
	nowhere := demand{"vf", 2, newDevices(1, 2, func(int) ([]int, bool, bool) { return nil, false, true })}
	if got := decisions(t, 1, nowhere); strings.Count(got, ": yes") != 4 {
		t.Errorf("got\n%s", got)
	}
	a, err := newRequestAnswer(1, []demand{nowhere}, policies())
	var out strings.Builder
	if a.print(&out); err != nil || !strings.Contains(out.String(), "FREE AT NO NODE") ||
		!strings.Contains(out.String(), "2 of 2           any") {
		t.Errorf("%v\n%s", err, &out)
	}
	// Devices without a NUMA node are ignored if other devices of the resource have one.
	mixed := demand{"vf", 2, newDevices(3, 3, func(i int) ([]int, bool, bool) { return [][]int{{0}, nil, nil}[i], i == 0, true })}
	if got := decisions(t, 3, mixed); !strings.Contains(got, "restricted {0,1}: no, never") ||
		!strings.Contains(got, "best-effort {0,1}: yes") {
		t.Errorf("got\n%s", got)
	}
}

// TestRequestTooLarge: too many combinations of hints are an error, because the command would run for hours.
func TestRequestTooLarge(t *testing.T) {
	eight := []int{2, 2, 2, 2, 2, 2, 2, 2}
	var demands []demand
	for i := range 4 {
		demands = append(demands, fakeDemand(fmt.Sprint(i), 1, eight, eight))
	}
	if _, err := newRequestAnswer(255, demands, policies()); err == nil || !strings.Contains(err.Error(), "combinations of hints") {
		t.Errorf("%v", err)
	}
}

// assignable returns what the kubelet of the lab can assign: all CPUs of the two NUMA nodes except CPU 0, of which a pod has three, and one
// GPU near each node, of which a pod has the first.
func assignable() (n poddevices.Node) {
	for cpu := range int64(31) {
		n.CPUs = append(n.CPUs, cpu+1)
	}
	n.TakenCPUs = []int64{1, 2, 3}
	n.Devices = []poddevices.Assignable{{Resource: "example.com/gpu", ID: "g0", NUMA: []int{0}, Taken: true},
		{Resource: "example.com/gpu", ID: "g1", NUMA: []int{1}}}
	return n
}

// TestSRIOVRequest requests VFs, CPUs and another device plugin's resource, with a fake sysfs and device plugin.
func TestSRIOVRequest(t *testing.T) {
	flags := labFlags(t, assignable())
	if err := os.WriteFile(flags[1], []byte(`{"resourceList": [{"resourceName": "new", "selectors": {"pfNames": ["ens0f0", "ens1f0"]}}]}`),
		0o600); err != nil {
		t.Fatal(err)
	}
	flags = append(flags, "--count", "1")
	status, stdout, stderr := runSRIOV(t, flags, "explain", "--cpus", "4", "--with", "example.com/gpu")
	const want = `RESOURCE         COUNT  FREE AT NODE 0       FREE AT NODE 1  HINTS
example.com/new  1      0 of 1, 1 faulty     1 of 1          {1}* {0,1}
cpu              4      12 of 16, 1 reserved  16 of 16        {0}* {1}* {0,1}
example.com/gpu  1      0 of 1                1 of 1          {1}* {0,1}

POLICY            MERGED  ADMITTED
none              any     yes
best-effort       {1}*    yes
restricted        {1}*    yes
single-numa-node  {1}*    yes
`
	if diff := cmp.Diff(strings.Fields(want), strings.Fields(stdout)); diff != "" || status != exitOK {
		t.Errorf("status %d, %s\n%s\n%s", status, stderr, diff, stdout)
	}
	status, stdout, _ = runSRIOV(t, flags, "explain", "--cpus", "20", "--policy", "restricted")
	if status != exitDiffers || !strings.Contains(stdout,
		"no, never on a node like this: the preferred NUMA nodes differ: example.com/new {0}* {1}*, cpu {0,1}*") ||
		strings.Contains(stdout, "best") {
		t.Errorf("status %d\n%s", status, stdout)
	}
	// a reserved CPU is never free
	if _, stdout, _ = runSRIOV(t, flags, "explain", "--cpus", "32"); !strings.Contains(stdout,
		"no, never on a node like this: 31 of 32 cpu are free") {
		t.Errorf("got\n%s", stdout)
	}
	for says, args := range map[string][]string{
		"--cpus 0: want at least 1":                  {"--cpus", "0"},
		`"--policy" flag: want none, best-effort`:    {"--policy", "strict"},
		`--with "gpu": want a resource such as`:      {"--with", "gpu"},
		`--with "example.com/gpu=0": want`:           {"--with", "example.com/gpu=0"},
		"the request has this resource already":      {"--with", "example.com/new"},
		"neither the configuration nor the kubelet":  {"--with", "example.com/fpga"},
		"cpuManagerPolicy is not static: omit --cpu": {"--cpus", "1", "--socket", labFlags(t, poddevices.Node{})[7]},
		"the kubelet did not say which cpu it can assign: the SR-IOV device plugin answers: the kubelet is away": {"--cpus", "1",
			"--socket", labFlags(t)[7]},
	} {
		all := slices.Concat([]string{"sriov", "explain"}, flags, args)
		if status, stdout, stderr := run(all...); status != exitFailed || stdout != "" || !strings.Contains(stderr, says) {
			t.Errorf("%q: status %d, %s\n%s", args, status, stderr, stdout)
		}
	}
	if status, _, stderr := run("sriov", "explain", "--cpus", "1"); status != exitFailed || !strings.Contains(stderr, "--count is missing") {
		t.Errorf("status %d, %s", status, stderr)
	}
}
