// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	corev1 "k8s.io/api/core/v1"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/nodefile"
	"github.com/podlace/podlace/pkg/store"
)

// TestStart installs plugins, routes, node.json and conflist. Routes to the node behind the router are impossible: the agent reports them
// missing and still becomes ready.
func TestStart(t *testing.T) {
	l := newLab(t).ready()
	if got := l.routes(); !slices.Equal(got, full(2, 3)) {
		t.Errorf("routes %q", got)
	}
	if n := l.node(); fmt.Sprint(n.PodCIDRs) != "[10.244.1.0/24 fd00:10:244:1::/64]" || len(n.ClusterCIDRs) != 2 || n.MTU != 1500 {
		t.Errorf("%+v", n)
	}
	if l.read("net.d/"+conflistName) != testConflist {
		t.Error("no conflist")
	}
	for _, p := range programs() {
		if l.read("bin/"+p.to) != l.read("plugins/"+p.from) {
			t.Errorf("%s is not as in the image", p.to)
		}
		if info, err := os.Stat(filepath.Join(l.dir, "bin", p.to)); err != nil || info.Mode().Perm() != 0o755 {
			t.Errorf("%s: %v %v", p.to, info, err)
		}
	}
	if !l.says("node n9 10.244.9.0/24", "refused", "198.51.100.9 shares no link", "set offLink to vxlan") || l.log.count("node=n9") != 1 {
		t.Errorf("%+v", l.status().Problems)
	}
}

// TestNodeWithoutPodsForwards: the agent enables forwarding of both families, without which a NodePort does not answer through a node
// whose first pod has not come yet. The default route of a router advertisement stays. With "routes": false the agent sets nothing.
func TestNodeWithoutPodsForwards(t *testing.T) {
	for extra, want := range map[string]bool{`"routes": true`: true, `"routes": false`: false} {
		t.Run(extra, func(t *testing.T) {
			host, err := kernel.Host()
			kerneltest.Must(t, err, host.Set(kernel.Sysctl{Path: "ipv4/ip_forward", Value: "0"},
				kernel.Sysctl{Path: "ipv6/conf/all/forwarding", Value: "0"}))
			defer host.Close()
			l := newLab(t, extra)
			up0, err := netlink.LinkByName("up0")
			kerneltest.Must(t, err, host.Set(kernel.Sysctl{Path: "ipv6/conf/up0/accept_ra", Value: "1"}),
				netlink.RouteAdd(&netlink.Route{LinkIndex: up0.Attrs().Index, Gw: net.ParseIP("2001:db8::ff"), Protocol: unix.RTPROT_RA}))
			l.ready()
			for _, is4 := range []bool{true, false} {
				if on, err := host.Forwards(is4); err != nil || on != want {
					t.Errorf("IPv4 %t: forwards %t, %v", is4, on, err)
				}
			}
			if links, err := host.AdvertisedUplinks(); err != nil || !slices.Contains(links, "up0") {
				t.Errorf("links with an advertised default route: %q, %v", links, err)
			}
			acceptRA := map[bool]string{true: "2", false: "1"}[want]
			if value, err := host.Get("ipv6/conf/up0/accept_ra"); err != nil || value != acceptRA {
				t.Errorf("accept_ra = %q, %v", value, err)
			}
		})
	}
}

// TestLife adds, changes and deletes nodes, and compares the routes after each step.
func TestLife(t *testing.T) {
	l := newLab(t).ready()
	l.api.put(l.peer(4))
	l.has(full(2, 3, 4))
	l.api.remove("n4", false)
	l.has(full(2, 3))
	l.api.remove("n3", true) // while the watch is interrupted
	l.api.hangUp(true)
	l.has(full(2))
	n2 := l.peer(2)
	n2.Status.Addresses[1].Address = "192.0.2.254"
	l.api.put(n2)
	l.has([]string{"10.244.1.0/24", "10.244.2.0/24 192.0.2.254", "fd00:10:244:1::/64", "fd00:10:244:2::/64 2001:db8::2"})
	n2.Spec.PodCIDRs[0] = "10.244.77.0/24"
	l.api.put(n2.DeepCopy())
	l.has([]string{"10.244.1.0/24", "10.244.77.0/24 192.0.2.254", "fd00:10:244:1::/64", "fd00:10:244:2::/64 2001:db8::2"})
	own := l.peer(1)
	own.Spec.PodCIDRs = []string{"10.244.55.0/24"}
	l.api.put(own)
	l.await("node.json again", func() bool { return fmt.Sprint(l.node().PodCIDRs) == "[10.244.55.0/24]" })
	l.has([]string{"10.244.55.0/24", "10.244.77.0/24 192.0.2.254", "fd00:10:244:2::/64 2001:db8::2"})
}

