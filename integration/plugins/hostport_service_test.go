// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"fmt"
	"net"
	"os/exec"
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/harness"
)

// kubeServices returns, for each mode of kube-proxy, the commands that add and remove a Service with rules like kube-proxy's. The Service
// forwards port 8080 of the node to port 80 of a pod.
func kubeServices() map[string][2]string {
	return map[string][2]string{
		"iptables": {`iptables -w -t nat -N KUBE-SERVICES
			iptables -w -t nat -I PREROUTING -j KUBE-SERVICES; iptables -w -t nat -I OUTPUT -j KUBE-SERVICES
			iptables -w -t nat -A KUBE-SERVICES -d %s -p tcp --dport 8080 -j DNAT --to-destination %s:80`,
			"iptables -w -t nat -D PREROUTING -j KUBE-SERVICES; iptables -w -t nat -D OUTPUT -j KUBE-SERVICES; iptables -w -t nat -F KUBE-SERVICES; iptables -w -t nat -X KUBE-SERVICES"},
		"nftables": {`nft 'table ip kube-proxy {
				chain services { ip daddr %s tcp dport 8080 dnat to %s:80; }
				chain nat-prerouting { type nat hook prerouting priority dstnat; jump services; }
				chain nat-output { type nat hook output priority -100; jump services; }
			}'`, "nft delete table ip kube-proxy"},
	}
}

// TestServicesWin (S-01): if a Service and a hostPort have the same port, the Service gets the packets, whichever is older (CVE-2019-9946).
// Only if the chains of kube-proxy and portmap have the same priority, the kernel decides their order.
func TestServicesWin(t *testing.T) {
	harness.Program(t, "nft")
	harness.Program(t, "iptables")
	eachCrossing(t, harness.HostPort(), func(t *testing.T, c crossingLab) {
		for mode, service := range kubeServices() {
			for _, first := range []string{"Service", "hostPort"} {
				undecided := strings.HasSuffix(t.Name(), "/iptables") && mode == "nftables" && first == "Service"
				t.Run(mode+", first "+first, func(t *testing.T) { c.besideService(t, service, first == "Service", undecided) })
			}
		}
	})
}

func (c crossingLab) besideService(t *testing.T, service [2]string, first, undecided bool) {
	t.Helper()
	c.Must(t, "ADD", c.rtClient)
	add := func() { harness.Shell(t, fmt.Sprintf(service[0], harness.NodeV4, harness.IPv4Of(t, c.client))) }
	t.Cleanup(func() { _ = exec.Command("/bin/sh", "-c", service[1]).Run() })
	if first {
		harness.Shell(t, "nft flush ruleset") // pods of earlier tests registered the hooks of iptables before the Service did
		add()
	}
	c.Must(t, "ADD", c.rtWeb)
	if !first {
		add()
	}
	startSpeakers(t, c.web, "[::]:80")
	startSpeakers(t, c.client, "[::]:80")
	want := c.client.Name
	if undecided {
		want = c.web.Name
	}
	for _, q := range []netQuery{{c.lan, harness.NodeV4, want}, {nil, harness.NodeV4, want}, {c.third, families()[0].near, c.web.Name}} {
		if got, err := harness.Dial(q.from, net.JoinHostPort(q.address, "8080"), harness.TrafficLimit); got != q.want {
			t.Errorf("%s -> %s: %q answers, want %q (%v)", harness.NameOf(q.from), q.address, got, q.want, err)
		}
	}
	c.Must(t, "DEL", c.rtWeb)
	c.Must(t, "DEL", c.rtClient)
}
