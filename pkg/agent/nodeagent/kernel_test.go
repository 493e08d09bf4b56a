// SPDX-License-Identifier: Apache-2.0

package nodeagent

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/podlace/podlace/integration/kerneltest"
	"github.com/podlace/podlace/pkg/agent/noderoutes"
	"github.com/podlace/podlace/pkg/kernel"
	"github.com/podlace/podlace/pkg/restore"
	"github.com/podlace/podlace/pkg/store"
)

// blockNexthop adds, as another program would, a nexthop object with the ID that the agent needs for a node. free deletes it.
func (l *lab) blockNexthop(name string) (free func()) {
	l.Helper()
	host, err := kernel.Host()
	kerneltest.Must(l, err)
	l.Cleanup(host.Close)
	peer := noderoutes.Peer{Name: name, PodCIDR: netip.MustParsePrefix("10.244.2.0/24"), Gateway: netip.MustParseAddr("192.0.2.2")}
	want, _, _ := noderoutes.Plan(noderoutes.Self{}, []noderoutes.Peer{peer}, noderoutes.Ways(&host.NS, []netip.Addr{peer.Gateway}),
		noderoutes.Config{})
	other := want.Nexthops[0]
	other.Gateway = netip.MustParseAddr("192.0.2.254")
	kerneltest.Must(l, host.AddNexthop(other, 4))
	return func() { kerneltest.Must(l, host.DelNexthop(other.ID)) }
}

// TestKernelEvents deletes routes and sets the link down: the agent restores them without an event of the API server.
func TestKernelEvents(t *testing.T) {
	l := newLab(t).ready()
	link, err := netlink.LinkByName("up0")
	kerneltest.Must(t, err)
	for what, undo := range map[string]func() error{
		"one route": func() error {
			return netlink.RouteDel(&netlink.Route{Dst: kernel.IPNet(netip.MustParsePrefix("10.244.2.0/24"))})
		},
		"all routes": func() error { _, err := removeRoutes(); return err },
		"the link, and with it all of IPv4": func() error {
			kerneltest.Must(t, netlink.LinkSetDown(link))
			time.Sleep(300 * time.Millisecond)
			six, _ := netlink.ParseAddr("2001:db8::1/64") // which disappears with the link
			six.Flags = unix.IFA_F_NODAD
			err := netlink.LinkSetUp(link)
			_ = netlink.AddrReplace(link, six)
			l.defaultRoute()
			return err
		},
	} {
		began := time.Now()
		kerneltest.Must(t, undo())
		l.has(full(2, 3))
		t.Logf("%s: back after %v", what, time.Since(began))
	}
	l.await("all is fine again", func() bool { return l.state("n2") == "direct" && l.state("n3") == "direct" })
	if l.node().MTU != 1500 {
		t.Errorf("%+v: an uplink that was down changed node.json", l.node())
	}
}

// TestForeignDaemon: another program keeps deleting the agent's routes. They are restored less and less often, and the log says so once.
func TestForeignDaemon(t *testing.T) {
	l := newLab(t).ready()
	remove := func() {
		l.await("the route", func() bool { return slices.Contains(l.routes(), "10.244.2.0/24 192.0.2.2") })
		kerneltest.Must(t, netlink.RouteDel(&netlink.Route{Dst: kernel.IPNet(netip.MustParsePrefix("10.244.2.0/24"))}))
	}
	removed := 0
	for ; l.log.count("repeatedly undoes") == 0; time.Sleep(10 * time.Millisecond) {
		if removed++; removed > 10*restore.FreeRepairs {
			t.Fatal("it goes on for ever")
		}
		remove()
	}
	if removed <= restore.FreeRepairs {
		t.Errorf("%d repairs are too often", removed)
	}
	remove() // an event of the API server may have repaired it early
	for pause := time.Second; pause <= 2*time.Second; pause *= 2 {
		began := time.Now()
		remove()
		if took := time.Since(began); took < pause*9/10 { // a pause has no upper bound, because the machine may be slow
			t.Errorf("repaired after %v, want %v at least", took, pause)
		}
	}
	l.api.put(l.peer(4)) // changes of the cluster are not delayed
	began := time.Now()
	l.has(full(2, 3, 4))
	t.Logf("a new node after %v", time.Since(began))
	if l.log.count("repeatedly undoes") != 1 {
		t.Error("want one line")
	}
}

