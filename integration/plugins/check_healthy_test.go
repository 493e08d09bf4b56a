// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/harness"
)

// otherTables has chains like those of kube-proxy, Docker and firewalld, with lower, equal and higher priorities than Podlace's.
const otherTables = `
table ip kube-proxy {
	chain services { ip daddr 10.96.0.10 tcp dport 53 counter accept; }
	chain nat-prerouting { type nat hook prerouting priority dstnat; policy accept; jump services; }
	chain nat-output { type nat hook output priority -100; policy accept; jump services; }
	chain nat-postrouting { type nat hook postrouting priority srcnat; policy accept; meta mark & 0x4000 == 0x4000 masquerade; }
}
table inet firewalld {
	chain mangle_PREROUTING { type filter hook prerouting priority mangle + 10; policy accept; }
	chain nat_PREROUTING { type nat hook prerouting priority dstnat + 10; policy accept; tcp dport 2222 redirect to :22; }
	chain nat_POSTROUTING { type nat hook postrouting priority srcnat + 10; policy accept; oifname "lo" return; }
	chain filter_FORWARD { type filter hook forward priority filter + 10; policy accept; ct state { established, related } accept; }
}
table ip dockerd {
	chain first { type nat hook prerouting priority -101; policy accept; fib daddr type local counter; }
	chain raw { type filter hook prerouting priority raw; policy accept; ip daddr 127.0.0.0/8 iifname != "lo" drop; }
	chain late { type nat hook postrouting priority 200; policy accept; ip saddr 172.17.0.0/16 masquerade; }
}
table bridge filter {
	chain prerouting { type filter hook prerouting priority dstnat; policy accept; ether type arp accept; }
	chain forward { type filter hook forward priority filter; policy accept; }
}
`

// healthyPorts returns portmap configurations with each kind of port mapping, for which CHECK must succeed.
func healthyPorts() map[string][]any {
	port := func(hostPort, port int, protocol string, pairs ...any) object {
		return object{"hostPort": hostPort, "containerPort": port, "protocol": protocol}.With(pairs...)
	}
	ports := func(list ...any) []any { return []any{"runtimeConfig", object{"portMappings": list}} }
	return map[string][]any{
		"tcp":                ports(port(20001, 80, "tcp")),
		"udp":                ports(port(20001, 53, "udp")),
		"sctp":               ports(port(20001, 3868, "sctp")),
		"all protocols":      ports(port(20002, 1, "tcp"), port(20002, 1, "udp"), port(20002, 1, "sctp")),
		"two to one":         ports(port(20003, 80, "tcp"), port(20004, 80, "tcp")),
		"hostIP":             ports(port(20005, 80, "tcp", "hostIP", "127.0.0.1")),
		"hostIPs":            ports(port(20006, 80, "tcp", "hostIP", "127.0.0.1"), port(20006, 80, "tcp", "hostIP", "127.0.0.2")),
		"hostIP of IPv6":     ports(port(20007, 80, "tcp", "hostIP", "fd00:149::1")),
		"any IPv4":           ports(port(20008, 80, "tcp", "hostIP", "0.0.0.0")),
		"any IPv6":           ports(port(20009, 80, "tcp", "hostIP", "::")),
		"one port, two IPs":  ports(port(20010, 80, "tcp", "hostIP", "0.0.0.0"), port(20010, 81, "tcp", "hostIP", "::")),
		"many":               ports(port(20011, 80, "tcp"), port(20012, 81, "tcp"), port(20013, 82, "udp"), port(20014, 83, "udp")),
		"no snat":            append(ports(port(20015, 80, "tcp")), "snat", false),
		"masqAll":            append(ports(port(20016, 80, "tcp")), "masqAll", true),
		"no ports":           ports(),
		"no ports, no limit": append(ports(), "limits", object{}),
	}
}

// CHECK succeeds for all kinds of ports and limits, even if the node has other programs' tables.
func TestCheckAllowsTables(t *testing.T) {
	for i, backend := range []string{"nftables", "iptables"} {
		n := newNode(t, "well-"+backend, 149+i, backend)
		t.Run("C-66 "+backend, func(t *testing.T) {
			needTools(t, "nft", "tc")
			n := n.inSubtest(t)
			other := exec.Command("nft", "-f", "-")
			other.Stdin = strings.NewReader(otherTables)
			if out, err := other.CombinedOutput(); err != nil {
				t.Fatalf("%v: %s", err, out)
			}
			defer func() { _ = exec.Command("nft", "flush", "ruleset").Run() }()
			var pods []attachedPod
			for title, keys := range harness.InOrder(healthyPorts()) {
				if backend == "iptables" && strings.HasPrefix(title, "one port") {
					continue
				}
				pods = append(pods, healthyPod(n, title, keys))
			}
			if backend == "iptables" {
				pods = append(pods, n.withKeys(1, "conditionsV4", []any{"!", "-s", "192.0.2.0/24"}, "markMasqBit", 7).attach("healthy-conditions"))
			}
			checkAll := func() {
				t.Helper()
				for _, h := range pods {
					h.checkChain()
				}
			}
			checkAll()
			for _, verb := range []string{"STATUS", "reload"} {
				pods[0].restoreCalls(1)[verb]()
			}
			limits := exec.Command(filepath.Join(harness.BinDir(), "podlace"), "limits", pods[1].pod.Name, "--egress", "5M")
			if out, err := limits.CombinedOutput(); err != nil {
				t.Errorf("%v: %s", err, out)
			}
			checkAll()
			for _, h := range pods {
				h.delChain()
			}
		})
	}
}

func healthyPod(n testNode, title string, keys []any) attachedPod {
	n.Helper()
	if last := len(keys) - 2; keys[last] == "limits" {
		n, keys = n.withKeys(2, "runtimeConfig", keys[last+1]), keys[:last]
	}
	return n.withKeys(1, keys...).attach("healthy-" + strings.NewReplacer(" ", "-", ",", "").Replace(title))
}