// TestOwnNode: without a podCIDR of its own, or after its Node object was deleted, the agent changes nothing and says why.
func TestOwnNode(t *testing.T) {
	l := newLab(t)
	own := l.peer(1)
	own.Spec.PodCIDRs = nil
	l.api.put(own)
	l.start()
	l.await("a reason", func() bool { return l.says("own node", "podCIDR", "--allocate-node-cidrs") })
	if l.status().Ready || l.read("net.d/"+conflistName) != "" || l.node().PodCIDRs != nil || len(l.routes()) > 0 {
		t.Errorf("ready %t, %q, %+v, %q", l.status().Ready, l.read("net.d/"+conflistName), l.node(), l.routes())
	}
	l.api.put(l.peer(1))
	l.await("ready", func() bool { return l.status().Ready })
	l.has(full(2, 3))
	node := l.node()
	l.api.remove("n1", false)
	l.await("the deletion is told", func() bool { return l.says("own node", "is gone") })
	l.api.remove("n2", false) // ignored, because the list lacks the own node
	l.api.put(l.peer(4))
	l.has(full(2, 3, 4))
	if fmt.Sprint(l.node()) != fmt.Sprint(node) || !l.status().Ready {
		t.Errorf("%+v, ready %t", l.node(), l.status().Ready)
	}
	l.api.put(l.peer(1))
	l.has(full(3, 4))
	l.await("no problem of the own node", func() bool { return !l.says("own node") })
}

// TestSuspiciousList: the list lacks the nodes of more than half of the routes. These are deleted only if it stays so for a while, which
// also holds after a restart.
func TestSuspiciousList(t *testing.T) {
	l := newLab(t)
	for i := 4; i <= 8; i++ {
		l.api.put(l.peer(i))
	}
	l.ready()
	l.has(full(2, 3, 4, 5, 6, 7, 8))
	l.stop()
	for _, name := range []string{"n2", "n4", "n5", "n6", "n7", "n8"} {
		l.api.remove(name, true)
	}
	l.start()
	l.await("the suspicion is told", func() bool { return l.says("nodes", "12 of 16 routes have no node") })
	l.api.put(l.peer(10)) // additions take effect at once
	l.has(full(2, 3, 4, 5, 6, 7, 8, 10))
	if l.log.count("suspicious") != 1 {
		t.Error("want one line about the list")
	}
	l.stop()
	l.times.trustDelay = 500 * time.Millisecond
	l.start()
	l.has(full(3, 10))
	l.await("no suspicion", func() bool { return !l.says("have no node") })
}

// TestEmptyList: an empty list of nodes changes nothing.
func TestEmptyList(t *testing.T) {
	l := newLab(t).ready()
	l.times.trustDelay = 0
	l.stop()
	for _, name := range []string{"n1", "n2", "n3", "n9"} {
		l.api.remove(name, true)
	}
	l.start()
	l.await("the reason", func() bool { return l.says("own node", "no node object") })
	if got := l.routes(); !slices.Equal(got, full(2, 3)) || l.node().PodCIDRs == nil || l.read("net.d/"+conflistName) == "" {
		t.Errorf("%q, %+v", got, l.node())
	}
}

// TestAPIAway: the API server is unreachable at the start, which the agent reports without changing anything. Once it answers, the
// cluster's changes are applied.
func TestAPIAway(t *testing.T) {
	l := newLab(t).ready()
	l.stop()
	l.api.mu.Lock()
	l.api.Refuse = 503
	l.api.mu.Unlock()
	kerneltest.Must(t, os.Remove(filepath.Join(l.dir, "net.d", conflistName)))
	l.start()
	l.await("the reason", func() bool { return l.says("API server", "not watched", "Service Unavailable") })
	if got := l.routes(); !slices.Equal(got, full(2, 3)) {
		t.Errorf("%q", got)
	}
	if l.read("net.d/"+conflistName) != testConflist {
		t.Error("the conflist is not back: pods could start, as node.json is there")
	}
	l.api.mu.Lock()
	l.api.Refuse = 0
	l.api.mu.Unlock()
	l.api.put(l.peer(4))
	l.has(full(2, 3, 4))
	l.await("no word of the API server", func() bool { return !l.says("API server") && l.status().Ready })
	// If it fails later, all routes stay and the agent stays ready.
	l.api.mu.Lock()
	l.api.Refuse = 503
	l.api.mu.Unlock()
	l.api.hangUp(true)
	l.await("the reason", func() bool { return l.says("API server") })
	if !l.status().Ready || !slices.Equal(l.routes(), full(2, 3, 4)) {
		t.Errorf("ready %t, %q", l.status().Ready, l.routes())
	}
}

