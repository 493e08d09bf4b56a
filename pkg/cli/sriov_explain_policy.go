// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"
	"text/tabwriter"

	"github.com/podlace/podlace/pkg/cli/kubelet"
	"github.com/podlace/podlace/pkg/pci"
)

// requestAnswer describes the resources of a request, and the decision of each Topology Manager policy about the request.
type requestAnswer struct {
	Resources []resourceAnswer `json:"resources"`
	Policies  []policyAnswer   `json:"policies"`
}

// resourceAnswer describes one resource of a request: the devices of the resource by NUMA node, and the topology hints for the resource.
type resourceAnswer struct {
	Resource string        `json:"resource"`
	Count    int           `json:"count"`
	Nodes    map[int]tally `json:"nodes"` // pci.Unknown: devices without a NUMA node
	Hints    []hintAnswer  `json:"hints"` // null if the resource has no NUMA nodes
}

// A tally counts the devices near a NUMA node: all devices, the free devices and the faulty devices.
type tally struct {
	All    int `json:"devices"`
	Free   int `json:"free"`
	Faulty int `json:"faulty"`
}

// hintAnswer is a topology hint: a set of NUMA nodes that together can serve the request.
type hintAnswer struct {
	Nodes     []int `json:"nodes"`
	Preferred bool  `json:"preferred"`
}

// policyAnswer is the decision of one Topology Manager policy about a request.
type policyAnswer struct {
	Policy   string     `json:"policy"`
	Admitted bool       `json:"admitted"`
	Merged   hintAnswer `json:"merged"`           // without nodes: any
	Never    bool       `json:"never,omitempty"`  // the policy refuses the request on an idle node too
	Reason   string     `json:"reason,omitempty"` // of a refusal
}

// maxPermutations limits how many combinations of topology hints are tried. A combination contains one hint of each resource. The kubelet
// tries all combinations for each container.
const maxPermutations = 20_000_000

// newRequestAnswer merges the topology hints for a request, once with each policy.
func newRequestAnswer(machine kubelet.Mask, demands []demand, wanted []kubelet.Policy) (a requestAnswer, err error) {
	now, idle := hintLists(demands, demand.present), hintLists(demands, demand.empty)
	permutations := 1
	for i := range demands {
		if permutations *= max(len(now[i]), len(idle[i]), 1); permutations > maxPermutations {
			return a, fmt.Errorf("the request has more than %d combinations of hints: ask for fewer resources at once", maxPermutations)
		}
	}
	for i, d := range demands {
		a.Resources = append(a.Resources, d.answer(now[i]))
	}
	for _, p := range wanted {
		a.Policies = append(a.Policies, decide(p, machine, demands, now, idle))
	}
	return a, nil
}

func hintLists(demands []demand, of func(demand) *kubelet.Devices) [][]kubelet.Hint {
	lists := make([][]kubelet.Hint, len(demands))
	for i, d := range demands {
		lists[i] = of(d).Hints(d.count, nil)
	}
	return lists
}

// decide() computes the decision of one Topology Manager policy about a request. If the policy refuses the request, decide() also computes
// whether an idle node would refuse the request.
func decide(p kubelet.Policy, machine kubelet.Mask, demands []demand, now, idle [][]kubelet.Hint) policyAnswer {
	merged, admitted := kubelet.Merge(p, machine, now)
	a := policyAnswer{Policy: string(p), Merged: answerOf(merged)}
	if a.Reason = shortage(demands, demand.present); a.Reason == "" && admitted {
		a.Admitted = true
		return a
	}
	if a.Reason == "" {
		a.Reason = refusal(p, demands, now, " free")
	}
	why := shortage(demands, demand.empty)
	if _, admitted := kubelet.Merge(p, machine, idle); why == "" && !admitted {
		why = refusal(p, demands, idle, "")
	}
	if why != "" {
		a.Never, a.Reason = true, why
	}
	return a
}

// shortage() describes the first resource with fewer free devices than requested. shortage() returns "" if every resource has enough free
// devices.
func shortage(demands []demand, of func(demand) *kubelet.Devices) string {
	for _, d := range demands {
		if free := total(of(d)).Free; free < d.count {
			return fmt.Sprintf("%d of %d %s are free", free, d.count, plain(d.name))
		}
	}
	return ""
}

// refusal() returns the reason why the policy finds no preferred combination of topology hints. The argument `state` is a word that
// refusal() prints after the number of devices, for example " free".
func refusal(p kubelet.Policy, demands []demand, lists [][]kubelet.Hint, state string) string {
	var texts []string
	for i, d := range demands {
		usable := slices.DeleteFunc(slices.Clone(lists[i]), func(h kubelet.Hint) bool {
			return !h.Preferred || p == kubelet.SingleNUMA && h.Nodes.Count() > 1
		})
		switch {
		case lists[i] == nil:
			continue
		case len(usable) == 0 && p == kubelet.SingleNUMA:
			return fmt.Sprintf("no NUMA node has %d%s %s", d.count, state, plain(d.name))
		case len(usable) == 0:
			return fmt.Sprintf("%d %s need more NUMA nodes than if all were free", d.count, plain(d.name))
		}
		texts = append(texts, plain(d.name)+" "+hintText(usable))
	}
	return "the preferred NUMA nodes differ: " + strings.Join(texts, ", ")
}

