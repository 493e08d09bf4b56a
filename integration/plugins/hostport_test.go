// SPDX-License-Identifier: Apache-2.0

package plugins

import (
	"cmp"
	"errors"
	"net"
	"slices"
	"strings"
	"testing"

	"github.com/containernetworking/cni/libcni"
	"github.com/containernetworking/cni/pkg/types"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/harness"
	"github.com/podlace/podlace/pkg/cli/sandbox"
)

// dnsPorts returns port mappings for port 53, at all addresses of the node or only at hostIPs.
func dnsPorts(hostIPs ...string) map[string]any {
	var list []any
	for _, protocol := range []string{"tcp", "udp"} {
		if len(hostIPs) == 0 {
			list = append(list, harness.Port(53, 53, protocol))
		}
		for _, ip := range hostIPs {
			list = append(list, atHostIP(ip, harness.Port(53, 53, protocol)))
		}
	}
	return harness.Mappings(list...)
}

// TestPortOfOthers (S-06): hostPort 53 gets only packets to addresses of the node. Those from pods, the node and other machines to port 53
// of another host reach that host (CVE-2025-67499), even if a pod's hostIP is its address.
func TestPortOfOthers(t *testing.T) {
	foreign := families()
	for title, x := range map[string]struct {
		caps  map[string]any
		taken bool // the packet is addressed to the node
	}{
		"every address":  {dnsPorts(), true},
		"foreign hostIP": {dnsPorts(foreign[0].resolver, foreign[1].resolver, foreign[0].third, foreign[1].third), false},
	} {
		t.Run(title, func(t *testing.T) {
			eachCrossing(t, x.caps, func(t *testing.T, c crossingLab) {
				c.runLife(t, func() { c.portOfOthers(t, x.taken) })
			})
		})
	}
}

func (c crossingLab) portOfOthers(t *testing.T, taken bool) {
	t.Helper()
	for _, pod := range []*sandbox.Pod{c.web, c.client, c.third} {
		startSpeakers(t, pod, "[::]:53")
	}
	web := ""
	if taken {
		web = c.web.Name
	}
	for _, p := range families() {
		startSpeakers(t, c.lan, net.JoinHostPort(p.lan, "53"), net.JoinHostPort(p.resolver, "53"))
		toClient, toWeb := harness.AddressOf(t, c.client, p.family), harness.AddressOf(t, c.web, p.family)
		checkAnswers(t, "53",
			netQuery{c.lan, p.node, web}, netQuery{c.third, p.near, web}, netQuery{c.client, p.node, web}, netQuery{nil, p.node, web},
			netQuery{c.client, p.resolver, c.lan.Name}, netQuery{c.client, p.third, c.third.Name}, netQuery{c.client, toWeb, c.web.Name},
			netQuery{c.web, p.resolver, c.lan.Name}, netQuery{c.web, p.third, c.third.Name}, netQuery{c.web, toClient, c.client.Name},
			netQuery{nil, p.resolver, c.lan.Name}, netQuery{nil, p.third, c.third.Name},
			netQuery{nil, toClient, c.client.Name}, netQuery{nil, toWeb, c.web.Name},
			netQuery{c.lan, p.third, c.third.Name}, netQuery{c.third, p.lan, c.lan.Name}, netQuery{c.third, p.resolver, c.lan.Name})
	}
}

// TestHostIP (S-28): a hostPort works only at the node's addresses that its hostIP covers. A mapping for one address takes precedence over
// one for all of the family, whichever is older. Only one pod can have a port at all addresses.
func TestHostIP(t *testing.T) {
	eachCrossing(t, harness.HostPort(), func(t *testing.T, c crossingLab) {
		for _, x := range []struct{ title, all, four, six string }{
			{"none", "", "all", "all"}, {"0.0.0.0", "0.0.0.0", "all", ""}, {"::", "::", "", "all"},
		} {
			for _, first := range []string{"all", "one"} {
				t.Run(x.title+", first "+first, func(t *testing.T) { c.hostIP(t, x.all, x.four, x.six, first) })
			}
		}
		t.Run("127.0.0.1", c.testOnlyLoopback)
		t.Run("both of one pod", c.testBothMappings)
	})
}

