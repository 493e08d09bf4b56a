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
	n, err := f.look(ctx)
	if err != nil {
		return err
	}
	if n.unread != nil {
		return n.unread
	}
	for _, p := range slices.Concat(n.config.Unserved(), pool.Findings(n.config, n.snapshot, n.env)) {
		tell(stderr, p.Error())
	}
	if f.count > 0 {
		return f.possible(n, stdout, what)
	}
	list := pool.Explain(n.config, n.snapshot, n.env)
	for i, e := range list {
		if h := n.kept(e.Device, e.Resource); h != nil {
			list[i].Resource, list[i].Reason = "", fmt.Sprintf("not offered: %s, as %s", n.has(*h), h.Resource)
		}
	}
	whole := slices.DeleteFunc(slices.Clone(list), func(e pool.Explanation) bool { return what != "" && !n.means(e, what) })
	switch {
	case len(whole) == 0 && n.held[strings.ToLower(what)].ID != "":
		h := n.held[strings.ToLower(what)]
		return fmt.Errorf("%s is gone; %s, as %s", plain(what), strings.TrimSuffix(n.has(h), "has it")+"had it", plain(h.Resource))
	case len(whole) == 0 && n.unserved(what):
		return fmt.Errorf("%s is not served, and no device of this node is one of it", plain(what))
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
		n.tellAll(stdout, e)
	}
	return nil
}

// unserved reports whether the configuration has a resource that is not supported.
func (n *sriovNode) unserved(resource string) bool {
	return slices.ContainsFunc(n.config.Resources, func(r pool.Resource) bool { return r.FullName() == resource && len(r.Unserved) > 0 })
}

// means reports whether a word on the command line is a device: its address, its interface, that of its PF, or its resource.
func (n *sriovNode) means(e pool.Explanation, what string) bool {
	d, _ := n.snapshot.Device(e.Device)
	pf, _ := n.snapshot.Device(d.PF)
	return strings.EqualFold(e.Device.String(), what) || slices.Contains(d.Interfaces, what) || slices.Contains(pf.Interfaces, what) ||
		e.Resource == what || slices.ContainsFunc(e.Answers, func(a pool.Answer) bool { return a.Matches && a.Resource == what })
}

// tellAll tells what each selector wants and what was found.
func (n *sriovNode) tellAll(w io.Writer, e pool.Explanation) {
	fmt.Fprintf(w, "%s: %s\n", e.Device, plainText(e.Reason))
	if h, ok := n.held[e.Device.String()]; ok && h.Claim == nil {
		fmt.Fprintf(w, "  pod %s/%s has it, container %s, as %s\n", plain(h.Namespace), plain(h.Pod), plain(h.Container), plain(h.Resource))
	}
	for _, c := range n.claimsOf(e.Device) {
		fmt.Fprintln(w, "  "+c.sentence())
	}
	n.tellPublished(w, e)
	if fault := n.faults[e.Device.String()]; fault != "" {
		fmt.Fprintf(w, "  no pod gets it at present: %s\n", plainText(fault))
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

// possible reports whether a container could have so many devices of a resource.
func (f *sriovFlags) possible(n *sriovNode, stdout io.Writer, resource string) error {
	i := slices.IndexFunc(n.pools, func(p pool.Pool) bool { return p.Name == resource })
	if i < 0 {
		var names []string
		for _, p := range n.pools {
			names = append(names, p.Name)
		}
		return fmt.Errorf("--count wants a resource of this node, one of %s", strings.Join(names, ", "))
	}
	if n.asked != nil {
		return fmt.Errorf("it is not known which devices are free: %w", n.asked)
	}
	nodes := map[int]*tally{}
	var told []wished
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
		told = append(told, wished{d.Topology, free})
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
		return exitError(exitMissed)
	}
	return nil
}

// tabulate prints how many devices are near each NUMA node, and what that means.
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

// wished is a device as the kubelet was told of it: the NUMA nodes that it is near to, none if that must not count, and whether nobody has
// it.
type wished struct {
	nodes []int
	free  bool
}

// admission says what the policies of the Topology Manager make of a wish, as far as the devices decide. It prefers as few nodes as could
// hold the wish if all devices were free (generateDeviceTopologyHints in pkg/kubelet/cm/devicemanager of Kubernetes 1.37); restricted
// refuses what takes more, and single-numa-node what takes more than one. Devices that are near no node count for no policy, if others are.
func admission(count int, devices []wished) (says string, possible bool) {
	total, most := 0, 0
	near := map[int]uint64{} // the bit of a node
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
	fewest, now := len(near)+1, len(near)+1 // nodes
	for mask := uint64(1); mask < 1<<min(len(near), maxNodes); mask++ {
		all, free := within(devices, near, mask)
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
		return "yes: the kubelet is not told of NUMA nodes, so no policy asks for them", true
	case now == 1:
		return fmt.Sprintf("yes, near one NUMA node: up to %d are free there", most), true
	case now > fewest || now > len(near):
		return fmt.Sprintf("yes under none and best-effort, from several NUMA nodes; no under restricted and single-numa-node: at most %d are free near one node", most), true
	}
	return fmt.Sprintf("yes under none, best-effort and restricted, from %d NUMA nodes: fewer could never have so many. No under single-numa-node.", now), true
}

// maxNodes is how many NUMA nodes are looked at in all combinations; the kubelet refuses to look at more than 8 by default.
const maxNodes = 16

// within counts the devices that are near one of the nodes in a mask.
func within(devices []wished, near map[int]uint64, mask uint64) (all, free int) {
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

// plainText is plain for what may be a sentence.
func plainText(s string) string { return strings.Map(plugin.PlainRune, s) }
