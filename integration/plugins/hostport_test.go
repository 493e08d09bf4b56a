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
	"github.com/podlace/podlace/pkg/sandbox"
)

// dns returns the port mappings of a pod that is the node's name server at all addresses or at hostIPs.
func dns(hostIPs ...string) map[string]any {
	var list []any
	for _, protocol := range []string{"tcp", "udp"} {
		if len(hostIPs) == 0 {
			list = append(list, harness.Port(53, 53, protocol))
		}
		for _, ip := range hostIPs {
			list = append(list, at(ip, harness.Port(53, 53, protocol)))
		}
	}
	return harness.Mappings(list...)
}

// TestPortOfOthers (S-06): hostPort 53 receives only packets that are addressed to the node. Packets from pods, the node and other
// machines to port 53 of other hosts reach those hosts (CVE-2025-67499). This also holds if a hostIP is another host's address.
func TestPortOfOthers(t *testing.T) {
	foreign := families()
	for title, x := range map[string]struct {
		caps  map[string]any
		taken bool // the packet is addressed to the node
	}{
		"every address":  {dns(), true},
		"foreign hostIP": {dns(foreign[0].resolver, foreign[1].resolver, foreign[0].third, foreign[1].third), false},
	} {
		t.Run(title, func(t *testing.T) {
			eachCrossing(t, x.caps, func(t *testing.T, c crossing) {
				c.life(t, func() { c.portOfOthers(t, x.taken) })
			})
		})
	}
}

func (c crossing) portOfOthers(t *testing.T, taken bool) {
	t.Helper()
	for _, pod := range []*sandbox.Pod{c.web, c.client, c.third} {
		speak(t, pod, "[::]:53")
	}
	web := ""
	if taken {
		web = c.web.Name
	}
	for _, p := range families() {
		speak(t, c.lan, net.JoinHostPort(p.lan, "53"), net.JoinHostPort(p.resolver, "53"))
		toClient, toWeb := harness.AddressOf(t, c.client, p.family), harness.AddressOf(t, c.web, p.family)
		answers(t, "53",
			question{c.lan, p.node, web}, question{c.third, p.near, web}, question{c.client, p.node, web}, question{nil, p.node, web},
			question{c.client, p.resolver, c.lan.Name}, question{c.client, p.third, c.third.Name}, question{c.client, toWeb, c.web.Name},
			question{c.web, p.resolver, c.lan.Name}, question{c.web, p.third, c.third.Name}, question{c.web, toClient, c.client.Name},
			question{nil, p.resolver, c.lan.Name}, question{nil, p.third, c.third.Name},
			question{nil, toClient, c.client.Name}, question{nil, toWeb, c.web.Name},
			question{c.lan, p.third, c.third.Name}, question{c.third, p.lan, c.lan.Name}, question{c.third, p.resolver, c.lan.Name})
	}
}

// TestHostIP (S-28): a pod has its port at the node's addresses that its hostIP names. A hostIP with one address takes precedence over
// one with all addresses of the family, in any order. Two pods cannot both have all addresses.
func TestHostIP(t *testing.T) {
	eachCrossing(t, harness.HostPort(), func(t *testing.T, c crossing) {
		for _, x := range []struct{ title, all, four, six string }{
			{"none", "", "all", "all"}, {"0.0.0.0", "0.0.0.0", "all", ""}, {"::", "::", "", "all"},
		} {
			for _, first := range []string{"all", "one"} {
				t.Run(x.title+", first "+first, func(t *testing.T) { c.hostIP(t, x.all, x.four, x.six, first) })
			}
		}
		t.Run("127.0.0.1", c.onlyLoopback)
		t.Run("both of one pod", c.bothOfOne)
	})
}

// web8080 returns a mapping of port 8080 at the given addresses of the node.
func web8080(hostIPs ...string) map[string]any {
	var list []any
	for _, ip := range hostIPs {
		for _, protocol := range []string{"tcp", "udp"} {
			list = append(list, at(ip, harness.Port(8080, 80, protocol)))
		}
	}
	return harness.Mappings(list...)
}

func (c crossing) hostIP(t *testing.T, all, four, six, first string) {
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
	speak(t, c.web, "[::]:80")
	speak(t, c.client, "[::]:80")
	holder := map[string]string{"all": c.web.Name}
	asked := func(one string) {
		t.Helper()
		for i, p := range families() {
			rest := holder[[]string{four, six}[i]]
			answers(t, "8080", question{c.third, p.near, rest}, question{nil, p.near, rest},
				question{c.lan, p.node, cmp.Or(one, rest)}, question{nil, p.node, cmp.Or(one, rest)}, question{c.web, p.node, cmp.Or(one, rest)})
		}
		answers(t, "8080", question{nil, "127.0.0.1", holder[four]})
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

// onlyLoopback: hostIP 127.0.0.1 serves only the node, and another pod may have the port at other addresses.
func (c crossing) onlyLoopback(t *testing.T) {
	t.Helper()
	c.rtWeb.CapabilityArgs, c.rtClient.CapabilityArgs = web8080("127.0.0.1"), web8080(harness.NodeV4)
	c.life(t, func() {
		speak(t, c.web, "[::]:80")
		speak(t, c.client, "[::]:80")
		answers(t, "8080", question{nil, "127.0.0.1", c.web.Name}, question{nil, harness.NodeV4, c.client.Name},
			question{c.lan, harness.NodeV4, c.client.Name}, question{c.third, families()[0].near, ""}, question{nil, families()[0].near, ""})
	})
}

// bothOfOne: if one pod has a port both at one address and at all addresses, the mapping at one address takes precedence in any order.
func (c crossing) bothOfOne(t *testing.T) {
	t.Helper()
	one, all := at(harness.NodeV4, harness.Port(8080, 81, "tcp")), harness.Port(8080, 80, "tcp")
	for _, both := range [][]any{{one, all}, {all, one}} {
		c.rtWeb.CapabilityArgs, c.rtClient.CapabilityArgs = harness.Mappings(both...), nil
		c.life(t, func() {
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
