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

// target is the address that a path dials.
func (w *world) target(p path, family string) string {
	if service, ok := strings.CutPrefix(p.to, "service/"); ok {
		return w.services[service][family]
	}
	if p.to == "loopback" {
		return map[string]string{"4": "127.0.0.1", "6": "::1"}[family]
	}
	return w.places[p.to].address[family]
}

// name returns the name of an address's owner.
func (w *world) name(a netip.Addr) string {
	for name, p := range w.places {
		if p.address[familyOf(a.String())] == a.String() {
			return name
		}
	}
	for n, cidrs := range w.cidrs {
		for _, cidr := range cidrs {
			switch a {
			case cidr.Addr():
				return "tunnel" + number(n)
			case cidr.Addr().Next():
				return "gateway" + number(n)
			}
		}
	}
	return a.String()
}

// walk tests a path and returns its entry for the table; wrong describes an unexpected result.
func (w *world) walk(p path, s setup, network, family string) (cell, wrong string) {
	want, refused := p.expect(s, family)
	limit := dialLimit
	if refused != "" {
		limit = refusedLimit
	}
	server, seen, err := w.ask(p.from, network, w.target(p, family), p.port, limit)
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
	cell = w.name(seen)
	if cell != want {
		return cell, fmt.Sprintf("%s sees %s (%s), want %s", server, cell, seen, want)
	}
	return cell, ""
}

// settle waits until each path works or the deadline passes, because kube-proxy learns of a ready backend with a delay.
func (w *world) settle(s setup, paths []path) {
	end := time.Now().Add(30 * time.Second)
	for _, p := range paths {
		for _, f := range w.families {
			_, refused := p.expect(s, f)
			for _, network := range []string{"tcp", "udp"} {
				for refused == "" && time.Now().Before(end) {
					if _, wrong := w.walk(p, s, network, f); wrong == "" {
						break
					}
					time.Sleep(100 * time.Millisecond)
				}
			}
		}
	}
}

// matrix tests all paths once kube-proxy serves all services, and prints the table of the source addresses that the servers see.
func (w *world) matrix(t *testing.T, s setup) {
	t.Helper()
	w.settle(s, s.paths())
	w.walkAll(t, s, s.paths())
}

func (w *world) walkAll(t *testing.T, s setup, paths []path) {
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
				cell, wrong := w.walk(p, s, network, f)
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
