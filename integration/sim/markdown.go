// SPDX-License-Identifier: Apache-2.0

package main

import (
	"fmt"
	"strings"

	"github.com/podlace/podlace/integration/markdown"
	"github.com/podlace/podlace/pkg/cli/kubelet"
	"github.com/podlace/podlace/pkg/daemon/pool"
)

func (r *report) markdown() string {
	var out strings.Builder
	fmt.Fprintf(&out, "# Choices of VFs, simulated\n\n%d runs of %d pods (the first tenth not counted), offered load %g %%. "+
		"Means and 95 %% confidence intervals over runs (Student's t).\n", r.seeds, r.pods, r.load)
	if r.cpus > 0 {
		fmt.Fprintf(&out, "Static CPU policy: %d CPUs near each NUMA node, pods want %d for each VF.\n", r.cpus, cpusPerVF)
	}
	for _, t := range r.topologies {
		r.writePromise(&out, t)
	}
	for _, t := range r.topologies {
		m := machine{topology: t}
		fmt.Fprintf(&out, "\n%s", r.tableText(t, m.label()+": where several VFs of a pod are", oneNUMA, nearCPUs))
		fmt.Fprintf(&out, "\n%s", r.tableText(t, m.label()+": who is refused, what is left, how evenly", full, jain))
	}
	r.writeLosses(&out)
	return out.String()
}

// writePromise writes which percentage of requests for several VFs, under the kubelet's default policy, gets all of them near one NUMA
// node, with Podlace and with the kubelet's random choice.
func (r *report) writePromise(out *strings.Builder, t topology) {
	ours, ok := r.findRow(t, kubelet.None, choiceMethod(pool.NUMABestFit))
	theirs, also := r.findRow(t, kubelet.None, random)
	if ok && also && t.nodes > 1 {
		fmt.Fprintf(out, "\n%s, policy none: of the requests for several VFs that some NUMA node had room for, %s has %s %% near one node, "+
			"the kubelet's random choice %s %%.\n", t, pool.NUMABestFit, ours.meanOf(oneNUMAWithRoom).cell(1),
			theirs.meanOf(oneNUMAWithRoom).cell(1))
	}
}

// tableText returns a Markdown table of the measures with the indexes from `from` to `to`.
func (r *report) tableText(t topology, title string, from, to int) string {
	columns := []string{"policy", "choice"}
	for i := from; i <= to; i++ {
		if r.isShown(i) {
			columns = append(columns, measures()[i].title)
		}
	}
	out := markdown.NewTable(title, columns...)
	for _, row := range r.rows {
		if row.topology != t {
			continue
		}
		cells := []string{string(row.policy), string(row.allocator)}
		for i := from; i <= to; i++ {
			if r.isShown(i) {
				cells = append(cells, row.meanOf(i).cell(measures()[i].digits))
			}
		}
		out.Row(cells...)
	}
	return out.String()
}

// writeLosses writes a table of the measures for which the kubelet's random choice is better, with a line for each method.
func (r *report) writeLosses(out *strings.Builder) {
	losses := r.findLosses()
	t := markdown.NewTable(fmt.Sprintf("Where ours is worse than random: %d of %d choices and measures", len(losses), r.comparisonCount()),
		"machine", "policy", "choice", "measures: ours, random")
	for i := 0; i < len(losses); {
		first, words := losses[i], []string{}
		for ; i < len(losses) && losses[i].isSame(first.row); i++ {
			m := measures()[losses[i].measure]
			words = append(words, fmt.Sprintf("%s: %.*f, %.*f", m.title, m.digits, losses[i].ours.mean, m.digits, losses[i].theirs.mean))
		}
		t.Row(first.topology.String(), string(first.policy), string(first.allocator), strings.Join(words, "; "))
	}
	fmt.Fprintf(out, "\n%s\nCounted is what 95 %% confidence intervals of the differences tell from chance. Whole PFs left over and even use of "+
		"PFs exclude each other, and so do VFs of one PF and each of another: `pack` and `numa-best-fit` lose here what `balance` and `distinct-pf` win, "+
		"and the other way round. `distinct-pf` looks at PFs before NUMA nodes: under policy none, pods that want more VFs than a node has PFs are not "+
		"near one node.\n", t.String())
}
