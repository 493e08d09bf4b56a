// SPDX-License-Identifier: Apache-2.0

package integration

import (
	"fmt"
	"strings"
	"testing"
)

// TestRouteLater: a main plugin may leave the route to the pod to a routing daemon. ADD of portmap warns, and the port works once the route is there.
func TestRouteLater(t *testing.T) {
	for _, backend := range []string{"nftables", "iptables"} {
		t.Run(backend, func(t *testing.T) {
			needBackend(t, backend)
			need(t, "portmap")
			lan := newLAN(t)
			shell(t, "ip route del default; ip -6 route del default")
			pod := newPod(t, plain(t)+"-pod")
			shell(t, "sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1")
			conf := object{"cniVersion": "1.1.0", "name": "later", "type": "portmap", "backend": backend,
				"runtimeConfig": object{"portMappings": ports(port(8080, 80, "tcp"))},
				"prevResult": object{"cniVersion": "1.1.0", "interfaces": []any{object{"name": "eth0", "sandbox": pod.Path}},
					"ips": []any{object{"address": "203.0.113.7/32", "interface": 0}, object{"address": "2001:db8:113::7/128", "interface": 0}}}}
			call := newCall("ADD", "portmap", pod, "later", conf)
			call.run(t).ok(t)
			call.with("CNI_COMMAND", "DEL").run(t).ok(t)
			before := watch(t, pod)
			if o := call.run(t).ok(t); !strings.Contains(o.stderr, "no route to the pod") {
				t.Errorf("ADD does not warn: %s", o.stderr)
			}
			call.with("CNI_COMMAND", "CHECK").run(t).ok(t)
			shell(t, fmt.Sprintf(`
				ip link add later0 type veth peer name eth0 netns %[1]s
				ip link set later0 up; ip addr add 169.254.1.1/32 dev later0; ip -6 addr add fe80::1/64 dev later0 nodad
				ip -n %[1]s link set eth0 up; ip -n %[1]s addr add 203.0.113.7/32 dev eth0; ip -n %[1]s -6 addr add 2001:db8:113::7/128 dev eth0 nodad
				ip -n %[1]s route add 169.254.1.1 dev eth0; ip -n %[1]s route add default via 169.254.1.1
				ip -n %[1]s -6 route add default via fe80::1 dev eth0
				ip route add 203.0.113.7 dev later0; ip -6 route add 2001:db8:113::7 dev later0`, pod.Name))
			server, err := serve(pod, 80)
			if err != nil {
				t.Fatal(err)
			}
			defer server.Close()
			reach(t, lan, nodeV4+":8080", pod)
			reach(t, lan, "["+nodeV6+"]:8080", pod)
			call.with("CNI_COMMAND", "CHECK").run(t).ok(t)
			shell(t, "ip link del later0")
			call.with("CNI_COMMAND", "DEL").run(t).ok(t)
			before.clean(t, "DEL")
		})
	}
}
