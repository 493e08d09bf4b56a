// SPDX-License-Identifier: Apache-2.0

package cli

import (
	"cmp"
	"fmt"
	"strings"

	"github.com/podlace/podlace/pkg/cli/reconcile"
	"github.com/podlace/podlace/pkg/pci"
)

// branch is a part of the tree, such as a bridge, a NUMA node or a PF: a heading with rows or branches below it.
type branch struct {
	heading string
	rows    []row
	below   []branch
}

// row is a pod or a VF: the interface or VF on the node, the pod, and further columns, which may be empty.
type row struct {
	link, pod string
	facts     []string
	trouble   string // reason why the attachment does not work, or ""
}

func (r row) cells() []string { return append(append([]string{r.link, r.pod}, r.facts...), r.trouble) }

// branches returns the bridges, the NUMA nodes and the other pods, as they are drawn.
func (t topology) branches() (list []branch) {
	for _, b := range t.Bridges {
		facts := append(plainAll(b.Addresses), b.State)
		if b.MTU > 0 {
			facts = append(facts, fmt.Sprintf("mtu %d", b.MTU))
		}
		list = append(list, branch{heading: "bridge " + plain(b.Name) + ": " + strings.Join(facts, ", "), rows: podRows(b.Pods)})
	}
	list = append(list, t.numaBranches()...)
	if len(t.Others) > 0 {
		list = append(list, branch{heading: "without a bridge", rows: podRows(t.Others)})
	}
	if len(list) == 0 {
		list = append(list, branch{heading: "no pod is recorded, and no card has VFs"})
	}
	return list
}

func (t topology) numaBranches() (list []branch) {
	for i, c := range t.Cards {
		if i == 0 || c.NUMANode != t.Cards[i-1].NUMANode {
			heading := fmt.Sprintf("NUMA node %d", c.NUMANode)
			if c.NUMANode == pci.Unknown {
				heading = "NUMA node unknown"
			}
			list = append(list, branch{heading: heading})
		}
		card := branch{heading: fmt.Sprintf("PF %s %s: %s, %d of %d VFs", dash(plain(c.PFName)), c.Address,
			cmp.Or(plain(c.Driver), "no driver"), len(c.VFs), c.TotalVFs)}
		for _, vf := range c.VFs {
			card.rows = append(card.rows, row{link: fmt.Sprintf("VF %d %s", vf.VFIndex, vf.Address), pod: dash(plain(vf.Pod)),
				facts: []string{labelled("driver", plain(vf.Driver)), labelled("resource", plain(vf.Resource)),
					labelled("network", plain(vf.Network))}, trouble: plainText(vf.Fault)})
		}
		list[len(list)-1].below = append(list[len(list)-1].below, card)
	}
	return list
}

func podRows(pods []topologyPod) []row {
	rows := make([]row, len(pods))
	for i, a := range pods {
		rows[i] = row{link: dash(plain(a.HostInterface)), pod: plain(podName(a)), trouble: troubleOf(a), facts: []string{plain(a.IfName),
			joined(a.Addresses), labelled("network", plain(a.Network)), labelled("hostPorts", hostPorts(a.HostPorts)),
			labelled("ingress", limit(a.IngressRate)), labelled("egress", limit(a.EgressRate)), labelled("VFs", strings.Join(plainAll(a.VFs), " "))}}
	}
	return rows
}

// podName returns an attachment's pod, or the container ID if the runtime passed no name.
func podName(a topologyPod) string {
	return cmp.Or(a.Pod, "container "+cmp.Or(shortID(a.ContainerID), "unknown"))
}

// troubleOf returns why an attachment does not work, or "".
func troubleOf(a topologyPod) string {
	switch {
	case len(a.Damaged) > 0:
		return "unreadable record"
	case a.State == reconcile.Gone:
		return "namespace gone"
	}
	return a.Fault
}

func plainAll(names []string) []string {
	list := make([]string, len(names))
	for i, name := range names {
		list[i] = plain(name)
	}
	return list
}

// labelled returns a label with its value, or "" if the value is empty.
func labelled(label, value string) string {
	if value == "" {
		return ""
	}
	return label + " " + value
}

// text formats the topology as a tree.
func (t topology) text() string {
	var b strings.Builder
	b.WriteString("node " + plain(t.Node) + "\n")
	writeBranches(&b, "", t.branches())
	return b.String()
}

func writeBranches(b *strings.Builder, indent string, list []branch) {
	for i, br := range list {
		joint, deeper := joints(i == len(list)-1)
		b.WriteString(indent + joint + br.heading + "\n")
		for k, line := range aligned(br.rows) {
			joint, _ := joints(k == len(br.rows)-1)
			b.WriteString(indent + deeper + joint + line + "\n")
		}
		writeBranches(b, indent+deeper, br.below)
	}
}

// joints returns the branch symbol of an entry and the indentation of all below it.
func joints(last bool) (joint, deeper string) {
	if last {
		return "`- ", "   "
	}
	return "|- ", "|  "
}

// aligned formats rows with columns of equal width, without those that are empty in all rows.
func aligned(rows []row) []string {
	used := map[int]bool{}
	for _, r := range rows {
		for c, cell := range r.cells() {
			used[c] = used[c] || cell != ""
		}
	}
	table := make([][]string, len(rows))
	for i, r := range rows {
		for c, cell := range r.cells() {
			if used[c] {
				table[i] = append(table[i], cell)
			}
		}
	}
	var b strings.Builder
	printTable(&b, table)
	lines := strings.Split(b.String(), "\n")[:len(rows)]
	for i, line := range lines {
		lines[i] = strings.TrimRight(line, " ")
	}
	return lines
}