// TestByHand: the conflist waits for the agent's node.json if one made by hand lacks the cluster's CIDRs.
func TestByHand(t *testing.T) {
	l := newLab(t)
	l.api.Refuse = 503
	kerneltest.Must(t, os.MkdirAll(store.Root, 0o755), os.WriteFile(nodefile.Path, []byte(`{"podCIDRs": ["10.244.1.0/24", "fd00:10:244:1::/64"]}`), 0o644))
	l.start()
	l.await("the reason", func() bool { return l.says("API server", "not watched", "Service Unavailable") })
	if l.read("net.d/"+conflistName) != "" {
		t.Error("the conflist is there before the cluster's CIDRs")
	}
	l.api.mu.Lock()
	l.api.Refuse = 0
	l.api.mu.Unlock()
	l.await("the conflist", func() bool { return l.read("net.d/"+conflistName) == testConflist && len(l.node().ClusterCIDRs) > 0 })
}

// TestBadNodes: an invalid Node object affects only the routes to its node, and the status names the node with the reason.
func TestBadNodes(t *testing.T) {
	l := newLab(t)
	bad := map[string][2][]string{
		"no-address":                        {{"10.244.20.0/24"}, nil},
		"other-family":                      {{"fd00:10:244:21::/64"}, {"192.0.2.21"}},
		"all":                               {{"0.0.0.0/0"}, {"192.0.2.22"}},
		"one":                               {{"10.244.23.1/32"}, {"192.0.2.23"}},
		"loopback":                          {{"127.1.0.0/16"}, {"192.0.2.24"}},
		"uplink":                            {{"192.0.2.0/24"}, {"192.0.2.25"}},
		"three":                             {{"10.244.26.0/24", "fd00:10:244:26::/64", "10.244.27.0/24"}, {"192.0.2.26", "2001:db8::26"}},
		"same-address":                      {{"10.244.28.0/24"}, {"192.0.2.3"}},
		"same-podcidr":                      {{"10.244.2.0/24"}, {"192.0.2.29"}},
		"no-cidr":                           {{"ten"}, {"192.0.2.30"}},
		"no-ip":                             {{"10.244.31.0/24"}, {"n31"}},
		"within":                            {{"10.244.0.0/16"}, {"192.0.2.32"}},
		"without":                           {nil, {"192.0.2.33"}},
		strings.Repeat("long.", 50) + "end": {{"::/0"}, {"192.0.2.34"}},
	}
	for name, n := range bad {
		object := nodeObject(name, n[0], n[1])
		object.CreationTimestamp.Time = time.Unix(2_000_000, 0)
		l.api.put(object)
	}
	good := l.peer(4)
	good.Name = strings.Repeat("long.", 50) + "fin"
	l.api.put(good)
	l.ready()
	for name := range bad {
		if !l.says("node "+name) || len(strings.SplitN(l.state(name), " ", 2)) < 2 {
			t.Errorf("%s: %q: want a reason", name, l.state(name))
		}
	}
	l.has(full(2, 3, 4)) // the other nodes keep their routes
	if l.state(good.Name) != "direct" {
		t.Errorf("%s: %q", good.Name, l.state(good.Name))
	}
	// Only some of the nodes are logged, to limit the log.
	if l.log.count("a node is not reached") != mostLogged || l.log.count(fmt.Sprintf("nodes=%d", len(bad)+1-mostLogged)) != 1 {
		t.Error("want ten lines about nodes, and one about the others")
	}
	for name, n := range bad {
		l.api.remove(name, false)
		l.await(name+" is gone", func() bool { return l.state(name) == "" })
		lines := l.log.count("node=" + name + " ")
		l.api.put(nodeObject(name, n[0], n[1]))
		l.await(name+" is named in the log", func() bool { return l.log.count("node="+name+" ") == lines+1 })
	}
}

// TestFailedRoute: a route that the kernel refuses is retried, and delays the first node.json only for a limited time.
func TestFailedRoute(t *testing.T) {
	l := newLab(t)
	l.times.firstFileDelay = 2 * time.Second
	free := l.blockNexthop("n2")
	l.start()
	l.await("the wait is told", func() bool { return l.says("node.json", "waits for failing routes") })
	if _, err := os.Stat(nodefile.Path); err == nil || l.read("net.d/"+conflistName) != "" || l.status().Ready {
		t.Error("node.json or the conflist came before the routes")
	}
	l.await("ready", func() bool { return l.status().Ready })
	if !strings.HasPrefix(l.state("n2"), "failed") || !l.says("node n2", "belongs to another program") {
		t.Errorf("%q", l.state("n2"))
	}
	free()
	l.has(full(2, 3))
	l.await("fine", func() bool { return l.state("n2") == "direct" })
	if l.log.count("reached again") == 0 {
		t.Error("recovery is not told")
	}
}

