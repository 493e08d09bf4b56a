// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"context"
	"fmt"
	"io"
	"maps"
	mathbits "math/bits"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/podlace/podlace/pkg/pci"
	"github.com/podlace/podlace/pkg/plugin"
	"github.com/podlace/podlace/pkg/pool"
)

func (f *sriovFlags) explain(ctx context.Context, stdout, stderr io.Writer, what string) error {
	n, err := f.readNode(ctx)
	if err != nil {
		return err
	}
	if n.configErr != nil {
		return n.configErr
	}
	for _, p := range slices.Concat(n.config.Unserved(), pool.Findings(n.config, n.snapshot, n.env)) {
		printLine(stderr, p.Error())
	}
	if f.count > 0 {
		return f.explainCount(n, stdout, what)
	}
	list := pool.Explain(n.config, n.snapshot, n.env)
	for i, e := range list {
		if h := n.otherOwner(e.Device, e.Resource); h != nil {
			list[i].Resource, list[i].Reason = "", fmt.Sprintf("not offered: %s, as %s", n.describeOwner(*h), h.Resource)
		}
	}
	whole := slices.DeleteFunc(slices.Clone(list), func(e pool.Explanation) bool { return what != "" && !n.matches(e, what) })
	switch {
	case len(whole) == 0 && n.held[strings.ToLower(what)].ID != "":
		h := n.held[strings.ToLower(what)]
		return fmt.Errorf("%s is gone; %s, as %s", plain(what), strings.TrimSuffix(n.describeOwner(h), "has it")+"had it", plain(h.Resource))
	case len(whole) == 0 && n.unserved(what):
		return fmt.Errorf("%s is not served, and this node has no device of it", plain(what))
	case len(whole) == 0 && what != "":
		return fmt.Errorf("%s is no device, interface or resource of this node: 'podlace sriov ls' lists them", plain(what))
	case f.output == outputJSON:
		return printJSON(stdout, whole)
	case what == "":
		t := tabwriter.NewWriter(stdout, 0, 0, 2, ' ', 0)
		for _, e := range whole {
			fmt.Fprintf(t, "%s\t%s\t%s\n", e.Device, dash(plain(e.Resource)), plainText(e.Reason))
		}
		return t.Flush()
	}
	for _, e := range whole {
		n.printExplanation(stdout, e)
	}
	return nil
}

// unserved reports whether a resource of the configuration is not supported.
func (n *sriovNode) unserved(resource string) bool {
	return slices.ContainsFunc(n.config.Resources, func(r pool.Resource) bool { return r.FullName() == resource && len(r.Unserved) > 0 })
}

// matches reports whether the argument names a device: by its address, its interface, the interface of its PF, or its resource.
func (n *sriovNode) matches(e pool.Explanation, what string) bool {
	d, _ := n.snapshot.Device(e.Device)
	pf, _ := n.snapshot.Device(d.PF)
	return strings.EqualFold(e.Device.String(), what) || slices.Contains(d.Interfaces, what) || slices.Contains(pf.Interfaces, what) ||
		e.Resource == what || slices.ContainsFunc(e.Answers, func(a pool.Answer) bool { return a.Matches && a.Resource == what })
}

// printExplanation prints what each selector wants and what was found.
func (n *sriovNode) printExplanation(w io.Writer, e pool.Explanation) {
	fmt.Fprintf(w, "%s: %s\n", e.Device, plainText(e.Reason))
	if h, ok := n.held[e.Device.String()]; ok && h.Claim == nil {
		fmt.Fprintf(w, "  pod %s/%s has it, container %s, as %s\n", plain(h.Namespace), plain(h.Pod), plain(h.Container), plain(h.Resource))
	}
	for _, c := range n.claimsOf(e.Device) {
		fmt.Fprintln(w, "  "+c.describe())
	}
	n.printPublished(w, e)
	if fault := n.faults[e.Device.String()]; fault != "" {
		fmt.Fprintf(w, "  it cannot be allocated at present: %s\n", plainText(fault))
	}
	for _, a := range e.Answers {
		fmt.Fprintf(w, "  %s (line %d): %s\n", plain(a.Resource), a.Line, plainText(a.Reason))
		for _, s := range a.Selectors {
			t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
			for _, c := range s.Checks {
				fmt.Fprintf(t, "    %s\t%s\twants %s\tfound %s\n", map[bool]string{true: "yes", false: "NO"}[c.Met], c.Name, plainText(c.Want),
					dash(plainText(c.Found)))
			}
			t.Flush()
		}
	}
}