// TestForeignRoute: another program's conflicting route is kept and reported, or replaced if the key adopt has its protocol.
func TestForeignRoute(t *testing.T) {
	l := newLab(t)
	link, err := netlink.LinkByName("up0")
	kerneltest.Must(t, err)
	kerneltest.Must(t, netlink.RouteAdd(&netlink.Route{Dst: kernel.IPNet(netip.MustParsePrefix("10.244.2.0/24")),
		LinkIndex: link.Attrs().Index, Gw: []byte{192, 0, 2, 254}, Protocol: unix.RTPROT_BOOT}))
	l.ready()
	if !l.says("node n2 10.244.2.0/24", "conflict", "192.0.2.254", "remove the route, or add its protocol to adopt") ||
		slices.Contains(l.routes(), "10.244.2.0/24 192.0.2.2") {
		t.Errorf("%q, %q", l.state("n2"), l.routes())
	}
	l.put("config/config.json", strings.Replace(l.read("config/config.json"), "{", `{"adopt": ["boot"], `, 1))
	l.has(full(2, 3))
	l.await("no conflict", func() bool { return l.state("n2") == "direct" })
}

func TestNoDefaultRoute(t *testing.T) {
	l := newLab(t)
	kerneltest.Must(t, netlink.RouteDel(&netlink.Route{Gw: []byte{192, 0, 2, 254}}))
	l.ready()
	l.has(full(2, 3))
	if !l.says("node n9", "refused", "no route to 198.51.100.9") {
		t.Errorf("%q", l.state("n9"))
	}
}

// TestRestartWritesNothing: if kernel and files are in the wanted state, a restarted agent changes nothing.
func TestRestartWritesNothing(t *testing.T) {
	l := newLab(t).ready()
	l.await("the status is that of the last step", func() bool { return len(l.status().Peers) == 5 && l.status().Ready })
	time.Sleep(1500 * time.Millisecond) // delayed writes are done by then
	l.stop()
	changes := l.monitor(store.Root, filepath.Join(l.dir, "bin"), filepath.Join(l.dir, "net.d"))
	before := l.log.String()
	l.start()
	l.await("it is ready", func() bool { return strings.Count(l.log.String()[len(before):], "ready=true") == 1 })
	time.Sleep(time.Second)
	if got := changes(); len(got) > 0 {
		t.Errorf("%d changes: %q", len(got), got)
	}
	l.api.put(l.peer(4))
	l.has(full(2, 3, 4))
	l.await("the monitor sees changes", func() bool { return len(changes()) > 4 })
}

// monitor watches the kernel and folders. The returned function returns the changes since then.
func (l *lab) monitor(folders ...string) func() []string {
	l.Helper()
	changes, stop, err := kerneltest.Monitor(folders...)
	kerneltest.Must(l, err)
	l.Cleanup(stop)
	return changes
}

// TestFileEvents: plugins, conflist and node.json are restored after another program removed or changed them.
func TestFileEvents(t *testing.T) {
	l := newLab(t).ready()
	bridge, conflist, node := filepath.Join(l.dir, "bin/podlace-bridge"), filepath.Join(l.dir, "net.d", conflistName), store.Root+"/node.json"
	for _, path := range []string{bridge, conflist, node} {
		want, err := os.ReadFile(path)
		kerneltest.Must(t, err)
		back := func() bool { got, _ := os.ReadFile(path); return slices.Equal(got, want) }
		kerneltest.Must(t, os.Remove(path))
		l.await(path+" is back", back)
		kerneltest.Must(t, os.WriteFile(path, []byte("{}"), 0o644))
		l.await(path+" is as it was", back)
	}
	if l.log.count("files="+bridge) != 2 || l.log.count("wrote the conflist") != 3 || l.log.count("wrote node.json") != 3 {
		t.Error("not each repair is told")
	}
	kerneltest.Must(t, os.Chmod(bridge, 0o600))
	l.await("it can be run", func() bool { info, err := os.Stat(bridge); return err == nil && info.Mode().Perm() == 0o755 })
}
