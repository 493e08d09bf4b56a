// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"testing"

	"github.com/podlace/podlace/integration/harness"
)

// A pod gets IPv4, IPv6, hostPort and limits, and loses them, although no program is in PATH and the pod's namespace has IPv6 off
// (containernetworking/plugins#1225 and #1280).
func TestBareNode(t *testing.T) {
	harness.Need(t, "podlace-pod")
	pod := harness.NewPod(t, "bare")
	harness.Shell(t, "ip netns exec "+pod.Name+" sysctl -qw net.ipv6.conf.all.disable_ipv6=1 net.ipv6.conf.default.disable_ipv6=1")
	conf := object{"cniVersion": "1.1.0", "name": "bare", "type": "podlace-pod", "bridge": "bare0", "isDefaultGateway": true, "ipMasq": true,
		"antiSpoof": true, "ipam": object{"type": "host-local", "ranges": []any{[]any{object{"subnet": "10.73.0.0/24"}},
			[]any{object{"subnet": "fd73::/64"}}}},
		"runtimeConfig": object{"portMappings": []any{harness.Port(20730, 80, "udp")}, "bandwidth": object{"ingressRate": 1000000}}}
	call := func(verb string) harness.Outcome {
		return harness.NewCall(verb, "podlace-pod", pod, "bare", conf).With("PATH", "/nonexistent", "CNI_PATH", "/nonexistent").Run(t).OK(t)
	}
	t.Cleanup(func() { harness.Shell(t, "ip link del bare0") })
	conf = conf.With("prevResult", harness.RawObject(t, call("ADD").Stdout))
	call("CHECK")
	call("DEL")
}