// TestConfigChanges: a changed configuration takes effect at once, also in a ConfigMap volume, where only a symlink changes. An invalid one
// has no effect.
func TestConfigChanges(t *testing.T) {
	l := newLab(t)
	l.api.put(nodeObject("n8", []string{"10.244.8.0/24"}, []string{"198.51.100.8"}))
	l.ready()
	before := l.read("config/config.json")
	l.put("config/config.json", strings.Replace(before, "{", "{\n\"offlink\": \"fabric\", ", 1))
	l.await("the error is told", func() bool { return l.says("configuration", "config.json:2:1: offlink: unknown key", "offLink") })
	if !strings.HasPrefix(l.state("n8"), "refused") || !l.status().Ready {
		t.Errorf("%q, ready %t", l.state("n8"), l.status().Ready)
	}
	l.put("config/config.json", strings.Replace(before, "{", "{\"offLink\": \"fabric\", \"mtu\": 1400, ", 1))
	l.await("fabric", func() bool { return l.state("n8") == "fabric" && l.node().MTU == 1400 })
	if l.says("configuration") || l.log.count("the new configuration is invalid") != 1 {
		t.Error("the error is told again")
	}
	l.put("config/"+conflistName, strings.Replace(testConflist, "1.0.0", "1.1.0", 1))
	l.await("the new conflist", func() bool { return strings.Contains(l.read("net.d/"+conflistName), "1.1.0") })
	l.put("config/"+conflistName, strings.Replace(testConflist, "podlace-portmap", "podlace-portmop", 1))
	l.await("the missing plugin is told", func() bool { return l.says("conflist", "podlace-portmop") && !l.status().Ready })
	if strings.Contains(l.read("net.d/"+conflistName), "portmop") {
		t.Error("a conflist without its plugins")
	}
}

// TestLaterConfig changes a key that needs a restart, which is logged once and stays in the status until then. All other keys take effect
// at once.
func TestLaterConfig(t *testing.T) {
	l := newLab(t)
	a, list := l.steps()
	list(1, 2, 3)
	a.step(because(onStart))
	before := l.read("config/config.json")
	l.put("config/config.json", strings.Replace(before, "{", `{"apiServer": "https://192.0.2.99:6443", "mtu": 1400, `, 1))
	for range 3 {
		a.step(because(onFiles))
	}
	told := func() bool {
		return slices.ContainsFunc(a.problems, func(p Problem) bool { return p.What == "configuration" && strings.Contains(p.Why, "apiServer") })
	}
	lines := l.log.count("the configuration has changed")
	if lines != 1 || l.log.count("at the next start") != 1 || !told() || l.node().MTU != 1400 {
		t.Errorf("%d lines about one change, told in the status %t, MTU %d", lines, told(), l.node().MTU)
	}
	l.put("config/config.json", strings.Replace(before, l.dir+"/net.d", "", 1)) // takes effect at the next start: no conflist
	if a.step(because(onFiles)); !told() || l.read("net.d/"+conflistName) != testConflist || !a.ready {
		t.Errorf("confDir is empty: told %t, conflist %q", told(), l.read("net.d/"+conflistName))
	}
	l.put("config/config.json", strings.Replace(before, "{", `{"routes": false, `, 1))
	if a.step(because(onFiles)); !told() || !a.config.Routes {
		t.Errorf("routes: told %t, routes %t", told(), a.config.Routes)
	}
	l.put("config/config.json", before)
	if a.step(because(onFiles)); told() || l.node().MTU != 1500 || !a.ready {
		t.Errorf("the configuration is that of the start: told %t, MTU %d", told(), l.node().MTU)
	}
}

// TestHeartbeats: the kubelets' periodic updates of Node objects cause no comparison.
func TestHeartbeats(t *testing.T) {
	l := newLab(t).ready()
	before := l.log.String()
	for i := range 100 {
		n := l.peer(2)
		n.Status.Conditions = []corev1.NodeCondition{{Reason: fmt.Sprint(i)}}
		l.api.put(n)
	}
	l.api.put(l.peer(4))
	l.has(full(2, 3, 4))
	l.await("one line", func() bool { return strings.Count(l.log.String()[len(before):], "changed routes") == 1 })
}
