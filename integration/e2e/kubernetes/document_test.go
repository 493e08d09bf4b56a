// SPDX-License-Identifier: Apache-2.0

package kubernetes_test

import (
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = flag.Bool("update", false, "rewrite the table of source addresses in docs/CLUSTER.md")

// TestSourceAddresses compares the table of docs/CLUSTER.md with the paths that the other tests check. It needs no cluster.
func TestSourceAddresses(t *testing.T) {
	const file, head = "../../../docs/CLUSTER.md", "| From | To | Server sees | Except |\n| --- | --- | --- | --- |\n"
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, found := strings.Cut(string(data), head)
	if !found {
		t.Fatalf("%s has no table with the head %q", file, head)
	}
	shown, after, _ := strings.Cut(rest, "\n\n")
	rows := sourceRows((clusterSetup{}).allPaths())
	want := strings.Join(rows, "\n")
	if shown == want {
		return
	}
	if !*update {
		t.Fatalf("docs/CLUSTER.md: the tests check other source addresses than the table shows; run: %s\n(-document +paths)\n%s",
			"go test ./integration/e2e/kubernetes -run '^TestSourceAddresses$' -update", cmp.Diff(strings.Split(shown, "\n"), rows))
	}
	if err := os.WriteFile(file, []byte(before+head+want+"\n\n"+after), 0o644); err != nil {
		t.Fatal(err)
	}
}

// sourceRows returns the rows of the table: one for the paths of a client that have the same source address and the same exceptions.
func sourceRows(paths []netPath) (rows []string) {
	targets, order := map[string][]string{}, []string{}
	for _, p := range paths {
		row := "| " + strings.Join([]string{p.client, "%s", p.describeSource(), p.exceptionsOf()}, " | ") + " |"
		if targets[row] == nil {
			order = append(order, row)
		}
		targets[row] = append(targets[row], p.target)
	}
	slices.SortStableFunc(order, func(a, b string) int { return strings.Compare(a[:strings.Index(a, "%s")], b[:strings.Index(b, "%s")]) })
	for _, row := range order {
		rows = append(rows, fmt.Sprintf(row, strings.Join(targets[row], "; ")))
	}
	return rows
}

// describeSource describes the client's address as the server sees it.
func (p netPath) describeSource() string {
	if p.server == "" {
		return "nothing: refused"
	}
	return p.words(p.seen)
}

func (p netPath) words(seen string) string {
	kind := "pod"
	if p.from == "outside" {
		kind = "machine"
	} else if strings.HasPrefix(p.from, "node") {
		kind = "node"
	}
	switch {
	case strings.HasPrefix(seen, "tunnel"):
		return "tunnel"
	case strings.HasPrefix(seen, "gateway"):
		return "gateway"
	case seen == p.from:
		return "the " + kind
	case seen == p.to:
		return "called node"
	}
	return "the pod's node"
}

// exceptionsOf lists the cluster setups with another result than IPv4 and kube-proxy in iptables mode.
func (p netPath) exceptionsOf() string {
	var list []string
	usual := clusterSetup{proxy: "iptables"}
	if _, refused := p.expectedSource(clusterSetup{proxy: "nftables"}, "4"); refused != "" && p.server != "" {
		list = append(list, "kube-proxy in nftables mode: refused")
	}
	if _, refused := p.expectedSource(usual, "6"); refused != "" && p.server != "" {
		list = append(list, "IPv6: refused")
	}
	if seen, _ := p.expectedSource(usual, "6"); seen != p.seen && seen != "" {
		list = append(list, "IPv6: "+p.words(seen))
	}
	all := clusterSetup{proxy: "iptables", masqueradeAll: true}
	if seen, _ := p.expectedSource(all, "4"); seen != p.seen && seen != "" {
		list = append(list, "`masqueradeAll`: "+p.words(seen))
	}
	if p.port == hostPort && p.server == "server1" {
		for _, q := range hostPortPaths("3", "1") {
			_, always := q.expectedSource(clusterSetup{proxy: "nftables", crio: true}, "4")
			_, refused := q.expectedSource(clusterSetup{proxy: "iptables", crio: true}, "4")
			switch {
			case q.target != p.target || q.client != p.client || refused == "":
			case always != "":
				list = append(list, "CRI-O: refused")
			default:
				list = append(list, "CRI-O with kube-proxy in iptables mode: refused")
			}
		}
	}
	return strings.Join(list, "; ")
}
