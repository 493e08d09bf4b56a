// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/restore"
)

// TestProblemsLogged: each problem that keeps the node from becoming ready is logged once with its remedy, also at the start, and so is its
// end.
func TestProblemsLogged(t *testing.T) {
	l := newLab(t, `"addressCIDRs": ["198.51.100.0/24"]`)
	l.start()
	const line = `what="own node" why="node \"n1\": InternalIP \"2001:db8::1\" is not in addressCIDRs" do="correct addressCIDRs`
	l.await("the problem is logged", func() bool { return l.log.count(line) == 1 })
	l.await("the status says it, too", func() bool { return l.says("own node", "not in addressCIDRs", "correct addressCIDRs") })
	// A slow machine may need longer than unknownFor to get the nodes, which is a problem until then.
	const all, nodes = `level=WARN msg="a problem of this node" `, `level=WARN msg="a problem of this node" what=nodes`
	if l.status().Ready || l.log.count(all)-l.log.count(nodes) != 1 {
		t.Errorf("%+v\n%s", l.status(), l.log)
	}
	l.put("config/config.json", strings.Replace(l.read("config/config.json"), "198.51.100.0/24",
		"0.0.0.0/1\", \"128.0.0.0/1\", \"2001:db8::/32", 1))
	l.await("ready", func() bool { return l.status().Ready })
	if l.log.count(line) != 1 || l.log.count(`msg="a problem of this node has ended" what="own node"`) != 1 {
		t.Errorf("%s", l.log)
	}
}

// TestSmallMTU: with an MTU at which each ADD would fail, the node is not ready. If it has pods, they keep the previous MTU.
func TestSmallMTU(t *testing.T) {
	l := newLab(t, `"mtu": 600`)
	l.start()
	l.await("the MTU is told", func() bool {
		return l.says("mtu", "mtu 600 is too small for podCIDR fd00:10:244:1::/64: IPv6 needs at least 1280", "set mtu")
	})
	if l.status().Ready || l.node().PodCIDRs != nil || l.read("net.d/"+conflistName) != "" {
		t.Errorf("%+v", l.status())
	}
	l.put("config/config.json", strings.Replace(l.read("config/config.json"), `"mtu": 600`, `"mtu": 1300`, 1))
	l.await("ready", func() bool { return l.status().Ready && l.node().MTU == 1300 })
	l.put("config/config.json", strings.Replace(l.read("config/config.json"), `"mtu": 1300`, `"mtu": 700`, 1))
	l.await("not ready", func() bool { return !l.status().Ready })
	l.api.put(l.peer(4))
	l.has(full(2, 3, 4))
	if l.node().MTU != 1300 {
		t.Errorf("%+v", l.node())
	}
}

// TestYounger: an older node has this node's podCIDR. No pods may start here, and the problem says how to get another podCIDR.
func TestYounger(t *testing.T) {
	l := newLab(t)
	young := l.peer(1)
	young.CreationTimestamp = metav1.NewTime(time.Now())
	young.Spec.PodCIDRs[0] = "10.244.2.0/24"
	l.api.put(young)
	l.start()
	l.await("it is told", func() bool {
		return l.says("own node", "its podCIDR 10.244.2.0/24 overlaps 10.244.2.0/24 of node n2, which is older", "kubectl delete node n1")
	})
	if l.status().Ready || l.node().PodCIDRs != nil || l.read("net.d/"+conflistName) != "" || l.says("conflict:") {
		t.Errorf("%+v", l.status())
	}
	l.api.put(l.peer(1))
	l.await("ready", func() bool { return l.status().Ready })
}

// TestPartOfPodCIDR: another program's route to a part of a peer's podCIDR is reported until it is deleted, even with an unreachable API
// server.
func TestPartOfPodCIDR(t *testing.T) {
	l := newLab(t)
	l.times.conflictPause = 50 * time.Millisecond
	link, err := netlink.LinkByName("up0")
	kerneltest.Must(t, err)
	route := &netlink.Route{Dst: kernel.IPNet(netip.MustParsePrefix("10.244.2.128/25")), LinkIndex: link.Attrs().Index,
		Gw: []byte{192, 0, 2, 254}, Protocol: unix.RTPROT_STATIC}
	kerneltest.Must(t, netlink.RouteAdd(route))
	l.api.Refuse = 503
	l.start()
	l.await("the API server refuses", func() bool { return l.says("API server") })
	l.api.mu.Lock()
	l.api.Refuse = 0
	l.api.mu.Unlock()
	const says = "a part of it has a route of another program: 10.244.2.128/25 via 192.0.2.254 dev up0 proto static"
	l.await("the route is named", func() bool { return l.says("node n2 10.244.2.0/24", says) })
	kerneltest.Must(t, netlink.RouteDel(route))
	l.await("it is gone", func() bool { return !l.says(says) })
}

// TestConflistFindings: an unknown key of the conflist is reported with its line.
func TestConflistFindings(t *testing.T) {
	l := newLab(t)
	l.put("config/"+conflistName, strings.Replace(testConflist, `{"type": "podlace-bridge"`, `{"type": "podlace-bridge", "isGatway": true`, 1))
	l.ready()
	if !l.says("conflist", conflistName+":1:83: plugins[0].isGatway", "ConfigMap") || l.log.count("isGatway") != 1 {
		t.Errorf("%+v", l.status())
	}
	l.put("config/"+conflistName, testConflist)
	l.await("it is corrected", func() bool { return !l.says("isGatway") })
}

func TestNodeFileIsFolder(t *testing.T) {
	l := newLab(t)
	kerneltest.Must(t, os.MkdirAll("/run/podlace/node.json", 0o755))
	l.start()
	l.await("it is named", func() bool { return l.says("node.json", "remove what is at /run/podlace/node.json") })
	kerneltest.Must(t, os.Remove("/run/podlace/node.json"))
	l.await("ready", func() bool { return l.status().Ready })
}

// TestContestsApart: another program undoes each repair of one kind of object, which does not delay repairs of other kinds.
func TestContestsApart(t *testing.T) {
	c, now := contests{}, time.Now()
	for range restore.FreeRepairs {
		c.repaired("route", now)
		c.repaired("conflist", now)
	}
	if pause := c.wait(now); pause != 0 {
		t.Errorf("%v after %d repairs of each", pause, restore.FreeRepairs)
	}
	if !c.repaired("route", now) || c.wait(now) != time.Second {
		t.Error("one more begins a contest")
	}
}