// web8080 returns port mappings of port 8080 at the given addresses of the node.
func web8080(hostIPs ...string) map[string]any {
	var list []any
	for _, ip := range hostIPs {
		for _, protocol := range []string{"tcp", "udp"} {
			list = append(list, atHostIP(ip, harness.Port(8080, 80, protocol)))
		}
	}
	return harness.Mappings(list...)
}

func (c crossingLab) hostIP(t *testing.T, all, four, six, first string) {
	t.Helper()
	one := families()
	c.rtWeb.CapabilityArgs, c.rtClient.CapabilityArgs = web8080(all), web8080(one[0].node, one[1].node)
	order := []*libcni.RuntimeConf{c.rtWeb, c.rtClient}
	if first == "one" {
		slices.Reverse(order)
	}
	for _, rt := range order {
		c.Must(t, "ADD", rt)
	}
	startSpeakers(t, c.web, "[::]:80")
	startSpeakers(t, c.client, "[::]:80")
	holder := map[string]string{"all": c.web.Name}
	asked := func(one string) {
		t.Helper()
		for i, p := range families() {
			rest := holder[[]string{four, six}[i]]
			checkAnswers(t, "8080", netQuery{c.third, p.near, rest}, netQuery{nil, p.near, rest},
				netQuery{c.lan, p.node, cmp.Or(one, rest)}, netQuery{nil, p.node, cmp.Or(one, rest)}, netQuery{c.web, p.node, cmp.Or(one, rest)})
		}
		checkAnswers(t, "8080", netQuery{nil, "127.0.0.1", holder[four]})
	}
	asked(c.client.Name)
	other := harness.Named(harness.NewPod(t, "hostip-other"), web8080(""))
	var refused *types.Error
	if _, err := c.Do("ADD", other, nil); !errors.As(err, &refused) || refused.Code != 104 || !strings.Contains(refused.Msg, c.web.Name) {
		t.Errorf("a second pod with all addresses: %v", err)
	}
	c.Must(t, "DEL", other)
	for _, rt := range order {
		c.Must(t, "CHECK", rt)
	}
	c.Must(t, "DEL", c.rtClient)
	asked("")
	c.Must(t, "DEL", c.rtWeb)
	c.oracle.Clean(t, "two pods with one port")
}

// testOnlyLoopback: a hostPort at 127.0.0.1 is reachable only from the node. Another pod can have the port at another address.
func (c crossingLab) testOnlyLoopback(t *testing.T) {
	t.Helper()
	c.rtWeb.CapabilityArgs, c.rtClient.CapabilityArgs = web8080("127.0.0.1"), web8080(harness.NodeV4)
	c.runLife(t, func() {
		startSpeakers(t, c.web, "[::]:80")
		startSpeakers(t, c.client, "[::]:80")
		checkAnswers(t, "8080", netQuery{nil, "127.0.0.1", c.web.Name}, netQuery{nil, harness.NodeV4, c.client.Name},
			netQuery{c.lan, harness.NodeV4, c.client.Name}, netQuery{c.third, families()[0].near, ""}, netQuery{nil, families()[0].near, ""})
	})
}

// testBothMappings: of a pod's two mappings of a port, the one for a single address takes precedence over that for all, in any order.
func (c crossingLab) testBothMappings(t *testing.T) {
	t.Helper()
	one, all := atHostIP(harness.NodeV4, harness.Port(8080, 81, "tcp")), harness.Port(8080, 80, "tcp")
	for _, both := range [][]any{{one, all}, {all, one}} {
		c.rtWeb.CapabilityArgs, c.rtClient.CapabilityArgs = harness.Mappings(both...), nil
		c.runLife(t, func() {
			server, err := harness.Serve(c.web, 80)
			if err != nil {
				t.Fatal(err)
			}
			defer server.Close()
			harness.Reach(t, nil, net.JoinHostPort(families()[0].near, "8080"), c.web)
			if got, err := harness.Dial(c.lan, harness.NodeV4+":8080", harness.TrafficLimit); !errors.Is(err, unix.ECONNREFUSED) {
				t.Errorf("no process listens at the pod's port 81, and %q answers: %v", got, err)
			}
		})
	}
}
