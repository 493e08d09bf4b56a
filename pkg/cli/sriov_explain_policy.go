// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"fmt"
	"io"
	"maps"
	"slices"
	"strings"

	"github.com/podlace/podlace/pkg/cli/kubelet"
	"github.com/podlace/podlace/pkg/pci"
)

// requestAnswer is a request's resources, with each Topology Manager policy's decision.
type requestAnswer struct {
	Resources []resourceAnswer `json:"resources"`
	Policies  []policyAnswer   `json:"policies"`
}

// resourceAnswer is one resource of a request: its devices by NUMA node, and its topology hints.
type resourceAnswer struct {
	Resource string         `json:"resource"`
	Count    int            `json:"count"`
	Nodes    map[int]tally  `json:"nodes"` // pci.Unknown: devices without a NUMA node
	Hints    []kubelet.Hint `json:"hints"` // null if the resource has no NUMA nodes
}

// tally counts the devices near a NUMA node: all, free and faulty.
type tally struct {
	All    int `json:"devices"`
	Free   int `json:"free"`
	Faulty int `json:"faulty"`
}

// policyAnswer is one Topology Manager policy's decision.
type policyAnswer struct {
	Policy   kubelet.Policy `json:"policy"`
	Admitted bool           `json:"admitted"`
	Merged   kubelet.Hint   `json:"merged"`           // without nodes: any
	Never    bool           `json:"never,omitempty"`  // the policy refuses the request on an idle node too
	Reason   string         `json:"reason,omitempty"` // of a refusal
}

// maxPermutations limits the combinations of topology hints, one of each resource, that are tried. The kubelet tries all for each
// container.
const maxPermutations = 20_000_000

// attempt is a request on the node as it is, or on an idle one.
type attempt struct {
	demands []demand
	hints   [][]kubelet.Hint // by demand
	free    string           // stands after a number of devices in a reason
}

func newAttempt(demands []demand, free string) attempt {
	a := attempt{demands: demands, free: free}
	for _, d := range demands {
		a.hints = append(a.hints, d.Hints(d.count, nil))
	}
	return a
}

// newRequestAnswer merges the topology hints for a request, with each policy.
func newRequestAnswer(machine kubelet.Mask, demands []demand, wanted []string) (a requestAnswer, err error) {
	var idleDemands []demand
	for _, d := range demands {
		idleDemands = append(idleDemands, d.idle())
	}
	now, idle := newAttempt(demands, " free"), newAttempt(idleDemands, "")
	permutations := 1
	for i, d := range demands {
		if permutations *= max(len(now.hints[i]), len(idle.hints[i]), 1); permutations > maxPermutations {
			return a, fmt.Errorf("the request has more than %d combinations of hints: ask for fewer resources at once", maxPermutations)
		}
		a.Resources = append(a.Resources, resourceAnswer{Resource: d.name, Count: d.count, Nodes: d.tallies(), Hints: now.hints[i]})
	}
	for _, name := range wanted {
		p := policyAnswer{Policy: kubelet.Policy(name)}
		p.Merged, p.Reason = now.decide(p.Policy, machine)
		p.Admitted = p.Reason == ""
		if _, never := idle.decide(p.Policy, machine); !p.Admitted && never != "" {
			p.Never, p.Reason = true, never
		}
		a.Policies = append(a.Policies, p)
	}
	return a, nil
}

// decide returns a policy's merged hint, and why it refuses the request, or "".
func (a attempt) decide(p kubelet.Policy, machine kubelet.Mask) (merged kubelet.Hint, reason string) {
	merged, admitted := kubelet.Merge(p, machine, a.hints)
	for _, d := range a.demands {
		free := 0
		for _, t := range d.tallies() {
			free += t.Free
		}
		if free < d.count {
			return merged, fmt.Sprintf("%d of %d %s are free", free, d.count, plain(d.name))
		}
	}
	if admitted {
		return merged, ""
	}
	var texts []string
	for i, d := range a.demands {
		usable := slices.DeleteFunc(slices.Clone(a.hints[i]), func(h kubelet.Hint) bool {
			return !h.Preferred || p == kubelet.SingleNUMA && h.Nodes.Count() > 1
		})
		switch {
		case a.hints[i] == nil:
			continue
		case len(usable) == 0 && p == kubelet.SingleNUMA:
			return merged, fmt.Sprintf("no NUMA node has %d%s %s", d.count, a.free, plain(d.name))
		case len(usable) == 0:
			return merged, fmt.Sprintf("%d %s need more NUMA nodes than if all were free", d.count, plain(d.name))
		}
		texts = append(texts, plain(d.name)+" "+hintText(usable))
	}
	return merged, "the preferred NUMA nodes differ: " + strings.Join(texts, ", ")
}

// tallies counts the devices near each NUMA node. A device near several nodes is counted at each; one without a node is at pci.Unknown.
func (d demand) tallies() map[int]tally {
	nodes := map[int]tally{}
	for i, near := range d.Near {
		at := near.Nodes()
		if len(at) == 0 {
			at = []int{pci.Unknown}
		}
		for _, node := range at {
			t := nodes[node]
			t.All++
			switch {
			case !d.Healthy[i]:
				t.Faulty++
			case !d.Used[i]:
				t.Free++
			}
			nodes[node] = t
		}
	}
	return nodes
}

// maxHints is how many hints fit on one line.
const maxHints = 8

// hintText formats topology hints as in {0}* {0,1}: preferred ones first, with a star.
func hintText(hints []kubelet.Hint) string {
	var texts []string
	for _, preferred := range []bool{true, false} {
		for _, h := range hints {
			if h.Preferred == preferred {
				texts = append(texts, h.String())
			}
		}
	}
	if more := len(texts) - maxHints; more > 0 {
		texts = append(texts[:maxHints], fmt.Sprintf("and %d more", more))
	}
	return strings.Join(texts, " ")
}

func (a requestAnswer) print(w io.Writer) {
	nodes := map[int]tally{}
	for _, r := range a.Resources {
		maps.Copy(nodes, r.Nodes)
	}
	columns := slices.Sorted(maps.Keys(nodes))
	heading := []string{"RESOURCE", "COUNT"}
	for _, node := range columns {
		heading = append(heading, strings.Replace(fmt.Sprintf("FREE AT NODE %d", node), fmt.Sprintf("NODE %d", pci.Unknown), "NO NODE", 1))
	}
	rows := [][]string{append(heading, "HINTS")}
	for _, r := range a.Resources {
		rows = append(rows, r.cells(columns))
	}
	printTable(w, rows)
	rows = [][]string{{"\nPOLICY", "MERGED", "ADMITTED"}}
	for _, p := range a.Policies {
		merged := p.Merged.String()
		if !p.Admitted && p.Merged.Nodes == 0 {
			merged = "-"
		}
		rows = append(rows, []string{string(p.Policy), merged, p.decisionText()})
	}
	printTable(w, rows)
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
	text := cmp.Or(hintText(r.Hints), "impossible")
	if r.Hints == nil {
		text = "any"
	}
	return append(cells, text)
}

func (p policyAnswer) decisionText() string {
	switch {
	case p.Admitted:
		return "yes"
	case p.Never:
		return "no, never on a node like this: " + p.Reason
	}
	return "no, not at present: " + p.Reason
}
