// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"fmt"
	"net"
	"strings"
	"sync"
	"testing"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

type labAddresses struct {
	family      string // the option of ip(8)
	node, lan   string // the node and its router
	resolver    string // a name server behind the router
	near, third string // the node's address in its second network, and a machine there
}

func families() []labAddresses {
	return []labAddresses{
		{family: "-4", node: harness.NodeV4, lan: harness.LANV4, resolver: "1.1.1.1", near: "198.51.100.1", third: "198.51.100.2"},
		{family: "-6", node: harness.NodeV6, lan: harness.LANV6, resolver: "2001:db8:1111::1", near: "2001:db8:51::1", third: "2001:db8:51::2"},
	}
}

// crossingLab is a node between two networks, with pods of Podlace's plugins.
type crossingLab struct {
	*behindLab
	third *sandbox.Pod
}

func eachCrossing(t *testing.T, caps map[string]any, test func(t *testing.T, c crossingLab)) {
	for _, backend := range []string{"nftables", "iptables"} {
		t.Run(backend, func(t *testing.T) {
			harness.NeedBackend(t, backend)
			test(t, newCrossing(t, string(harness.ChainOf(t, "1.1.0", backend)), caps))
		})
	}
}

func newCrossing(t *testing.T, conflist string, caps map[string]any) crossingLab {
	t.Helper()
	harness.Need(t, "portmap")
	c := crossingLab{behindOf(t, conflist, caps), harness.NewPod(t, harness.Plain(t)+"-third")}
	harness.Shell(t, fmt.Sprintf(`
		ip link add near0 type veth peer name eth0 netns %[1]s
		ip link set near0 up; ip -n %[1]s link set lo up; ip -n %[1]s link set eth0 up
		sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1`, c.third.Name))
	t.Cleanup(func() { harness.Shell(t, "ip link del near0") })
	for i, p := range families() {
		whole, subnet := []int{32, 128}[i], []int{24, 64}[i]
		dad := []string{"", "nodad"}[i]
		harness.Shell(t, fmt.Sprintf(`
			ip addr add %[4]s/%[8]d dev near0 %[9]s
			ip -n %[1]s addr add %[5]s/%[8]d dev eth0 %[9]s; ip -n %[1]s %[3]s route add default via %[4]s
			ip -n %[2]s addr add %[6]s/%[10]d dev lo %[9]s; ip -n %[2]s route add %[5]s via %[7]s`,
			c.third.Name, c.lan.Name, p.family, p.near, p.third, p.resolver, p.node, subnet, dad, whole))
	}
	c.oracle.Rebase(t)
	return c
}

// atHostIP returns the port mapping m at one address of the node.
func atHostIP(hostIP string, m map[string]any) map[string]any {
	m["hostIP"] = hostIP
	return m
}

// startSpeakers starts TCP and UDP servers that answer with the machine's name. If the machine is nil, they run on the node.
func startSpeakers(t testing.TB, on *sandbox.Pod, addresses ...string) {
	t.Helper()
	for _, address := range addresses {
		speaker, err := harness.Speak(on, address)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = speaker.Close() })
	}
}

// netQuery is an address and the pod that must answer there; "" means none.
type netQuery struct {
	from    *sandbox.Pod
	address string
	want    string
}

// checkAnswers connects to all addresses over TCP and UDP, at one or more ports, in parallel.
func checkAnswers(t *testing.T, ports string, questions ...netQuery) {
	t.Helper()
	var wait sync.WaitGroup
	for _, port := range strings.Fields(ports) {
		for _, q := range questions {
			for _, protocol := range []string{"tcp", "udp"} {
				wait.Go(func() {
					got, err := harness.Ask(q.from, protocol, net.JoinHostPort(q.address, port), harness.Patience(q.want == ""))
					if got != q.want || (err == nil) != (q.want != "") {
						t.Errorf("%s %s -> %s port %s: %q answers, want %q (%v)", protocol, harness.NameOf(q.from), q.address, port, got, q.want, err)
					}
				})
			}
		}
	}
	wait.Wait()
}
