// SPDX-License-Identifier: Apache-2.0

package kubernetes_test

import (
	"cmp"
	"fmt"
	"net/netip"
	"strings"
	"testing"
	"text/tabwriter"
	"time"
)

// targetOf returns the address to which the client of a path connects.
func (w *testWorld) targetOf(p netPath, family string) string {
	if service, ok := strings.CutPrefix(p.to, "service/"); ok {
		return w.services[service][family]
	}
	if p.to == "loopback" {
		return map[string]string{"4": "127.0.0.1", "6": "::1"}[family]
	}
	return w.places[p.to].address[family]
}

// ownerOf returns the name of the pod or machine that has an address.
func (w *testWorld) ownerOf(a netip.Addr) string {
	for name, p := range w.places {
		if p.address[familyOf(a.String())] == a.String() {
			return name
		}
	}
	for n, cidrs := range w.cidrs {
		for _, cidr := range cidrs {
			switch a {
			case cidr.Addr():
				return "tunnel" + nodeNumber(n)
			case cidr.Addr().Next():
				return "gateway" + nodeNumber(n)
			}
		}
	}
	return a.String()
}

// testPath returns a cell of testMatrix's table. The second result describes an unexpected outcome.
func (w *testWorld) testPath(p netPath, s clusterSetup, network, family string) (cell, wrong string) {
	want, refused := p.expectedSource(s, family)
	limit := dialLimit
	if refused != "" {
		limit = refusedLimit
	}
	server, seen, err := w.askServer(p.from, network, w.targetOf(p, family), p.port, limit)
	switch {
	case err != nil && refused != "":
		return "refused", ""
	case err != nil:
		return "FAILS", err.Error()
	case refused != "":
		return "ANSWERS", "must not work: " + refused
	case server != p.server:
		return "WRONG " + server, fmt.Sprintf("%s answered, want %s", server, p.server)
	}
	cell = w.ownerOf(seen)
	if cell != want {
		return cell, fmt.Sprintf("%s sees %s (%s), want %s", server, cell, seen, want)
	}
	return cell, ""
}

// awaitPaths waits for all paths or the deadline, because kube-proxy learns of a ready backend with a delay.
func (w *testWorld) awaitPaths(s clusterSetup, paths []netPath) {
	end := time.Now().Add(30 * time.Second)
	for _, p := range paths {
		for _, f := range w.families {
			_, refused := p.expectedSource(s, f)
			for _, network := range []string{"tcp", "udp"} {
				for refused == "" && time.Now().Before(end) {
					if _, wrong := w.testPath(p, s, network, f); wrong == "" {
						break
					}
					time.Sleep(100 * time.Millisecond)
				}
			}
		}
	}
}

// testMatrix tests all paths once kube-proxy serves all Services, and prints the table of the source addresses that servers see.
func (w *testWorld) testMatrix(t *testing.T, s clusterSetup) {
	t.Helper()
	w.awaitPaths(s, s.allPaths())
	w.walkAll(t, s, s.allPaths())
}

func (w *testWorld) walkAll(t *testing.T, s clusterSetup, paths []netPath) {
	t.Helper()
	var table strings.Builder
	out := tabwriter.NewWriter(&table, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprint(out, "path")
	for _, f := range w.families {
		_, _ = fmt.Fprintf(out, "\tTCP IPv%s\tUDP IPv%s", f, f)
	}
	_, _ = fmt.Fprintln(out)
	walked := 0
	for _, p := range paths {
		title := p.client + " to " + p.target
		if p.port == hostPort && p.server == "server3" {
			title += " with CRI-O"
		}
		_, _ = fmt.Fprint(out, title)
		for _, f := range w.families {
			for _, network := range []string{"tcp", "udp"} {
				cell, wrong := w.testPath(p, s, network, f)
				if wrong != "" {
					t.Errorf("%s, %s, IPv%s: %s", title, network, f, wrong)
				}
				_, _ = fmt.Fprintf(out, "\t%s", cmp.Or(cell, "-"))
				walked++
			}
		}
		_, _ = fmt.Fprintln(out)
	}
	_ = out.Flush()
	t.Logf("%d paths, the source address that the server sees:\n%s", walked, table.String())
}