// explainCount prints whether a container could get --count devices of a resource.
func (f *sriovFlags) explainCount(n *sriovNode, stdout io.Writer, resource string) error {
	i := slices.IndexFunc(n.pools, func(p pool.Pool) bool { return p.Name == resource })
	if i < 0 {
		var names []string
		for _, p := range n.pools {
			names = append(names, p.Name)
		}
		return fmt.Errorf("--count needs a resource of this node, one of %s", strings.Join(names, ", "))
	}
	if n.pluginErr != nil {
		return fmt.Errorf("the device plugin did not say which devices are free: %w", n.pluginErr)
	}
	nodes := map[int]*tally{}
	var told []requestedDevice
	for _, d := range n.pools[i].Devices {
		at := nodes[d.NUMANode]
		if at == nil {
			at = new(tally)
			nodes[d.NUMANode] = at
		}
		at.All++
		_, held := n.held[d.Address.String()]
		free := false
		switch {
		case n.faults[d.Address.String()] != "":
			at.Faulty++
		case !held:
			free = true
			at.Free++
		}
		told = append(told, requestedDevice{d.Topology, free})
	}
	says, possible := admission(f.count, told)
	if f.output == outputJSON {
		if err := printJSON(stdout, map[string]any{"nodes": nodes, "possible": possible, "says": says}); err != nil {
			return err
		}
	} else if err := tabulate(stdout, nodes, says); err != nil {
		return err
	}
	if !possible {
		return exitError(exitDiffers)
	}
	return nil
}

// tabulate prints the number of devices near each NUMA node, and the answer.
func tabulate(stdout io.Writer, nodes map[int]*tally, says string) error {
	t := tabwriter.NewWriter(stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "NUMA\tDEVICES\tFREE\tFAULTY")
	for _, node := range slices.Sorted(maps.Keys(nodes)) {
		name := strconv.Itoa(node)
		if node == pci.Unknown {
			name = "-"
		}
		fmt.Fprintf(t, "%s\t%d\t%d\t%d\n", name, nodes[node].All, nodes[node].Free, nodes[node].Faulty)
	}
	fmt.Fprintln(t, says)
	return t.Flush()
}

// tally counts the devices near a NUMA node.
type tally struct {
	All    int `json:"devices"`
	Free   int `json:"free"`
	Faulty int `json:"faulty"`
}

// requestedDevice is a device as the kubelet knows it: its NUMA nodes (none if they do not count), and whether it is free.
type requestedDevice struct {
	nodes []int
	free  bool
}

// admission returns what each policy of the Topology Manager decides about a request, as far as it depends on the devices. The kubelet
// prefers the fewest nodes that could hold the request if all devices were free (generateDeviceTopologyHints in
// pkg/kubelet/cm/devicemanager of Kubernetes 1.37). restricted refuses more nodes than that, single-numa-node more than one. Devices
// without a NUMA node do not count if other devices have one.
func admission(count int, devices []requestedDevice) (says string, possible bool) {
	total, most := 0, 0
	near := map[int]uint64{} // the bit of each node in a mask
	for _, d := range devices {
		if d.free {
			total++
		}
		for _, node := range d.nodes {
			if _, ok := near[node]; !ok {
				near[node] = 1 << len(near)
			}
		}
	}
	fewest, now := len(near)+1, len(near)+1 // number of nodes
	for mask := uint64(1); mask < 1<<min(len(near), maxNodes); mask++ {
		all, free := countNear(devices, near, mask)
		n := mathbits.OnesCount64(mask)
		if n == 1 {
			most = max(most, free)
		}
		if all >= count {
			fewest = min(fewest, n)
		}
		if free >= count {
			now = min(now, n)
		}
	}
	switch {
	case total < count:
		return fmt.Sprintf("no: %d are free, under every policy", total), false
	case len(near) == 0:
		return "yes: the kubelet knows no NUMA nodes of these devices, so no policy refuses them", true
	case now == 1:
		return fmt.Sprintf("yes, near one NUMA node: up to %d are free there", most), true
	case now > fewest || now > len(near):
		return fmt.Sprintf("yes under none and best-effort, from several NUMA nodes; no under restricted and single-numa-node: at most %d are free near one node", most), true
	}
	return fmt.Sprintf("yes under none, best-effort and restricted, from %d NUMA nodes: fewer do not have as many. No under single-numa-node.", now), true
}

// maxNodes limits the NUMA nodes of which all combinations are examined. The kubelet's default limit is 8.
const maxNodes = 16

// countNear counts the devices near the nodes of a mask.
func countNear(devices []requestedDevice, near map[int]uint64, mask uint64) (all, free int) {
	for _, d := range devices {
		if slices.ContainsFunc(d.nodes, func(node int) bool { return near[node]&mask != 0 }) {
			all++
			if d.free {
				free++
			}
		}
	}
	return all, free
}

// plainText is plain for a text of several words.
func plainText(s string) string { return strings.Map(plugin.PlainRune, s) }
