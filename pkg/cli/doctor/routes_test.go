// SPDX-License-Identifier: Apache-2.0

package doctor

import (
	"strings"
	"testing"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/bridge"
	"github.com/podlace/podlace/pkg/hostlocal"
)

// TestRoutes: a routing rule or route that diverts the packets of pods is reported until it is removed.
func TestRoutes(t *testing.T) {
	l := newLab(t)
	l.uplink("up0")
	l.command("ip", "-6", "route", "add", "default", "dev", "up0")
	ranges := []any{[]any{kerneltest.Object{"subnet": "10.93.0.0/29"}}, []any{kerneltest.Object{"subnet": "fd93::/64"}}}
	pod := kerneltest.Lab{T: t, Plugin: bridge.Plugin(hostlocal.Plugin()).Run, Pod: kerneltest.NewPod(t), Conf: kerneltest.Object{
		"cniVersion": "1.1.0", "name": "routed", "type": "bridge", "bridge": "cnidoc", "isGateway": true,
		"ipam": kerneltest.Object{"type": "host-local", "ranges": ranges}}}
	pod.OK(pod.Call("ADD", "web"))
	t.Cleanup(func() {
		pod.OK(pod.Call("DEL", "web"))
		l.command("ip", "link", "del", "cnidoc")
	})
	for _, c := range []struct{ spoil, want, restore string }{
		{"true", "", "true"},
		{"ip rule add to 10.93.0.0/29 lookup 77; ip route add default dev up0 table 77",
			"error the node's route to the pods of cnidoc leads to another link | the kernel sends packets for 10.93.0.2 to up0 | ip -4 rule; ip route get 10.93.0.2;",
			"ip rule del to 10.93.0.0/29 lookup 77; ip route flush table 77"},
		{"ip route add 10.93.0.2 dev up0", "error the node's route to the pods of cnidoc leads to another link | the kernel sends packets for 10.93.0.2 to up0",
			"ip route del 10.93.0.2"},
		{"ip rule add to 10.93.0.0/29 prohibit", "error the node has no route to the pods of cnidoc | route get 10.93.0.2: permission denied",
			"ip rule del to 10.93.0.0/29 prohibit"},
		{"ip rule add from 10.93.0.0/29 unreachable", "error packets from the pods of cnidoc have no route, although the node has one | " +
			"route get 198.51.100.1 from 10.93.0.2 iif cnidoc: ", "ip rule del from 10.93.0.0/29 unreachable"},
		{"ip -6 rule add from fd93::/64 prohibit", "error packets from the pods of cnidoc have no route, although the node has one | " +
			"route get 2001:db8:ffff::1 from fd93::2 iif cnidoc: ", "ip -6 rule del from fd93::/64 prohibit"},
		{"true", "", "true"},
	} {
		l.command("sh", "-c", c.spoil)
		found := l.problems("routes")
		if c.want == "" && len(found) > 0 || c.want != "" && (len(found) != 1 || !strings.HasPrefix(found[0], c.want)) {
			t.Errorf("%s: found %q, want %q", c.spoil, found, c.want)
		}
		l.command("sh", "-c", c.restore)
	}
}