// answer() returns the description of one requested resource, with its devices and topology hints.
func (d demand) answer(hints []kubelet.Hint) resourceAnswer {
	a := resourceAnswer{Resource: d.name, Count: d.count, Nodes: map[int]tally{}}
	for i, near := range d.now.Near {
		for _, node := range nodesOf(near) {
			t := a.Nodes[node]
			t.add(d.now, i)
			a.Nodes[node] = t
		}
	}
	if hints != nil {
		a.Hints = []hintAnswer{}
	}
	for _, h := range hints {
		a.Hints = append(a.Hints, answerOf(h))
	}
	return a
}

// nodesOf returns the NUMA nodes of a device. For a device without a NUMA node, nodesOf returns only pci.Unknown.
func nodesOf(near kubelet.Mask) []int {
	if near == 0 {
		return []int{pci.Unknown}
	}
	return near.Nodes()
}

func (t *tally) add(d *kubelet.Devices, i int) {
	t.All++
	switch {
	case !d.Healthy[i]:
		t.Faulty++
	case !d.Used[i]:
		t.Free++
	}
}

func total(d *kubelet.Devices) (t tally) {
	for i := range d.Near {
		t.add(d, i)
	}
	return t
}

func answerOf(h kubelet.Hint) hintAnswer {
	return hintAnswer{Nodes: h.Nodes.Nodes(), Preferred: h.Preferred}
}

// maxHints is the maximum number of hints that are printed on one line.
const maxHints = 8

// hintText formats topology hints, for example as {0}* {0,1}. The preferred hints have a star and are printed first.
func hintText(hints []kubelet.Hint) string {
	var texts []string
	for _, preferred := range []bool{true, false} {
		for _, h := range hints {
			if h.Preferred == preferred {
				texts = append(texts, answerOf(h).String())
			}
		}
	}
	if more := len(texts) - maxHints; more > 0 {
		texts = append(texts[:maxHints], fmt.Sprintf("and %d more", more))
	}
	return strings.Join(texts, " ")
}

// String formats a topology hint, for example as {0,1}*.
func (h hintAnswer) String() string {
	if len(h.Nodes) == 0 {
		return "any"
	}
	text := strings.Join(strings.Fields(strings.Trim(fmt.Sprint(h.Nodes), "[]")), ",")
	if h.Preferred {
		return "{" + text + "}*"
	}
	return "{" + text + "}"
}

// print() prints two tables: one with the resources, and one with the policies.
func (a requestAnswer) print(w io.Writer) error {
	nodes := map[int]bool{}
	for _, r := range a.Resources {
		for node := range r.Nodes {
			nodes[node] = true
		}
	}
	columns := slices.Sorted(maps.Keys(nodes))
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	heading := "RESOURCE\tCOUNT"
	for _, node := range columns {
		heading += "\tFREE AT " + nodeName(node)
	}
	fmt.Fprintln(t, heading+"\tHINTS")
	for _, r := range a.Resources {
		fmt.Fprintln(t, strings.Join(r.cells(columns), "\t"))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	fmt.Fprintln(t, "\nPOLICY\tMERGED\tADMITTED")
	for _, p := range a.Policies {
		merged := p.Merged.String()
		if !p.Admitted && len(p.Merged.Nodes) == 0 {
			merged = "-"
		}
		fmt.Fprintf(t, "%s\t%s\t%s\n", p.Policy, merged, p.decisionText())
	}
	return t.Flush()
}

func nodeName(node int) string {
	if node == pci.Unknown {
		return "NO NODE"
	}
	return fmt.Sprintf("NODE %d", node)
}

func (r resourceAnswer) cells(columns []int) []string {
	cells := []string{plain(r.Resource), fmt.Sprint(r.Count)}
	for _, node := range columns {
		t := r.Nodes[node]
		cell := fmt.Sprintf("%d of %d", t.Free, t.All)
		switch {
		case t.All == 0:
			cell = "-"
		case t.Faulty > 0 && r.Resource == cpuResource:
			cell += fmt.Sprintf(", %d reserved", t.Faulty)
		case t.Faulty > 0:
			cell += fmt.Sprintf(", %d faulty", t.Faulty)
		}
		cells = append(cells, cell)
	}
	hints := make([]kubelet.Hint, len(r.Hints))
	for i, h := range r.Hints {
		for _, node := range h.Nodes {
			hints[i].Nodes |= 1 << node
		}
		hints[i].Preferred = h.Preferred
	}
	text := hintText(hints)
	switch {
	case r.Hints == nil:
		text = "any"
	case text == "":
		text = "impossible"
	}
	return append(cells, text)
}

// decisionText describes the decision of a policy in words.
func (p policyAnswer) decisionText() string {
	switch {
	case p.Admitted:
		return "yes"
	case p.Never:
		return "no, never on a node like this: " + p.Reason
	}
	return "no, not at present: " + p.Reason
}
