// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"fmt"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/harness"
)

// TestRouteLater: if a routing daemon adds the route to the pod after ADD, portmap's ADD prints a warning, and the hostPort works once the
// route exists.
func TestRouteLater(t *testing.T) {
	for _, backend := range []string{"nftables", "iptables"} {
		t.Run(backend, func(t *testing.T) {
			harness.NeedBackend(t, backend)
			harness.Need(t, "portmap")
			lan := harness.NewLAN(t)
			harness.Shell(t, "ip route del default; ip -6 route del default")
			pod := harness.NewPod(t, harness.Plain(t)+"-pod")
			harness.Shell(t, "sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1")
			conf := object{"cniVersion": "1.1.0", "name": "later", "type": "portmap", "backend": backend,
				"runtimeConfig": object{"portMappings": harness.Ports(harness.Port(8080, 80, "tcp"))},
				"prevResult": object{"cniVersion": "1.1.0", "interfaces": []any{object{"name": "eth0", "sandbox": pod.Path}},
					"ips": []any{object{"address": "203.0.113.7/32", "interface": 0}, object{"address": "2001:db8:113::7/128", "interface": 0}}}}
			call := harness.NewCall("ADD", "portmap", pod, "later", conf)
			call.Run(t).OK(t)
			call.With("CNI_COMMAND", "DEL").Run(t).OK(t)
			before := harness.Watch(t, pod)
			if o := call.Run(t).OK(t); !strings.Contains(o.Stderr, "no route to the pod") {
				t.Errorf("ADD does not warn: %s", o.Stderr)
			}
			call.With("CNI_COMMAND", "CHECK").Run(t).OK(t)
			harness.Shell(t, fmt.Sprintf(`
				ip link add later0 type veth peer name eth0 netns %[1]s
				ip link set later0 up; ip addr add 169.254.1.1/32 dev later0; ip -6 addr add fe80::1/64 dev later0 nodad
				ip -n %[1]s link set eth0 up; ip -n %[1]s addr add 203.0.113.7/32 dev eth0; ip -n %[1]s -6 addr add 2001:db8:113::7/128 dev eth0 nodad
				ip -n %[1]s route add 169.254.1.1 dev eth0; ip -n %[1]s route add default via 169.254.1.1
				ip -n %[1]s -6 route add default via fe80::1 dev eth0
				ip route add 203.0.113.7 dev later0; ip -6 route add 2001:db8:113::7 dev later0`, pod.Name))
			server, err := harness.Serve(pod, 80)
			if err != nil {
				t.Fatal(err)
			}
			defer server.Close()
			harness.Reach(t, lan, harness.NodeV4+":8080", pod)
			harness.Reach(t, lan, "["+harness.NodeV6+"]:8080", pod)
			call.With("CNI_COMMAND", "CHECK").Run(t).OK(t)
			harness.Shell(t, "ip link del later0")
			call.With("CNI_COMMAND", "DEL").Run(t).OK(t)
			before.Clean(t, "DEL")
		})
	}
}
