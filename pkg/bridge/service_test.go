// SPDX-License-Identifier: Apache-2.0

package bridge

import (
	"fmt"
	"io"
	"net"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/pkg/kernel"
)

const serviceIP = "10.96.0.10"

// services are the rules of each mode of kube-proxy for a Service with one backend, whose address replaces %s.
var services = map[string]struct{ program, rules string }{
	"iptables": {"iptables-restore", `*nat
:KUBE-SERVICES - [0:0]
:KUBE-SVC-POLICY - [0:0]
:KUBE-SEP-BACKEND - [0:0]
-A PREROUTING -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A OUTPUT -m comment --comment "kubernetes service portals" -j KUBE-SERVICES
-A KUBE-SERVICES -d 10.96.0.10/32 -p tcp -m comment --comment "shop/web cluster IP" -m tcp --dport 80 -j KUBE-SVC-POLICY
-A KUBE-SVC-POLICY -m comment --comment "shop/web -> %[1]s:8080" -j KUBE-SEP-BACKEND
-A KUBE-SEP-BACKEND -p tcp -m comment --comment "shop/web" -m tcp -j DNAT --to-destination %[1]s:8080
COMMIT
`},
	"nftables": {"nft", `table ip kube-proxy {
	map service-ips {
		type ipv4_addr . inet_proto . inet_service : verdict
		elements = { 10.96.0.10 . tcp . 80 : goto service-web }
	}
	chain service-web { meta l4proto tcp dnat to %[1]s:8080; }
	chain services { ip daddr . meta l4proto . th dport vmap @service-ips; }
	chain nat-prerouting { type nat hook prerouting priority dstnat; policy accept; jump services; }
	chain nat-output { type nat hook output priority -100; policy accept; jump services; }
}
`},
}

// TestServiceOnSameBridge: a pod reaches a Service with a backend on its own bridge, for both values of bridge-nf-call-iptables.
func TestServiceOnSameBridge(t *testing.T) {
	const sysctl = "bridge/bridge-nf-call-iptables"
	h, err := kernel.Host()
	if err != nil {
		t.Fatal(err)
	}
	defer h.Close()
	before, err := h.Get(sysctl)
	if err != nil {
		t.Skipf("SKIPPED: no br_netfilter here: %v", err)
	}
	t.Cleanup(func() { _ = h.Set(kernel.Sysctl{Path: sysctl, Value: before}) })
	for mode, service := range services {
		for _, bridged := range []string{"0", "1"} {
			t.Run(mode+" with "+sysctl+"="+bridged, func(t *testing.T) {
				if _, err := exec.LookPath(service.program); err != nil {
					t.Skipf("SKIPPED: %s is not installed", service.program)
				}
				if err := h.Set(kernel.Sysctl{Path: sysctl, Value: bridged}); err != nil {
					t.Fatal(err)
				}
				reachService(t, service.program, service.rules)
			})
		}
	}
}

func reachService(t *testing.T, program, rules string) {
	l := bareLab(t, "name", "services", "bridge", "btsvc",
		"ipam", hostLocal("10.67.0.0/24").With("routes", []any{object{"dst": "0.0.0.0/0"}}))
	t.Cleanup(func() { _ = onHost("btsvc", netlink.LinkDel) })
	client := l.add("client")
	backend := l.other().add("backend")
	address := backend.result.IPs[0].Address.IP.String()
	args := map[string][]string{"nft": {"-f", "-"}}[program]
	cmd := exec.Command(program, args...)
	cmd.Stdin = strings.NewReader(fmt.Sprintf(rules, address))
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%s: %v: %s", program, err, out)
	}
	backend.serve("tcp4", ":8080")
	if got, err := client.fetchAnswer(serviceIP+":80", harness.TrafficLimit); got != "backend" || err != nil {
		t.Errorf("Service: %q, %v", got, err)
	}
	if got, err := client.fetchAnswer(address+":8080", harness.TrafficLimit); got != "backend" || err != nil {
		t.Errorf("backend itself: %q, %v", got, err)
	}
}

// serve starts a server in the pod that answers every connection with the pod's name.
func (a attached) serve(network, address string) {
	a.Helper()
	var listener net.Listener
	if err := a.Pod.Do(func() (err error) { listener, err = net.Listen(network, address); return err }); err != nil {
		a.Fatal(err)
	}
	a.Cleanup(func() { listener.Close() })
	go func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(conn, a.id)
			conn.Close()
		}
	}()
}

func (a attached) fetchAnswer(address string, limit time.Duration) (answer string, err error) {
	err = a.Pod.Do(func() error {
		conn, err := net.DialTimeout("tcp", address, limit)
		if err != nil {
			return err
		}
		defer conn.Close()
		_ = conn.SetDeadline(time.Now().Add(limit))
		data, err := io.ReadAll(conn)
		answer = string(data)
		return err
	})
	return answer, err
}
