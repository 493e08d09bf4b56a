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

// A path is one row of the matrix, tried in each family with TCP and UDP.
type path struct {
	title  string
	from   string // place
	to     string // place whose address is dialled, or a service whose ClusterIP is
	port   int
	server string // place that must answer
	seen   string // how the server must see the client: a place, or "gateway" for an address of the pods' bridge
}

const (
	podPort, servicePort, hostPort = 8080, 80, 8081
)

// paths are those of Kubernetes' network model, of Services and of hostPorts.
func paths() []path {
	return []path{
		{"pod to pod of its node", "client1", "server1", podPort, "server1", "client1"},
		{"pod to pod of another node", "client1", "server2", podPort, "server2", "client1"},
		{"pod to pod of a node in another subnet", "client1", "server3", podPort, "server3", "client1"},
		{"pod of a node in another subnet to pod", "client3", "server1", podPort, "server1", "client3"},
		{"node to its pod", "node1", "server1", podPort, "server1", "gateway"},
		{"node to pod of another node", "node1", "server2", podPort, "server2", "node1"},
		{"pod to ClusterIP, backend on its node", "client1", "service/server1", servicePort, "server1", "client1"},
		{"pod to ClusterIP, backend on another node", "client1", "service/server2", servicePort, "server2", "client1"},
		{"pod to ClusterIP, backend in another subnet", "client1", "service/server3", servicePort, "server3", "client1"},
		{"pod to ClusterIP, itself the backend", "client1", "service/client1", servicePort, "client1", "gateway"},
		{"node to ClusterIP, backend on it", "node1", "service/server1", servicePort, "server1", "gateway"},
		{"node to ClusterIP, backend on another node", "node1", "service/server2", servicePort, "server2", "node1"},
		{"outside to NodePort, backend on that node", "outside", "node1", nodePort("server1"), "server1", "gateway"},
		{"outside to NodePort, backend on another node", "outside", "node1", nodePort("server2"), "server2", "node1"},
		{"outside to NodePort, policy Local", "outside", "node1", nodePort("local1"), "server1", "outside"},
		{"pod to NodePort of its node", "client1", "node1", nodePort("server1"), "server1", "gateway"},
		{"pod to NodePort of its node, itself the backend", "client1", "node1", nodePort("client1"), "client1", "gateway"},
		{"pod to NodePort of another node, backend on its own", "client1", "node2", nodePort("server1"), "server1", "node2"},
		{"node to NodePort of its address", "node1", "node1", nodePort("server1"), "server1", "gateway"},
		{"node to NodePort of its loopback", "node1", "loopback", nodePort("server1"), "server1", "gateway"},
		{"outside to hostPort", "outside", "node1", hostPort, "server1", "outside"},
		{"node to hostPort of its address", "node1", "node1", hostPort, "server1", "node1"},
		{"node to hostPort of its loopback", "node1", "loopback", hostPort, "server1", "gateway"},
		{"another node to hostPort", "node2", "node1", hostPort, "server1", "node2"},
		{"pod to hostPort of its node", "client1", "node1", hostPort, "server1", "client1"},
		{"pod to hostPort of its node, itself behind it", "server1", "node1", hostPort, "server1", "gateway"},
		{"pod to hostPort of another node", "client1", "node2", hostPort, "server2", "node1"},
		{"pod to outside", "client1", "outside", podPort, "outside", "node1"},
	}
}

// refused says whether a path must not work, and why.
func (p path) refused(proxy, family string) string {
	switch {
	case p.to == "loopback" && p.port == hostPort && family == "6":
		return "there is no route_localnet for IPv6"
	case p.to == "loopback" && p.port != hostPort && (proxy == "nftables" || family == "6"):
		return "kube-proxy serves no NodePort there"
	}
	return ""
}

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

// name says whose an address is.
func (w *world) name(a netip.Addr) string {
	for name, p := range w.places {
		if p.address[familyOf(a.String())] == a.String() {
			return name
		}
	}
	for _, cidr := range []string{"10.244.0.0/16", "fd00:10:244::/56"} {
		if netip.MustParsePrefix(cidr).Contains(a) {
			return "gateway"
		}
	}
	return a.String()
}

// walk takes a path and returns what the table says of it; wrong is not empty if that is not as it must be.
func (w *world) walk(p path, proxy, network, family string) (cell, wrong string) {
	server, seen, err := w.ask(p.from, network, w.target(p, family), p.port)
	refused := p.refused(proxy, family)
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
	if cell != p.seen {
		return cell, fmt.Sprintf("%s sees %s (%s), want %s", server, cell, seen, p.seen)
	}
	return cell, ""
}

// settle waits until each path works, or until the deadline: kube-proxy hears of a backend some time after the backend is ready.
func (w *world) settle(proxy string) {
	end := time.Now().Add(30 * time.Second)
	for _, p := range paths() {
		for _, f := range w.families {
			for _, network := range []string{"tcp", "udp"} {
				for time.Now().Before(end) {
					if _, wrong := w.walk(p, proxy, network, f); wrong == "" {
						break
					}
					time.Sleep(100 * time.Millisecond)
				}
			}
		}
	}
}

// matrix walks all paths, once all services are served, and prints the table: the source address that each server sees.
func (w *world) matrix(t *testing.T, proxy string) {
	t.Helper()
	w.settle(proxy)
	var table strings.Builder
	out := tabwriter.NewWriter(&table, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprint(out, "path")
	for _, f := range w.families {
		_, _ = fmt.Fprintf(out, "\tTCP IPv%s\tUDP IPv%s", f, f)
	}
	_, _ = fmt.Fprintln(out)
	walked := 0
	for _, p := range paths() {
		_, _ = fmt.Fprint(out, p.title)
		for _, f := range w.families {
			for _, network := range []string{"tcp", "udp"} {
				cell, wrong := w.walk(p, proxy, network, f)
				if wrong != "" {
					t.Errorf("%s, %s, IPv%s: %s", p.title, network, f, wrong)
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
